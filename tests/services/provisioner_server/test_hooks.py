"""The hooks `exec`, `webhook` and `process` against real counterparts."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from protos.block.v1 import provisioner_pb2 as pb
from services.provisioner_server.hooks import HookError
from services.provisioner_server.hooks.command import Command
from services.provisioner_server.hooks.process import ENGINE, SIDECAR, Processes
from services.provisioner_server.hooks.webhook import Webhook

PATIENCE_S = 90.0
ACTION = pb.Action(
    action_id="p-7", kind=pb.ACTION_KIND_START, pool="p", num_instances=2, num_desired=4, why="because",
    numbers={"arrivals_per_s": 3.5},
)  # fmt: skip


def command(tmp_path: Path, code: str, **more: Any) -> Command:
    """A hook that runs a few lines of Python."""
    script = tmp_path / "hook.py"
    script.write_text(f"import json, os, sys, time\n{code}\n")
    return Command([sys.executable, str(script), str(tmp_path)], **more)


def test_a_command_receives_the_action_and_replies(tmp_path: Path) -> None:
    """JSON on standard input with the wire's names, and a reply on standard output."""
    hook = command(
        tmp_path,
        "a = json.load(sys.stdin); json.dump(a, open(sys.argv[1] + '/got', 'w'))\n"
        "print(json.dumps({'action_id': os.environ['BLOCK_ACTION_ID'], 'instances': [{'instance_id': 'x'}]}))",
    )
    reply = asyncio.run(hook.act(ACTION))
    assert [one.instance_id for one in reply.instances] == ["x"]
    got = json.loads((tmp_path / "got").read_text())
    assert (got["action_id"], got["kind"], got["num_instances"]) == ("p-7", "ACTION_KIND_START", 2)
    assert got["numbers"] == {"arrivals_per_s": 3.5}


@pytest.mark.parametrize(
    ("code", "reason", "permanent"),
    [
        ("sys.exit('no room')", "status 1: no room", False),
        ("print('nonsense')", "not a HookReply", False),
        ("print(json.dumps({'refused': True, 'message': 'never'}))", "refused: never", True),
        ("print(json.dumps({'action_id': 'p-8'}))", "names action p-8", False),
        ("time.sleep(600)", "longer than 0.5 s", False),
    ],
)
def test_the_reason_of_a_failed_command(tmp_path: Path, code: str, reason: str, permanent: bool) -> None:
    """A status, an invalid reply, a refusal, a command that hangs."""
    timeout_s = 0.5 if "sleep" in code else PATIENCE_S
    with pytest.raises(HookError, match=reason) as caught:
        asyncio.run(command(tmp_path, code, timeout_s=timeout_s).act(ACTION))
    assert caught.value.permanent is permanent


def test_a_command_runs_without_a_shell(tmp_path: Path) -> None:
    """Arguments are not interpreted."""
    marker = tmp_path / "made"
    asyncio.run(Command([sys.executable, "-c", "pass", f"; touch {marker}"]).act(ACTION))
    assert not marker.exists()
    with pytest.raises(HookError, match="no-such-command"):
        asyncio.run(Command(["no-such-command"]).act(ACTION))


@contextmanager
def flaky(statuses: list[int]) -> Iterator[tuple[str, list[tuple[dict[str, str], bytes]], list[str]]]:
    """Serve HTTP with a list of statuses, of which the last is repeated; 0 closes the connection.

    Also yields the received requests, and the actions that were carried out, once for each idempotency key.
    """
    received: list[tuple[dict[str, str], bytes]] = []
    done: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(({name.lower(): value for name, value in self.headers.items()}, body))
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            key = self.headers["idempotency-key"]
            if key not in done:
                done.append(key)
            if not status:
                self.connection.close()
                self.close_connection = True
                return
            answer = json.dumps({"action_id": key}).encode() if status == 200 else b"{}"
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/scale?x=1", received, done
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def posted(url: str, **more: Any) -> pb.HookReply:
    """Post the action."""
    hook = Webhook(url, "secret", first_pause_s=0.01, **more)
    try:
        return await hook.act(ACTION)
    finally:
        await hook.close()


def test_a_webhook_is_signed_and_repeated_under_one_key() -> None:
    """Errors, throttling and a connection that breaks after the work: received five times, carried out once."""
    with flaky([500, 429, 0, 503, 200]) as (url, received, done):
        assert asyncio.run(posted(url)).action_id == "p-7"
        assert done == ["p-7"]
        attempts = [json.loads(body)["attempt"] for _, body in received]
        assert len(attempts) == 5
        assert attempts == sorted(
            attempts
        )  # a request that a kept connection lost is repeated at once, with the same number
        for headers, body in received:
            signed = headers["x-block-timestamp"].encode() + b"." + body
            expected = "sha256=" + hmac.new(b"secret", signed, hashlib.sha256).hexdigest()
            assert headers["x-block-signature"] == expected
            assert abs(time.time() - int(headers["x-block-timestamp"])) < PATIENCE_S


def test_a_webhook_that_refuses_is_not_called_again() -> None:
    """A status of 400 is a permanent failure."""
    with flaky([400]) as (url, received, _):
        with pytest.raises(HookError, match="400") as caught:
            asyncio.run(posted(url))
        assert caught.value.permanent
        assert len(received) == 1


def test_a_webhook_gives_up_in_the_end() -> None:
    """After its attempts; the action is retried later."""
    with flaky([503]) as (url, received, _):
        with pytest.raises(HookError, match="503") as caught:
            asyncio.run(posted(url, attempts=3))
        assert not caught.value.permanent
        assert len(received) == 3


@pytest.mark.parametrize(("url", "secret", "named"), [("ftp://x", "s", "webhook"), ("http://x", "", "webhook_secret")])
def test_bad_webhook_settings_are_refused(url: str, secret: str, named: str) -> None:
    """By name."""
    with pytest.raises(ValueError, match=f"^{named}: "):
        Webhook(url, secret)


def test_processes_are_started_once_and_ended(tmp_path: Path) -> None:
    """The same action by two hooks starts one engine and one sidecar; they outlive the hooks, and end with a drain."""
    sleeper = f"{sys.executable} -c 'import time; time.sleep(600)' {{port}} {{name}} {{state}}"
    first, second = (Processes(tmp_path, engine_command=sleeper, end_s=5.0) for _ in range(2))
    action = pb.Action(action_id="p-1", kind=pb.ACTION_KIND_START, num_instances=1)

    async def test() -> None:
        (one,) = (await first.act(action)).instances
        pid = await first._pid("p-1-0", ENGINE)
        (same,) = (await second.act(action)).instances
        assert one == same
        assert await second._pid("p-1-0", ENGINE) == pid
        assert [found.instance_id for found in await second.instances()] == ["p-1-0"]
        await second.act(pb.Action(action_id="p-2", kind=pb.ACTION_KIND_DRAIN, instance_ids=["p-1-0"]))
        assert await second.instances() == []
        assert not any(second._runs("p-1-0", part) for part in (ENGINE, SIDECAR))
        await second.act(pb.Action(action_id="p-2", kind=pb.ACTION_KIND_DRAIN, instance_ids=["p-1-0"]))  # once more
        first._reap()
        assert not first._children

    asyncio.run(test())


def test_processes_end_with_a_hook_that_does_not_keep_them(tmp_path: Path) -> None:
    """A whole system on one machine leaves no process behind."""
    sleeper = f"{sys.executable} -c 'import time; time.sleep(600)'"
    hook = Processes(tmp_path, engine_command=sleeper, keep=False)

    async def test() -> None:
        await hook.act(pb.Action(action_id="p-1", kind=pb.ACTION_KIND_START, num_instances=2))
        assert len(await hook.instances()) == 2
        await hook.close()
        assert await hook.instances() == []
        assert not any(hook._runs(name, part) for name in ("p-1-0", "p-1-1") for part in (ENGINE, SIDECAR))

    asyncio.run(test())


def test_a_start_that_was_half_done_is_completed(tmp_path: Path) -> None:
    """Where the engine runs already, only its sidecar is started."""
    sleeper = f"{sys.executable} -c 'import time; time.sleep(600)'"
    hook = Processes(tmp_path, engine_command=sleeper, end_s=5.0)
    action = pb.Action(action_id="p-1", kind=pb.ACTION_KIND_START, num_instances=1)

    async def test() -> None:
        whole, hook._ensure = hook._ensure, lambda name, part, words: part == ENGINE and whole(name, part, words)
        await hook.act(action)
        pid = await hook._pid("p-1-0", ENGINE)
        assert await hook.instances() == []
        hook._ensure = whole
        await hook.act(action)
        assert await hook._pid("p-1-0", ENGINE) == pid
        assert len(await hook.instances()) == 1
        await hook.act(pb.Action(action_id="p-2", kind=pb.ACTION_KIND_STOP, instance_ids=["p-1-0"]))
        assert await hook.instances() == []

    asyncio.run(test())
