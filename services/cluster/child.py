"""One part of a cluster as a process: started, monitored, restarted when it exits, and stopped."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from scheduler.backoff import Backoff
from services.cluster.programs import BlockServer, Program
from services.http.client import HttpClient
from services.http.origin import origin_of
from services.logs import log_event
from services.supervised_task import supervised

log = logging.getLogger(__name__)

STOP_S = 40.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 8.0
STABLE_S = 30.0  # after so long a run the next restart has the first pause again
MAX_LINE_BYTES = 1 << 20
LINES_KEPT, LINES_LOGGED = 200, 20  # of the output, to report why a start failed
OUTPUT_S = 5.0  # maximum wait for the rest of the output of a process that has exited
POLL_S, PROGRESS_S = 0.25, 10.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # loaded here, since nothing may be loaded between fork and exec


class StartError(Exception):
    """A process exited, or did not serve in time, when it was started."""


class Child:
    """A named process of `block serve …` or another program; a restart keeps its port."""

    def __init__(
        self, name: str, *arguments: str, port: int = 0, proxy_port: int | None = None, program: Program | None = None
    ) -> None:
        """Take the program; `start` runs it."""
        self.name = name
        self.port = port
        self.proxy_port = proxy_port  # of a sidecar that mirrors an engine
        self.scheduler_port = 0  # of a gateway that decides in its own process
        self.metrics_port: int | None = None  # if it serves metrics on a port of their own
        self.num_restarts = 0
        self._program: Program = program or BlockServer(arguments=arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._serving = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._output: deque[str] = deque(maxlen=LINES_KEPT)

    @property
    def pid(self) -> int:
        """The current process, or the last one."""
        return self._process.pid if self._process is not None else 0

    @property
    def serves(self) -> bool:
        """Whether the process has reported that it serves, and has not exited since."""
        return self._serving.is_set()

    async def start(self) -> None:
        """Start the process and keep it running until `stop`; StartError if it does not serve."""
        await self._spawn()
        self._tasks.append(asyncio.create_task(supervised(f"supervising {self.name}", self._supervise)))

    async def stop(self) -> None:
        """Stop the process with SIGTERM, so that requests in progress finish; one that does not exit is killed."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process, signal.SIGTERM)
            try:
                await asyncio.wait_for(_exited(process), STOP_S)
            except TimeoutError:
                log_event(log, logging.WARNING, "process killed: it did not exit in time", part=self.name)
                _signal(process, signal.SIGKILL)
        if process is not None:
            _signal_all(process, signal.SIGKILL)
            await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _spawn(self) -> None:
        self._serving.clear()
        self._output.clear()
        program = self._program
        self._process = process = await _started(self.name, program, program.command_line(self.port, self.proxy_port))
        reading = asyncio.create_task(self._read_output(process))
        signals: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._serving.wait()),
            asyncio.create_task(_exited(process)),
        ]
        if program.health_url(self.port):
            signals.append(asyncio.create_task(self._poll_health()))
        try:
            done, _ = await asyncio.wait(
                [*signals, reading], timeout=program.start_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in signals:
                task.cancel()
        if not self._serving.is_set():
            late = "" if done else f" within {program.start_s:g} s"
            _signal_all(process, signal.SIGKILL)
            await process.wait()
            await asyncio.wait([reading], timeout=OUTPUT_S)
            reading.cancel()
            raise StartError(f"{self.name} did not start{late}: {self._error()}")
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(reading)

    def _error(self) -> str:
        """Find the error in the output; the last lines are logged as well, unless they have been already."""
        lines = list(self._output)
        for line in lines[-LINES_LOGGED:] if self._program.health_url(self.port) else ():
            log_event(log, logging.INFO, line, part=self.name)
        return self._program.error_in(lines)

    async def _poll_health(self) -> None:
        """Poll its health until it serves, and log the progress meanwhile."""
        client, origin = HttpClient(tls=self._program.tls), origin_of(self._program.health_url(self.port))
        started_s = logged_s = time.monotonic()
        try:
            while not self._serving.is_set():
                with suppress(OSError, TimeoutError, ValueError):
                    status, _ = await client.get(origin, b"/health", within_s=PROGRESS_S)
                    if status == HTTPStatus.OK:
                        log_event(log, logging.INFO, "serving", part=self.name, port=self.port)
                        self._serving.set()
                        return
                if time.monotonic() - logged_s > PROGRESS_S:
                    logged_s = time.monotonic()
                    last = next((text for text in reversed(self._output) if text.strip()), "")
                    last = self._program.parsed(last).event if last else "no output"
                    log_event(
                        log, logging.INFO, "loading", part=self.name, for_s=round(logged_s - started_s), last=last
                    )
                await asyncio.sleep(POLL_S)
        finally:
            client.close()

    async def _supervise(self) -> None:
        """Restart the process whenever it exits unexpectedly."""
        backoff = Backoff(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, random=random.random)
        while True:
            assert self._process is not None
            started_s = time.monotonic()
            status = await _exited(self._process)
            if self._stopping:
                return
            self._serving.clear()
            _signal_all(self._process, signal.SIGKILL)  # its own child processes, such as vLLM's engine core
            if time.monotonic() - started_s > STABLE_S:
                backoff.reset()
            pause_s = backoff.next_s()
            log_event(
                log, logging.WARNING, "process exited unexpectedly; restarting", part=self.name, status=status,
                pause_s=pause_s,
            )  # fmt: skip
            await asyncio.sleep(pause_s)
            self.num_restarts += 1
            try:
                await self._spawn()
            except StartError as error:
                log_event(log, logging.ERROR, str(error))

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        """Log the output of the process, and note when it serves."""
        assert process.stdout is not None
        while line := await _line_from(process.stdout):
            text = line.decode(errors="replace").rstrip()
            self._output.append(text)
            level, event, fields = self._program.parsed(text)
            if event == "proxying":
                self.proxy_port = int(fields.get("port", 0))
            if event == "serving" and fields:
                self.port = int(fields.get("port", self.port))
                self.metrics_port = fields.get("metrics_port")
                self.scheduler_port = fields.get("scheduler_port") or 0
                self._serving.set()
            log_event(log, level, event, part=self.name, **fields)


async def _started(name: str, program: Program, command: Sequence[str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES, start_new_session=True, preexec_fn=_end_with_parent,
            env={**os.environ, **program.environment},
        )  # fmt: skip
    except OSError as error:
        raise StartError(f"{name} did not start: {command[0]}: {error.strerror}") from None


async def _exited(process: asyncio.subprocess.Process) -> int | None:
    """Wait until the process exits; asyncio's own wait lasts until its children have closed its output, too."""
    waiting = asyncio.create_task(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait([waiting], timeout=POLL_S)
    finally:
        waiting.cancel()
    return process.returncode


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a process; asyncio's own method may reap one that has just exited, and then misses its status."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _signal_all(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a process and its own child processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _line_from(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:  # longer than MAX_LINE_BYTES
        return b"(a line too long to show)\n"


def _end_with_parent() -> None:
    """Have the kernel stop the new process when its parent exits for any reason."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:  # the parent has exited already
            os.kill(os.getpid(), signal.SIGTERM)
