"""Processes of benches: stand-ins and Block's servers that run during a block of code, and their processor time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from scripts import stand_ins
from scripts.bench_requests import PLACE

ROOT = Path(__file__).parents[1]
BLOCK = str(Path(sys.executable).with_name("block"))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
START_S = 120.0  # longest wait for a server to serve: its kernels may have to be compiled
END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server process."""

    process: subprocess.Popen[str]
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Its URL."""
        return f"{self.scheme}://{PLACE}:{self.port}"

    def cpu_s(self) -> float:
        """Processor seconds of the process and its children so far: all threads, user and system mode."""
        return sum(own_cpu_s(pid) for pid in family_of(self.process.pid))


def own_cpu_s(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended; 0 if it does not exist."""
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:15]) / TICKS_PER_S
    return 0.0


def family_of(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                yield from family_of(int(child))


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **streams: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the block of code ends."""
    own = {**os.environ, "PYTHONPATH": str(ROOT)} if environment is None else {**environment}
    with subprocess.Popen(command, text=True, cwd=ROOT, env=own, **streams) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def stand_in(part: str, *arguments: str) -> Iterator[Running]:
    """Run a stand-in that has one port."""
    with stand_ins_at(part, *arguments) as (process, ports):
        yield Running(process=process, port=ports[0])


class StandInSidecars(list[int]):
    """The ports of stand-ins for sidecars, which all run in one process."""

    process: subprocess.Popen[str]

    def cpu_s(self) -> float:
        """Return the processor time of the process."""
        return own_cpu_s(self.process.pid)


@contextmanager
def sidecars_running(num: int, together: int, *more: str) -> Iterator[StandInSidecars]:
    """Run stand-ins for sidecars, all in one process, `together` of them behind one port."""
    with stand_ins_at("sidecars", str(num), str(together), *more) as (process, ports):
        sidecars = StandInSidecars(ports)
        sidecars.process = process
        yield sidecars


@contextmanager
def stand_ins_at(part: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run stand-ins; the first line that they print has their ports."""
    with started([sys.executable, stand_ins.__file__, part, *arguments], stdout=subprocess.PIPE) as process:
        ports = [int(port) for port in (process.stdout.readline() if process.stdout else "").split()]
        if not ports:
            raise RuntimeError(f"the stand-in {part} did not start")
        yield process, ports


@contextmanager
def block_serving(what: str, *arguments: str) -> Iterator[Running]:
    """Run one of Block's servers by its command; the log has its port."""
    command = [BLOCK, "serve", what, "--port", "0", "--log-format", "json", *arguments]
    with tempfile.NamedTemporaryFile() as log, started(command, stderr=log) as process:
        yield Running(process=process, port=logged_port(process, log, what))


def logged_port(process: subprocess.Popen[str], log: IO[bytes], what: str) -> int:
    """Return the port in a server's log, as soon as it listens."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        ended = process.poll() is not None
        lines = Path(log.name).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        for line in lines:
            if line.endswith("\n") and line.startswith("{") and (entry := json.loads(line)).get("event") == "serving":
                return int(entry["port"])
        if ended:
            raise RuntimeError(f"block serve {what} ended: {last_line(log)}")
        time.sleep(0.02)
    raise RuntimeError(f"block serve {what} did not serve within {START_S:.0f} s")


def last_line(log: IO[bytes]) -> str:
    """Return the last line of a log."""
    lines = Path(log.name).read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")


def instance_flags(sidecars: Sequence[int], engines: Sequence[str] = ()) -> list[str]:
    """Return a scheduler's flags for instances: sidecars by port, and engines by URL if they exist."""
    urls = list(engines) or len(sidecars) * [f"http://{PLACE}:1"]
    return [
        f"--instance=i{number}={url},{PLACE}:{port}"
        for number, (url, port) in enumerate(zip(urls, sidecars, strict=True))
    ]
