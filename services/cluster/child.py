"""One part of a cluster as a process: started, listened to, started again when it dies, and ended in good order."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

from services.log_lines import say

log = logging.getLogger(__name__)

START_S = 120.0  # the longest wait for a process to say that it serves; the first one ever compiles the kernels
STOP_S = 40.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
WELL_S = 30.0  # a process that lived so long is started again at once when it dies
LONGEST_LINE = 1 << 20
REFUSAL = "block: "  # begins the one line of a command that cannot do what it was told
PR_SET_PDEATHSIG = 1


class StartError(Exception):
    """A process that ended, or said nothing, before it served."""


class Child:
    """`block serve …` with a name; it keeps the port that it got when it was first started."""

    def __init__(self, name: str, *arguments: str, port: int = 0, proxy_port: int | None = None) -> None:
        """Start nothing yet."""
        self.name = name
        self.port = port
        self.proxy_port = proxy_port  # where it stands before an engine
        self.metrics_port: int | None = None  # where it has one of its own
        self.num_restarts = 0
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._serving = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._last_words: deque[str] = deque(maxlen=5)

    @property
    def pid(self) -> int:
        """The process that runs now, or ran last."""
        return self._process.pid if self._process is not None else 0

    @property
    def serves(self) -> bool:
        """Tell whether the process has said that it serves, and has not ended since."""
        return self._serving.is_set()

    async def start(self) -> None:
        """Start the process, and see to it that there is one until `stop`; StartError where it does not serve."""
        await self._spawn()
        self._tasks.append(asyncio.create_task(self._keep_alive()))

    async def stop(self) -> None:
        """Let the process finish what it has under way and end; one that does not is killed."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                say(log, logging.WARNING, "killed, as it did not end", part=self.name)
                _signal(process, signal.SIGKILL)
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _spawn(self) -> None:
        self._serving.clear()
        proxy = () if self.proxy_port is None else ("--proxy-port", str(self.proxy_port))
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", "serve", *self._arguments,
            "--port", str(self.port), *proxy, "--log-format", "json",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        listening = asyncio.create_task(self._listen(process))
        serving = asyncio.create_task(self._serving.wait())
        try:
            await asyncio.wait([listening, serving], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if not self._serving.is_set():
            _signal(process, signal.SIGKILL)
            await process.wait()
            said = self._last_words[-1].removeprefix(REFUSAL) if self._last_words else "nothing"
            raise StartError(f"{self.name} did not start; it said: {said}")
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(listening)

    async def _keep_alive(self) -> None:
        """Start the process again whenever it ends unasked."""
        pause_s = FIRST_PAUSE_S
        while True:
            assert self._process is not None
            born_s = time.monotonic()
            status = await self._process.wait()
            if self._stopping:
                return
            self._serving.clear()
            pause_s = FIRST_PAUSE_S if time.monotonic() - born_s > WELL_S else min(LONGEST_PAUSE_S, 2 * pause_s)
            say(log, logging.WARNING, "ended unasked", part=self.name, status=status, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            self.num_restarts += 1
            try:
                await self._spawn()
            except StartError as error:
                say(log, logging.ERROR, str(error))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what the process says, and notice when it serves."""
        assert process.stderr is not None
        while line := await _line_from(process.stderr):
            text = line.decode(errors="replace").rstrip()
            said = _event_from(text)
            if said is None:
                self._last_words.append(text)
                if self.serves or not text.startswith(REFUSAL):  # else it is told when the start has failed
                    say(log, logging.WARNING, text, part=self.name)
                continue
            event, level = str(said.pop("event")), str(said.pop("level", "info"))
            if event == "proxying":
                self.proxy_port = int(said.get("port", 0))
            if event == "serving":
                self.port = int(said.get("port", self.port))
                self.metrics_port = said.get("metrics_port")
                self._serving.set()
            for name in ("time", "logger"):
                said.pop(name, None)
            self._last_words.append(event)
            say(log, logging.getLevelNamesMapping().get(level.upper(), logging.INFO), event, part=self.name, **said)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a process; asyncio's own way may take the status of one that has just ended, which it then misses."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def _line_from(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:  # a line beyond all measure
        return b"(a line too long to show)\n"


def _event_from(text: str) -> dict[str, Any] | None:
    try:
        said = json.loads(text)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "event" in said else None


def _end_with_parent() -> None:
    """Have the kernel end the new process when the one that started it dies, however that dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:  # it has died already
            os.kill(os.getpid(), signal.SIGTERM)
