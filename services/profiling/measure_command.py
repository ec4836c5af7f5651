"""`block profile measure` without its flags: runs or finds an engine, measures it, and fits its profile."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from predictor.fitting.engine_profile import EngineMeasurement, profile_name, profile_of
from predictor.profile import Profile
from predictor.request import SERVE
from services.http.client import HttpClient
from services.http.origin import origin_of
from services.profiling.measuring import MeasurementOptions, Progress, measure

NVIDIA_SMI_TIMEOUT_S = 10.0
POLL_S = 0.25
HEALTH_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 30.0
DEFAULT_PORT = "8000"  # of vLLM and of the emulated engine
STATE_FOLDER = Path("/dev/shm/block")  # noqa: S108 - where processes of one machine share memory
MAX_OUTPUT = 300  # characters of a failed engine's output


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Which engine to measure, for how long, and the profile's name; '' for a default."""

    engine_url: str = ""
    state_file: str = ""
    start: str = ""  # a command
    start_s: float = 600.0
    budget_s: float = 180.0
    seed: int = 0
    leg: str = SERVE
    api_key: str | None = None
    name: str = ""
    gpu: str = ""
    dtype: str = "auto"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        """Require exactly one engine."""
        if bool(self.engine_url) == bool(self.start):
            raise ValueError("engine_url: give the URL of a running engine, or a command to --start one, but not both")
        if self.engine_url and not self.state_file:
            raise ValueError("state_file: is missing; give the path that the engine has in BLOCK_STATE_FILE")


async def measured_profile(options: MeasureOptions, progress: Progress) -> tuple[Profile, EngineMeasurement]:
    """Measure an engine, and fit its profile."""
    async with AsyncExitStack() as stack:
        url, state_file = options.engine_url, options.state_file
        if options.start:
            engine = await stack.enter_async_context(run_engine(options.start, state_file, options.start_s))
            url, state_file = engine.url, engine.state_file
        measurement = MeasurementOptions(
            origin=origin_of(url.rstrip("/").removesuffix("/v1")),
            state_file=state_file,
            budget_s=options.budget_s,
            seed=options.seed,
            leg=options.leg,
            api_key=options.api_key,
        )
        measured = await measure(measurement, progress)
    gpu = options.gpu or _gpu()
    profile = profile_of(
        measured,
        name=options.name or profile_name(measured.model, gpu),
        gpu=gpu,
        tensor_parallel=options.tensor_parallel,
        dtype=options.dtype,
    )
    return profile, measured


def _gpu() -> str:
    """Return the name of this machine's GPU, or CPU."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607 - wherever it is
            capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "CPU"
    return (listed.stdout.splitlines() or ["CPU"])[0].strip() or "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """A running engine: its URL, its state file, and the leader of its process group."""

    url: str
    state_file: str
    pid: int


@asynccontextmanager
async def run_engine(command: str, state_file: str, timeout_s: float) -> AsyncIterator[EngineProcess]:
    """Run `vllm serve …` for the duration of the block; ValueError if it exits or does not serve in time."""
    words = shlex.split(command)
    if not words:
        raise ValueError("start: is empty")
    url = f"http://127.0.0.1:{_option(words, '--port') or DEFAULT_PORT}"
    state_path = state_file or str(STATE_FOLDER / f"profile-{os.getpid()}.state")
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "BLOCK_STATE_FILE": state_path},
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"start: {words[0]} cannot be run: {error.strerror}") from None
        try:
            deadline_s = time.monotonic() + timeout_s
            while not await _is_healthy(url):
                if process.returncode is not None:
                    output.seek(0)
                    last = output.read().decode(errors="replace").split()
                    tail = " ".join(last)[-MAX_OUTPUT:]
                    raise ValueError(f"start: the engine exited with status {process.returncode}: {tail}")
                if time.monotonic() > deadline_s:
                    raise ValueError(f"start: the engine does not serve at {url} after {timeout_s:g} s")
                await asyncio.sleep(POLL_S)
            yield EngineProcess(url=url, state_file=state_path, pid=process.pid)
        finally:
            await _stop(process)


async def _is_healthy(url: str) -> bool:
    client = HttpClient(connect_s=HEALTH_TIMEOUT_S)
    try:
        return (await client.get(origin_of(url), b"/health", within_s=HEALTH_TIMEOUT_S))[0] == 200
    except (OSError, TimeoutError):
        return False
    finally:
        client.close()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Terminate an engine's process group; kill it after a timeout."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _option(words: list[str], name: str) -> str | None:
    """Return the value of a flag, in either spelling."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
