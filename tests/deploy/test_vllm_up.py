"""`block up --vllm` with two real engines: clients, an engine killed under traffic, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import openai
import pytest

from predictor.profile import profile_to_json
from tests.conformance.vllm_side import interpreter
from tests.deploy.asking import Placed, stream
from tests.deploy.engines import ENGINE_FLAGS, NUM_SEATS, PROFILE, START_S, need_vllm, tiny_model
from tests.services.cluster.living import PATIENCE_S, until
from tests.services.cluster.test_up import expect_gone

pytestmark = pytest.mark.vllm

BLOCK = str(Path(sys.executable).with_name("block"))
MOST_TRIES = 5
STORY = "Once upon a time there was a scheduler that knew what it was doing. "
LIMIT_S = 2 * START_S
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
TABLES = """
[cluster]
policies = ["round_robin"]
port = 0
[vllm]
command = "{command}"
[predictor]
profile = "{profile}"
stall-s = 60.0
health-s = 5.0
[scheduler]
poll-s = 0.1
sidecar-deadline-ms = 20000
tagger-deadline-ms = 10000
[gateway]
schedule-s = 60.0
connect-s = 20.0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """The command, its output so far, and the official client of its gateway."""

    process: Process
    output: list[str]
    client: openai.AsyncOpenAI

    def processes(self) -> list[int]:
        """Return all its processes, and their child processes."""
        found, new = [], [self.process.pid]
        while new:
            threads = [path for pid in new for path in Path(f"/proc/{pid}/task").glob("*/children")]
            new = [int(child) for path in threads for child in path.read_text().split()]
            found += new
        return found

    def engine(self, name: str) -> int:
        """Return the process of an engine, by its state file."""
        marker = f"/{name}.state\0".encode()
        own = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(pid) for pid in own if marker in Path(f"/proc/{pid}/environ").read_bytes()]
        return pid


@asynccontextmanager
async def up(folder: Path, *arguments: str, engine_flags: tuple[str, ...] = ()) -> AsyncIterator[Up]:
    """Run `block up --vllm` within a context."""
    model, profile, tables = tiny_model(folder / "model"), folder / "profile.json", folder / "cluster.toml"
    profile.write_text(profile_to_json(PROFILE))
    tables.write_text(TABLES.format(command=interpreter().parent / "vllm", profile=profile))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    process = await asyncio.create_subprocess_exec(
        BLOCK, "up", "-c", str(tables), "--vllm", str(model), *arguments, "--", *ENGINE_FLAGS, *engine_flags,
        stderr=PIPE, env=environment | OFFLINE,
    )  # fmt: skip
    output: list[str] = []

    async def listen() -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            output.append(line.decode())

    listening = asyncio.create_task(listen())
    try:
        await until(lambda: any("/v1\n" in line for line in output) or process.returncode is not None, START_S)
        (url,) = [line.split()[1] for line in output if line.startswith("round_robin: ")] or [None]
        assert url, "".join(output)
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=4 * PATIENCE_S) as client:
            yield Up(process=process, output=output, client=client)
    except BaseException:
        sys.stderr.write("".join(output))
        raise
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await listening


def test_two_engines_start_recover_and_end(tmp_path: Path) -> None:
    """The streams of a killed engine continue on the other one, and it is restarted; Ctrl-C ends all processes."""
    need_vllm()

    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), up(tmp_path, "-n", "2") as running:
            bound = {name: bindings_of(running.engine(name)) for name in ("engine-0", "engine-1")}
            assert bound["engine-0"] != bound["engine-1"] or len(os.sched_getaffinity(0)) == 1
            await survives(running)
            left = running.processes()
            running.process.send_signal(signal.SIGINT)
            await asyncio.wait_for(running.process.wait(), PATIENCE_S)
            await asyncio.to_thread(expect_gone, left)

    asyncio.run(test())


def bindings_of(pid: int) -> set[bytes]:
    """Return an engine's environment variables for devices and cores."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {one for one in variables if one.startswith((b"CUDA_VISIBLE_DEVICES=", b"VLLM_CPU_OMP_THREADS_BIND="))}


async def survives(running: Up) -> None:
    """Kill an engine while both engines send streams, and wait until it serves again."""
    victim, other = "engine-1", "engine-0"
    streams = await flowing(running, victim)
    killed = running.engine(victim)
    os.kill(killed, signal.SIGKILL)
    ended = await asyncio.gather(*streams)
    assert {one.instance for one in ended} == {victim, other}
    assert {one.failure for one in ended} == {None}
    assert {one.num_tokens for one in ended} == {300}
    meanwhile = [await answered(running) for _ in range(4)]
    meanwhile += await answered_until_it_serves(running, victim)
    assert all(one.num_tokens == 30 for one in meanwhile)
    assert other in {one.instance for one in meanwhile}
    while (await answered(running)).instance != victim:
        pass
    assert running.engine(victim) != killed


async def answered(running: Up) -> Placed:
    """Get one response, a short one because an engine is loading."""
    return await stream(running.client, STORY, 30)


async def answered_until_it_serves(running: Up, loading: str) -> list[Placed]:
    """Get a response whenever the command reports that an engine is still loading."""

    def count(event: str) -> int:
        return sum(f"{event} part={loading}" in line for line in running.output)

    placed: list[Placed] = []
    while count("serving") < 2:
        await until(lambda: count("serving") == 2 or count("loading") > len(placed), START_S)
        placed.append(await answered(running))
    return placed


async def flowing(running: Up, instance: str) -> list[asyncio.Task[Placed]]:
    """Send streams until an instance sends one; where vLLM is late, a whole response arrives in one piece."""
    for attempt in range(MOST_TRIES):
        senders: dict[int, str] = {}  # of the streams that have started
        streams = [
            asyncio.create_task(
                stream(running.client, f"{attempt}{one}{STORY}", 300, partial(senders.__setitem__, one))
            )
            for one in range(NUM_SEATS)
        ]
        await until(partial(flows_or_is_over, streams, senders, instance))
        if flows(streams, senders, instance):
            return streams
    raise AssertionError(f"no stream ever came from {instance}")


def flows(streams: list[asyncio.Task[Placed]], senders: dict[int, str], instance: str) -> bool:
    """Return whether an instance is sending."""
    return any(sender == instance and not streams[one].done() for one, sender in senders.items())


def flows_or_is_over(streams: list[asyncio.Task[Placed]], senders: dict[int, str], instance: str) -> bool:
    """Return whether an instance is sending, or all streams have ended."""
    return flows(streams, senders, instance) or all(one.done() for one in streams)


def test_an_engine_that_cannot_start_is_reported_in_one_line(tmp_path: Path) -> None:
    """The line has vLLM's last error, and all other processes end."""
    need_vllm()
    tables = tmp_path / "cluster.toml"
    tables.write_text(f'[cluster]\ninstances = 1\nport = 0\n[vllm]\ncommand = "{interpreter().parent / "vllm"}"\n')

    async def test() -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            BLOCK, "up", "-c", str(tables), "--vllm", str(tmp_path / "nowhere"), "-p", "constant",
            "--log-level", "error", stderr=PIPE, env=os.environ | OFFLINE,
        )  # fmt: skip
        _, output = await asyncio.wait_for(process.communicate(), START_S)
        return process.returncode, output.decode()

    status, said = asyncio.run(test())
    assert status == 2
    assert said.startswith("block: engine-0 did not start: ")
    assert said.count("\n") == 1
    assert "nowhere" in said
