"""`block serve scheduler` as a process: its log, its errors, and the commands that call it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.services.cli.running import refusal
from tests.services.scheduler_server.running import Client, run
from tests.services.stub_sidecars import StubSidecar, sidecars

BLOCK = str(Path(sys.executable).with_name("block"))
INSTANCE = ("--instance", "a=http://h:1,h:2")


@asynccontextmanager
async def served(stubs: Sequence[StubSidecar], *flags: str, **environment: str) -> AsyncIterator[Served]:
    """Run a scheduler process while the block runs."""
    process = await asyncio.create_subprocess_exec(
        BLOCK, "serve", "scheduler", "--port", "0", "--sidecar-deadline-ms", "30000", "--log-format", "json",
        *(f"--instance={stub.name}=http://127.0.0.1:1,127.0.0.1:{stub.port}" for stub in stubs), *flags,
        env={**os.environ, **environment}, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        lines = [json.loads(await process.stderr.readline())]
        while lines[-1]["event"] != "serving":
            lines.append(json.loads(await process.stderr.readline()))
        port = lines[-1]["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = Client(channel)
            yield Served(process=process, port=port, channel=channel, client=client)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@dataclass(frozen=True, kw_only=True)
class Served:
    """A scheduler process and a client of it."""

    process: asyncio.subprocess.Process
    port: int
    channel: Any
    client: Client

    async def end(self) -> list[str]:
        """Send SIGTERM; return the events that were logged since it began to serve."""
        self.process.send_signal(signal.SIGTERM)
        _, log = await self.process.communicate()
        assert self.process.returncode == 0, log
        return [json.loads(line)["event"] for line in log.decode().splitlines()]


async def output_of(*arguments: str) -> tuple[int | None, str]:
    """Run a command; return its exit status and output."""
    process = await asyncio.create_subprocess_exec(BLOCK, *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


def test_it_serves_logs_its_port_and_drains() -> None:
    """Health, reflection, a decision by the policy of the environment, SIGTERM; a second one on its port is refused."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, served(stubs, BLOCK_SCHEDULER_POLICY="round_robin") as one:
            check = health_pb2_grpc.HealthStub(one.channel).Check
            health = await check(health_pb2.HealthCheckRequest(service="block.v1.Scheduler"))
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            ask = reflection_pb2_grpc.ServerReflectionStub(one.channel).ServerReflectionInfo
            call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = [service.name for service in (await call.read()).list_services_response.service]
            assert "block.v1.Scheduler" in names
            call.cancel()
            assert [await one.client.choose() for _ in range(3)] == ["a", "b", "a"]
            code, output = await output_of("serve", "scheduler", "--port", str(one.port), *INSTANCE)
            assert (code, output) == (2, f"block: port: {one.port} on 127.0.0.1 is in use\n")
            assert await one.end() == ["draining", "stopped"]

    run(test)


def test_two_processes_do_not_herd() -> None:
    """64 simultaneous requests over two schedulers onto 8 idle equal instances: 8 each, give or take one."""

    async def test() -> None:
        many = ("--max-conflicts", "1000")  # a slow machine has more conflicts
        async with sidecars(*"abcdefgh") as stubs, served(stubs, *many) as one, served(stubs, *many) as two:
            requests = [one.client.request() for _ in range(64)]
            decisions = await asyncio.gather(
                *((one, two)[number % 2].client.decide(request) for number, request in enumerate(requests))
            )
            assert all(7 <= len(stub.held) <= 9 for stub in stubs), [len(stub.held) for stub in stubs]
            assert {decision.scheduler_id.rpartition("/")[2] for decision in decisions} == {
                str(one.process.pid),
                str(two.process.pid),
            }
            await asyncio.gather(*(one.client.release(decision) for decision in decisions))
            assert not any(stub.held for stub in stubs)

    run(test)


def test_one_of_two_schedulers_is_killed() -> None:
    """The other one continues to serve, and releases the reservations of the killed one."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, served(stubs) as one, served(stubs) as two:
            decision = await one.client.decide()
            one.process.kill()
            await one.process.wait()
            assert await two.client.choose() in ("a", "b")
            assert await two.client.release(decision)

    run(test)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "instances: give one of"),
        ((*INSTANCE, "--instances-dns", "n:1:2"), "instances: give one of"),
        (("--instance", "a"), "must be ID="),
        (("--instance", "a=ftp://h:1,h:2"), "engine_url"),
        (("--instances-file", "missing.toml"), "missing.toml: cannot be read"),
        (("--instances-dns", "n"), "instances_dns"),
        ((*INSTANCE, "--policy", "blok"), "did you mean block"),
        ((*INSTANCE, "--tagger", "h"), "tagger: 'h' must be host:port"),
        ((*INSTANCE, "--sidecar-deadline-ms", "nan"), "sidecar_deadline_ms"),
        ((*INSTANCE, "--sidecar-deadline-ms", "soon"), "--sidecar-deadline-ms"),
        ((*INSTANCE, "--tagger-deadline-ms", "0"), "tagger_deadline_ms"),
        ((*INSTANCE, "--reservation-s", "601"), "reservation_s"),
        ((*INSTANCE, "--max-deciding", "0"), "max_deciding"),
        ((*INSTANCE, "--poll-s", "0"), "poll_s"),
        ((*INSTANCE, "--constant-tokens", "-1"), "constant_tokens"),
        ((*INSTANCE, "--polcy", "x"), "--policy"),
        ((*INSTANCE, "--insecure", "--host", "nowhere.invalid", "--port", "0"), "host: 'nowhere.invalid'"),
    ],
)
def test_a_bad_flag_is_named(flags: tuple[str, ...], named: str) -> None:
    """The error is one line, with exit status 2."""
    assert named in refusal("serve", "scheduler", *flags)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('instance = ["a=http://h:1,h:2", "a=http://h:3,h:4"]', "'a' is a duplicate"),
        ('instance = ["a=http://h:1,h:2"]\npolicy = "blok"', "did you mean block"),
        ('instance = ["a=http://h:1,h:2"]\npolcy = "block"', "polcy"),
    ],
)
def test_settings_come_from_a_file_too(tmp_path: Path, text: str, named: str) -> None:
    """The keys are the names of the flags; instances are a list."""
    path = tmp_path / "block.toml"
    path.write_text(f"[scheduler]\n{text}\nport = 0\n")
    assert named in refusal("serve", "scheduler", "-c", str(path))


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("i.toml", "instances = 3", "instances: must be a list"),
        ("i.toml", "[[instances]]\ninstance_id = 'a'\nengine_url = 'http://h:1'", "instances[0].sidecar_address"),
        ("i.toml", "[[instance]]", "instances"),
        ("i.json", "[1", "is not JSON"),
    ],
)
def test_a_bad_list_of_instances_is_named(tmp_path: Path, name: str, text: str, named: str) -> None:
    """At the start there is no earlier list to keep."""
    path = tmp_path / name
    path.write_text(text)
    error = refusal("serve", "scheduler", "--port", "0", "--instances-file", str(path))
    assert named in error
    assert str(path) in error


def test_decisions_are_explained_and_policies_are_switched(tmp_path: Path) -> None:
    """`block explain` and `block policies` call a running scheduler; each of their errors is one line."""

    async def test() -> None:
        record = str(tmp_path / "decisions.jsonl")
        async with sidecars("a", "b") as stubs, served(stubs, "--record", record) as one:
            await one.client.decide(one.client.request(request_id="why-me"))
            at = ("--scheduler", f"127.0.0.1:{one.port}")
            why, in_json, unknown = await asyncio.gather(
                output_of("explain", "why-me", *at),
                output_of("explain", "why-me", *at, "--json"),
                output_of("explain", "who", *at),
            )
            assert why[0] == 0, why
            assert why[1].startswith("why-me -> a\n  block over 2: ")
            assert len(json.loads(in_json[1])["candidates"]) == 2
            assert (unknown[0], unknown[1].count("\n")) == (2, 1)
            assert "who" in unknown[1]
            assert await output_of("policies", "use", "jsq", *at) == (0, f"127.0.0.1:{one.port}: jsq (before: block)\n")
            assert (await output_of("policies", "show", *at))[1].endswith("jsq; instances: a, b\n")
            status, output = await output_of("policies", "use", "jqs", *at)
            assert (status, output.count("\n")) == (2, 1)
            assert "jsq" in output
            await one.end()
        status, output = await output_of("explain", "why-me", "--record", record)
        assert output.startswith("why-me -> a\n")
        status, output = await output_of("policies", "show", *at)
        assert status == 2
        assert "no scheduler answers there" in output

    run(test)
