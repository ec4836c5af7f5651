"""Real vLLM engines on a CPU for scripts: one thread each, with profiles that are measured or kept."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from predictor.profile import Profile, profile_from_json, profile_to_json
from predictor.request import RequestFacts
from services.cluster.engines import free_port
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of
from services.profiling.measure_command import EngineProcess, MeasureOptions, measured_profile
from services.settings import seconds_of
from simulator.load_plan import Planned, Timing, arrival_times
from simulator.replay import replay

MODEL = "tiny"
HOST = "127.0.0.1"
VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
LONGEST, BLOCK_SIZE, NUM_BLOCKS, SEATS, STEP_TOKENS = 1024, 32, 320, 16, 512
# ShareGPT v3: mean and standard deviation of the logarithm, cut to lengths that these engines serve within seconds
PROMPT_LOG, MOST_PROMPT = (3.98, 1.67), 600
ANSWER_LOG, MOST_ANSWER = (5.37, 1.10), 256
WITHIN_S = 600.0
WARM_UP, WARM_UP_TOKENS = 8, 64  # replaces step-time corrections that were learnt during the start
NO_VARIABLES: Mapping[str, str] = {}

Measuring = Callable[[Sequence[EngineProcess], argparse.Namespace], Awaitable[list[Profile]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInstance:
    """One engine with its profile."""

    name: str
    engine: EngineProcess
    profile: Profile


def serve_command(
    arguments: argparse.Namespace,
    model: Path,
    number: int,
    variables: Mapping[str, str] = NO_VARIABLES,
    flags: str = "",
) -> str:
    """Return the command that starts an engine: one thread, on a core of its own."""
    vllm = Path(arguments.vllm).with_name("vllm")
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", **variables,
    }  # fmt: skip
    return (
        f"env {' '.join(f'{name}={value}' for name, value in environment.items())}"
        f" taskset -c {cores[number % len(cores)]}"
        f" {vllm} serve {model} --served-model-name {MODEL} --enforce-eager"
        f" --load-format {'dummy' if getattr(arguments, 'repeating', None) is None else 'auto'}"
        f" --max-model-len {LONGEST} --block-size {BLOCK_SIZE} --num-gpu-blocks-override {NUM_BLOCKS + 1}"
        f" --max-num-seqs {SEATS} --max-num-batched-tokens {STEP_TOKENS} --disable-uvicorn-access-log"
        f" --host {HOST} --port {free_port(HOST)} {flags}"
    )


async def profiled(
    names: Sequence[str], engines: Sequence[EngineProcess], arguments: argparse.Namespace, measuring: Measuring
) -> list[VllmInstance]:
    """Return the engines with profiles: kept ones, or new ones."""
    kept = None if arguments.profiles is None else Path(arguments.profiles)
    files = [] if kept is None else [kept / f"{name}.json" for name in names]
    if files and all(file.exists() for file in files):
        made = [profile_from_json(file.read_text(encoding="utf-8")) for file in files]
    else:
        made = await measuring(engines, arguments)
        for file, profile in zip(files, made, strict=False):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(profile_to_json(profile), encoding="utf-8")
    return [
        VllmInstance(name=name, engine=engine, profile=profile)
        for name, engine, profile in zip(names, engines, made, strict=True)
    ]


async def measured(engines: Sequence[EngineProcess], arguments: argparse.Namespace) -> list[Profile]:
    """Measure all engines at the same time, as `block profile measure` does."""
    options = [
        MeasureOptions(
            engine_url=engine.url,
            state_file=engine.state_file,
            budget_s=seconds_of(arguments.budget, "budget"),
            name=f"measured-{number}",
            gpu="CPU",
            seed=number,
        )
        for number, engine in enumerate(engines)
    ]
    made = await asyncio.gather(*(measured_profile(one, lambda _: None) for one in options))
    return [profile for profile, _ in made]


def planned(
    prompts: Sequence[int], answers: Sequence[int], rate: float, generator: np.random.Generator
) -> list[Planned]:
    """Draw arrivals for requests of these lengths."""
    due_s = arrival_times(len(prompts), Timing(kind="poisson", rate=rate), generator)
    return [
        Planned(request_id=str(number), due_s=due, prompt_tokens=prompt, output_tokens=answer)
        for number, (due, prompt, answer) in enumerate(zip(due_s, prompts, answers, strict=True))
    ]


def lengths(generator: np.random.Generator, law: tuple[float, float], limit: int, num: int) -> list[int]:
    """Draw log-normal lengths of at most `limit`; longer ones are drawn again."""
    drawn: list[int] = []
    while len(drawn) < num:
        length = round(float(generator.lognormal(*law)))
        if 2 <= length <= limit:
            drawn.append(length)
    return drawn


def capacity(instance: VllmInstance, prompts: Sequence[int], answers: Sequence[int]) -> float:
    """Return the requests per second that the engine model serves if all arrive at the beginning."""
    requests = [
        RequestFacts(request_id=str(number), prompt_tokens=prompt, output_tokens=answer)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    reader = Reader(instance.engine.state_file)
    try:
        config = replace(config_of(reader.read()), kv_role="")
    finally:
        reader.close()
    outcomes = replay(config, instance.profile.step_time, requests)
    return len(requests) / max(outcome.finished_s or 0.0 for outcome in outcomes)


def progress(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)
