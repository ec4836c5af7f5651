"""Small clusters for tests, and a plain simulator that runs one engine object after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.outcome import Outcome
from predictor.profile import load_profile
from predictor.request import RequestFacts
from predictor.step_time import StepTime
from simulator.fleet import InstanceSpec
from simulator.workload import RequestLengths, Workload, at_rate, poisson_gaps, workload

SECOND = StepTime(constant_s=1.0, empty_s=1.0)  # every step takes a second
A30 = load_profile("llama-2-7b-a30").step_time


def config(**changes: Any) -> EngineConfig:
    """An engine that a few requests fill."""
    return EngineConfig(**{
        "max_num_seqs": 8, "max_num_batched_tokens": 128, "num_gpu_blocks": 121, "max_model_len": 512,
        "enable_prefix_caching": False, **changes,
    })  # fmt: skip


def lengths(num: int, seed: int = 0, max_tokens: int = 400) -> RequestLengths:
    """Draw lengths with heavy tails that fit `config`."""
    generator = np.random.default_rng(seed)
    prompts = np.clip(generator.lognormal(3.5, 1.2, num).astype(np.int64), 1, max_tokens - 100)
    outputs = np.clip(generator.lognormal(3.5, 0.9, num).astype(np.int64), 1, 100)
    return RequestLengths(prompt_tokens=prompts, output_tokens=outputs)


def poisson(num: int, rate: float, seed: int = 0, **more: Any) -> Workload:
    """Requests of a Poisson process."""
    return workload(lengths(num, seed, **more), at_rate(poisson_gaps(num, np.random.default_rng(seed + 1)), rate))


def families(num: int, rate: float) -> tuple[Workload, list[list[str]]]:
    """Requests of five families that share the beginnings of their prompts, and the names of their prompts' blocks."""
    generator = np.random.default_rng(2)
    size = 16
    names, contents, first = [], [], [0]
    numbers: dict[tuple[int, int], int] = {}
    for number in range(num):
        family, shared, own = generator.integers(5), int(generator.integers(1, 12)), int(generator.integers(0, 6))
        row = [(family, place) for place in range(shared)] + [(number, -place - 1) for place in range(own)]
        names.append([f"{name}" for name in row])
        contents += [numbers.setdefault(name, len(numbers)) for name in row]
        first.append(len(contents))
    work = workload(
        RequestLengths(
            prompt_tokens=np.array([len(row) * size + 5 for row in names]),
            output_tokens=generator.integers(1, 60, num),
            first_content=np.array(first),
            contents=np.array(contents),
            block_tokens=size,
        ),
        at_rate(poisson_gaps(num, generator), rate),
    )
    return work, names


def specs(num: int = 3, step_time: StepTime = A30, **changes: Any) -> list[InstanceSpec]:
    """Equal instances."""
    return [InstanceSpec(config=config(**changes), step_time=step_time)] * num


def request(work: Workload, number: int, names: Sequence[str] = ()) -> RequestFacts:
    """One request of a workload, as a request of the engine model."""
    return RequestFacts(
        request_id=str(number),
        prompt_tokens=int(work.lengths.prompt_tokens[number]),
        output_tokens=int(work.lengths.output_tokens[number]),
        arrival_s=float(work.arrival_s[number]),
        prefix_hashes=tuple(names),
    )


def plain_score(engine: Engine, policy: str, candidate: RequestFacts, now_s: float) -> float:
    """Score one engine directly by the policy's formula."""
    head = engine.state.engine[0]
    rows = engine.state.requests
    pending = [slot for slot in engine.slots.values() if rows[slot].status == 0]
    waiting = [slot for slot in engine.slots.values() if rows[slot].status == 1] + pending
    running = len(engine.running())
    if policy == "llumnix":
        size = engine.config.block_size
        needed = sum(-(-(int(rows[slot].prompt_tokens) + int(rows[slot].output_tokens)) // size) for slot in waiting)
        return -(int(head.num_free_blocks) - needed) / max(running, 1)
    if policy == "jsq":
        return 4 * len(waiting) + running
    delays = policy != "block"
    (forecast,) = Forecaster(engine).forecast(  # a new one, without kept state
        [candidate], now_s, delays=delays
    )
    return forecast.e2e_s + (0.05 * forecast.delay_sum_s if delays else 0.0)


def plain_run(
    made: Sequence[InstanceSpec], work: Workload, policy: str, names: Any = None
) -> tuple[list[int], list[Outcome]]:
    """Serve a workload; return the instance and the outcome of each request."""
    engines = [Engine(spec.config, spec.step_time) for spec in made]
    chosen = []
    for number in range(len(work)):
        now_s = float(work.arrival_s[number])
        candidate = request(work, number, names=names[number] if names else ())
        scores = []
        for engine in engines:
            engine.advance(now_s)
            scores.append(plain_score(engine, policy, candidate, now_s))
        index = scores.index(min(scores))
        engines[index].add(candidate)
        chosen.append(index)
    outcomes = {}
    for engine in engines:
        engine.advance()
        for name in engine.slots:
            outcomes[int(name)] = engine.outcome(name)
    ended = [outcomes[number] for number in range(len(work))]
    return chosen, ended
