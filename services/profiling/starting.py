"""An engine started to be measured, and ended when that is done."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from services.http.client import HttpClient, origin_of

POLL_S = 0.25
ASK_S = 5.0
STOP_S = 30.0
USUAL_PORT = "8000"  # vLLM's and the emulated engine's
STATE_FOLDER = Path("/dev/shm/block")  # noqa: S108 - where processes of one machine share memory
LAST_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Where an engine can be asked, and seen; all its processes are of the session that `pid` leads."""

    url: str
    state_file: str
    pid: int


@asynccontextmanager
async def started(command: str, state_file: str, patience_s: float) -> AsyncIterator[Started]:
    """Run `vllm serve …` while the block runs; ValueError where it ends, or does not serve in time."""
    words = shlex.split(command)
    if not words:
        raise ValueError("start: is empty")
    url = f"http://127.0.0.1:{_option(words, '--port') or USUAL_PORT}"
    shown = state_file or str(STATE_FOLDER / f"profile-{os.getpid()}.state")
    with tempfile.TemporaryFile() as said:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
                env={**os.environ, "BLOCK_STATE_FILE": shown},
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"start: {words[0]} cannot be run: {error.strerror}") from None
        try:
            deadline_s = time.monotonic() + patience_s
            while not await _is_healthy(url):
                if process.returncode is not None:
                    said.seek(0)
                    last = said.read().decode(errors="replace").split()
                    words_s = " ".join(last)[-LAST_WORDS:]
                    raise ValueError(f"start: it ended with status {process.returncode}: {words_s}")
                if time.monotonic() > deadline_s:
                    raise ValueError(f"start: it does not serve at {url} after {patience_s:g} s")
                await asyncio.sleep(POLL_S)
            yield Started(url=url, state_file=shown, pid=process.pid)
        finally:
            await _end(process)


async def _is_healthy(url: str) -> bool:
    client = HttpClient(connect_s=ASK_S)
    try:
        return (await client.get(origin_of(url), b"/health", within_s=ASK_S))[0] == 200
    except (OSError, TimeoutError):
        return False
    finally:
        client.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask it to end, and then see to it; with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _option(words: list[str], name: str) -> str | None:
    """Find what a flag says, in either spelling."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
