"""`process`: instances on this machine, an engine and its sidecar each, which outlive the provisioner.

Each process holds a lock on a file for its whole life. Before starting it, any provisioner sees by that lock whether it
runs already, so that a repeated action starts nothing twice.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from services.provisioner_server.hooks import Hook, HookError
from services.security.certificates import engine_access

ENGINE, SIDECAR = "engine", "sidecar"
OURS = (sys.executable, "-m", "services.cli", "serve")
# A process writes its id before it runs the program, as the provisioner that started it may be gone already.
WRITE_PID = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"
PORTS = range(20_000, 32_000)
POLL_S = 0.05
PID_S = 20.0
CLOSE_S = 15.0  # for all instances, where they end with the provisioner
END_S = 60.0  # for an instance that is drained; its engine finishes its requests first


class Processes(Hook):
    """Starts and ends engines and sidecars; `engine_command` may contain {port}, {name} and {state}."""

    def __init__(  # noqa: PLR0913 - the settings of this hook
        self, folder: Path, *, engine_command: str = "", engine_flags: str = "", sidecar_flags: str = "",
        host: str = "127.0.0.1", end_s: float = END_S, keep: bool = True,
    ) -> None:  # fmt: skip
        """Set what to start, and where."""
        self._folder, self._host, self._end_s, self._keep = folder, host, end_s, keep
        self._engine_command = shlex.split(engine_command)
        self._engine_flags, self._sidecar_flags = shlex.split(engine_flags), shlex.split(sidecar_flags)
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Start instances that do not run, or end those that do."""
        if action.kind == pb.ACTION_KIND_START:
            names = [f"{action.action_id}-{number}" for number in range(action.num_instances)]
            return pb.HookReply(action_id=action.action_id, instances=[self._start(name) for name in names])
        drain_s = self._end_s if action.kind == pb.ACTION_KIND_DRAIN else 0.0
        await asyncio.gather(*(self._end(name, drain_s) for name in action.instance_ids))
        return pb.HookReply(action_id=action.action_id)

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Return the instances whose two processes run."""
        self._reap()
        if not self._folder.is_dir():
            return []
        names = sorted(path.parent.name for path in self._folder.glob("*/instance.json"))
        return [self._instance(name) for name in names if all(self._runs(name, part) for part in (ENGINE, SIDECAR))]

    async def close(self) -> None:
        """End all instances, unless they are kept."""
        if self._keep or not self._folder.is_dir():
            return
        names = [path.parent.name for path in self._folder.glob("*/instance.json")]
        await asyncio.gather(*(self._end(name, min(self._end_s, CLOSE_S)) for name in names))

    # Processes.

    def _start(self, name: str) -> common_pb2.Instance:
        home = self._folder / name
        home.mkdir(parents=True, exist_ok=True)
        where = home / "instance.json"
        if not where.exists():
            ports = free_ports(self._host, 2)
            fresh = home / "instance.json.new"
            fresh.write_text(json.dumps({"engine_port": ports[0], "sidecar_port": ports[1]}), encoding="utf-8")
            fresh.rename(where)
        instance = self._instance(name)
        engine_port = instance.engine_url.rpartition(":")[2]
        sidecar_port = instance.sidecar_address.rpartition(":")[2]
        state = str(home / "engine.state")
        engine = [word.format(port=engine_port, name=name, state=state) for word in self._engine_command] or [
            *OURS, "engine", "--host", self._host, "--port", engine_port, "--state-file", state, *self._engine_flags,
        ]  # fmt: skip
        sidecar = [
            *OURS, "predictor", "--host", self._host, "--port", sidecar_port, "--instance-id", name, "--engine-url",
            instance.engine_url, "--state-file", state, *self._sidecar_flags,
        ]  # fmt: skip
        self._ensure(name, ENGINE, engine)
        self._ensure(name, SIDECAR, sidecar)
        return instance

    def _instance(self, name: str) -> common_pb2.Instance:
        ports = json.loads((self._folder / name / "instance.json").read_text(encoding="utf-8"))
        return common_pb2.Instance(
            instance_id=name,
            engine_url=f"{engine_access().engine_scheme}://{self._host}:{ports['engine_port']}",
            sidecar_address=f"{self._host}:{ports['sidecar_port']}",
        )

    def _ensure(self, name: str, part: str, words: Sequence[str]) -> None:
        """Start a process unless it runs: it inherits the lock, and holds it until it ends."""
        home = self._folder / name
        handle = _locked(home / f"{part}.lock")
        if handle is None:
            return
        try:
            with (home / f"{part}.log").open("ab") as out:
                child = subprocess.Popen(  # noqa: S603 - the command is the operator's
                    [sys.executable, "-c", WRITE_PID, str(home / f"{part}.pid"), *words],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(handle,), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise HookError(f"{words[0]}: {error.strerror}") from None
        finally:
            os.close(handle)
        self._children[child.pid] = child

    def _runs(self, name: str, part: str) -> bool:
        path = self._folder / name / f"{part}.lock"
        if not path.exists():
            return False
        handle = _locked(path)
        if handle is None:
            return True
        os.close(handle)
        return False

    async def _end(self, name: str, drain_s: float) -> None:
        """Terminate an engine, and then its sidecar; kill a process that does not end in time."""
        for part in (ENGINE, SIDECAR):
            if not self._runs(name, part):
                continue
            pid = await self._pid(name, part)
            for number, wait_s in ((signal.SIGTERM, drain_s or 1.0), (signal.SIGKILL, 10.0)):
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)
                if await self._ended(name, part, wait_s):
                    break
            else:
                raise HookError(f"{name}: its {part} does not end, even when killed")
        (self._folder / name / "instance.json").unlink(missing_ok=True)

    async def _pid(self, name: str, part: str) -> int:
        """Read the id that a process wrote; it may have started just now."""
        path = self._folder / name / f"{part}.pid"
        deadline_s = asyncio.get_running_loop().time() + PID_S
        while asyncio.get_running_loop().time() < deadline_s:
            if path.exists() and (text := path.read_text(encoding="ascii")):
                return int(text)
            await asyncio.sleep(POLL_S)
        raise HookError(f"{name}: its {part} runs, and has not written its process id")

    async def _ended(self, name: str, part: str, within_s: float) -> bool:
        deadline_s = asyncio.get_running_loop().time() + within_s
        while self._runs(name, part):
            if asyncio.get_running_loop().time() > deadline_s:
                return False
            self._reap()
            await asyncio.sleep(POLL_S)
        self._reap()
        return True

    def _reap(self) -> None:
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]


def free_ports(host: str, num: int) -> list[int]:
    """Find unused ports below the range from which systems assign ports to connections."""
    ports: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as attempt, suppress(OSError):
            attempt.bind((host, port))
            ports.append(port)
        if len(ports) == num:
            return ports
    raise HookError(f"no port of {PORTS[0]} to {PORTS[-1]} is free")


def _locked(path: Path) -> int | None:
    """Lock a file; None where a process holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
