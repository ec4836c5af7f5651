"""One part of a cluster as a process: started, listened to, started again when it dies, and ended in good order."""

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
from services.cluster.programs import OurServer, Program
from services.http.client import HttpClient, origin_of
from services.logs import log_event
from services.supervised_task import supervised

log = logging.getLogger(__name__)

STOP_S = 40.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 8.0
WELL_S = 30.0  # a process that lived so long is started again at once when it dies
LONGEST_LINE = 1 << 20
MOST_LINES, MOST_TOLD = 200, 20  # kept, to tell what was wrong
LAST_WORDS_S = 5.0
ASK_EVERY_S, TELL_EVERY_S = 0.25, 10.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # here, since nothing may be loaded between fork and exec


class StartError(Exception):
    """A process that ended, or said nothing, before it served."""


class Child:
    """`block serve …`, or another program, with a name; it keeps the port that it got when it was first started."""

    def __init__(
        self, name: str, *arguments: str, port: int = 0, proxy_port: int | None = None, program: Program | None = None
    ) -> None:
        """Start nothing yet."""
        self.name = name
        self.port = port
        self.proxy_port = proxy_port  # where it stands before an engine
        self.metrics_port: int | None = None  # where it has one of its own
        self.num_restarts = 0
        self._program: Program = program or OurServer(arguments=arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._serving = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._last_words: deque[str] = deque(maxlen=MOST_LINES)

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
        self._tasks.append(asyncio.create_task(supervised(f"keeping {self.name} alive", self._keep_alive)))

    async def stop(self) -> None:
        """Let the process finish what it has under way and end; one that does not is killed."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process, signal.SIGTERM)
            try:
                await asyncio.wait_for(_ended(process), STOP_S)
            except TimeoutError:
                log_event(log, logging.WARNING, "killed, as it did not end", part=self.name)
                _signal(process, signal.SIGKILL)
        if process is not None:
            _signal_all(process, signal.SIGKILL)
            await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _spawn(self) -> None:
        self._serving.clear()
        self._last_words.clear()
        program = self._program
        self._process = process = await _begun(self.name, program, program.words(self.port, self.proxy_port))
        listening = asyncio.create_task(self._listen(process))
        signs: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._serving.wait()),
            asyncio.create_task(_ended(process)),
        ]
        if program.asked_at(self.port):
            signs.append(asyncio.create_task(self._ask()))
        try:
            done, _ = await asyncio.wait(
                [*signs, listening], timeout=program.start_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in signs:
                task.cancel()
        if not self._serving.is_set():
            late = "" if done else f" within {program.start_s:g} s"
            _signal_all(process, signal.SIGKILL)
            await process.wait()
            await asyncio.wait([listening], timeout=LAST_WORDS_S)
            listening.cancel()
            raise StartError(f"{self.name} did not start{late}; it said: {self._complaint()}")
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(listening)

    def _complaint(self) -> str:
        """Tell in a line what was wrong, and more for those who want to know."""
        words = list(self._last_words)
        for line in words[-MOST_TOLD:] if self._program.asked_at(self.port) else ():  # else they have been told already
            log_event(log, logging.INFO, line, part=self.name)
        return self._program.complaint(words)

    async def _ask(self) -> None:
        """Ask until it says that it serves, and tell meanwhile how far it is."""
        client, origin = HttpClient(), origin_of(self._program.asked_at(self.port))
        began_s = told_s = time.monotonic()
        try:
            while not self._serving.is_set():
                with suppress(OSError, TimeoutError, ValueError):
                    status, _ = await client.get(origin, b"/health", within_s=TELL_EVERY_S)
                    if status == HTTPStatus.OK:
                        log_event(log, logging.INFO, "serving", part=self.name, port=self.port)
                        self._serving.set()
                        return
                if time.monotonic() - told_s > TELL_EVERY_S:
                    told_s = time.monotonic()
                    last = next((text for text in reversed(self._last_words) if text.strip()), "")
                    last = self._program.understood(last).event if last else "nothing"
                    log_event(log, logging.INFO, "loading", part=self.name, for_s=round(told_s - began_s), last=last)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            client.close()

    async def _keep_alive(self) -> None:
        """Start the process again whenever it ends unasked."""
        backoff = Backoff(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, random=random.random)
        while True:
            assert self._process is not None
            born_s = time.monotonic()
            status = await _ended(self._process)
            if self._stopping:
                return
            self._serving.clear()
            _signal_all(self._process, signal.SIGKILL)  # what it has left behind, such as a vLLM's engine
            if time.monotonic() - born_s > WELL_S:
                backoff.reset()
            pause_s = backoff.next_s()
            log_event(log, logging.WARNING, "ended unasked", part=self.name, status=status, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            self.num_restarts += 1
            try:
                await self._spawn()
            except StartError as error:
                log_event(log, logging.ERROR, str(error))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what the process says, and notice when it serves."""
        assert process.stdout is not None
        while line := await _line_from(process.stdout):
            text = line.decode(errors="replace").rstrip()
            self._last_words.append(text)
            level, event, said = self._program.understood(text)
            if event == "proxying":
                self.proxy_port = int(said.get("port", 0))
            if event == "serving" and said:
                self.port = int(said.get("port", self.port))
                self.metrics_port = said.get("metrics_port")
                self._serving.set()
            log_event(log, level, event, part=self.name, **said)


async def _begun(name: str, program: Program, words: Sequence[str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            limit=LONGEST_LINE, start_new_session=True, preexec_fn=_end_with_parent,
            env={**os.environ, **program.environment},
        )  # fmt: skip
    except OSError as error:
        raise StartError(f"{name} did not start; {words[0]}: {error.strerror}") from None


async def _ended(process: asyncio.subprocess.Process) -> int | None:
    """Wait for its end, and not also, as asyncio does, for those that it left behind to let go of its output."""
    waiting = asyncio.create_task(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait([waiting], timeout=ASK_EVERY_S)
    finally:
        waiting.cancel()
    return process.returncode


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a process; asyncio's own way may take the status of one that has just ended, which it then misses."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _signal_all(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a process and those that it has started, or those that it has left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _line_from(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:  # a line beyond all measure
        return b"(a line too long to show)\n"


def _end_with_parent() -> None:
    """Have the kernel end the new process when the one that started it dies, however that dies."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:  # it has died already
            os.kill(os.getpid(), signal.SIGTERM)
