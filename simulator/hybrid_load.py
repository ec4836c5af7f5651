"""One engine that serves real-time requests, and best-effort ones in batches: the next when the last one has ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from predictor.config import require_count
from predictor.engine import Engine
from predictor.request import BEST_EFFORT, REAL_TIME, RequestFacts, Slo
from predictor.state import FINISHED
from simulator.field_checks import require_number, require_string
from simulator.load_plan import lengths_of, whole
from simulator.traffic import draw_workload

if TYPE_CHECKING:
    from simulator.scenario import Scenario

LOOK_S = 0.05  # how often the client of the best-effort requests looks whether its batch has ended
LOWER_PRIORITY = 1  # of best effort, for rules that know priorities and no classes


@dataclass(frozen=True, slots=True, kw_only=True)
class BestEffort:
    """Best-effort requests: `batch` at once, with lengths drawn for each; the run takes `for_s`. 0: none."""

    batch: int = 0
    prompt_tokens: str = "uniform:512:1024"
    output_tokens: str = "uniform:32:128"
    for_s: float = 600.0

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        require_count("best_effort.batch", self.batch, at_least=0)
        for name in ("prompt_tokens", "output_tokens"):
            require_string(f"best_effort.{name}", getattr(self, name))
            lengths_of(getattr(self, name), f"best_effort.{name}")
        require_number("best_effort.for_s", self.for_s, above=0)


def serve_hybrid(scenario: Scenario, rate: float, seed: int) -> dict[str, Any]:
    """Serve real-time requests at a rate and best effort beside them; summarise both.

    Requests count that arrive, and best effort that ends, within the run; real-time requests are then served to their
    end.
    """
    specs = scenario.instance_specs()
    if len(specs) != 1:
        raise ValueError(f"instances.count: an experiment of kind hybrid has one instance, not {len(specs)}")
    if scenario.mix:
        raise ValueError("mix: an experiment of kind hybrid has its targets in slo, and no mix")
    until_s = scenario.best_effort.for_s
    engine = Engine(specs[0].config, specs[0].step_time)
    urgent = _real_time(scenario, rate, seed)
    if not urgent:
        raise ValueError(f"rates: no real-time request arrives within {until_s:g} s at {rate:g}/s")
    for request in urgent:
        engine.add(request)
    batches = np.random.default_rng([seed, 21])
    served = _run(engine, scenario.best_effort, batches)
    engine.advance(until_s)
    while any(engine.outcome(request.request_id).finished_s is None for request in urgent):
        engine.advance(engine.now_s + 10.0)
    return {**_real_time_summary(scenario, engine, urgent), **_best_effort_summary(engine, served, until_s)}


def _real_time(scenario: Scenario, rate: float, seed: int) -> list[RequestFacts]:
    until_s, slo = scenario.best_effort.for_s, scenario.slo
    num = math.ceil(rate * until_s + 6 * math.sqrt(rate * until_s)) + 10
    drawn = draw_workload(
        replace(scenario.traffic, num_requests=num), scenario.tags, scenario.max_request_tokens(), rate, seed
    )
    return [
        RequestFacts(
            request_id=f"real-time-{index}",
            prompt_tokens=int(prompt),
            output_tokens=int(output),
            arrival_s=float(arrival_s),
            request_class=REAL_TIME,
            slo=Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),
        )
        for index, (prompt, output, arrival_s) in enumerate(
            zip(drawn.lengths.prompt_tokens, drawn.lengths.output_tokens, drawn.arrival_s, strict=True)
        )
        if arrival_s < until_s
    ]


def _run(engine: Engine, best_effort: BestEffort, generator: np.random.Generator) -> list[str]:
    """Run the engine, and submit best-effort batches; return the ids of their requests."""
    names: list[str] = []
    now_s = 0.0
    while best_effort.batch > 0 and now_s < best_effort.for_s:
        batch = _batch(best_effort, generator, len(names), max(now_s, engine.now_s))
        slots = [engine.add(request) for request in batch]
        names += [request.request_id for request in batch]
        while now_s < best_effort.for_s and (engine.state.requests["status"][slots] != FINISHED).any():
            now_s += LOOK_S
            engine.advance(now_s)
    return names


def _batch(best_effort: BestEffort, generator: np.random.Generator, first: int, arrival_s: float) -> list[RequestFacts]:
    prompts = whole(lengths_of(best_effort.prompt_tokens, "")(generator, best_effort.batch))
    answers = whole(lengths_of(best_effort.output_tokens, "")(generator, best_effort.batch))
    return [
        RequestFacts(
            request_id=f"best-effort-{first + index}",
            prompt_tokens=prompt,
            output_tokens=output,
            arrival_s=arrival_s,
            request_class=BEST_EFFORT,
            priority=LOWER_PRIORITY,
        )
        for index, (prompt, output) in enumerate(zip(prompts, answers, strict=True))
    ]


def _real_time_summary(scenario: Scenario, engine: Engine, requests: list[RequestFacts]) -> dict[str, Any]:
    outcomes = [engine.outcome(request.request_id) for request in requests]
    ttft_s = np.array([one.ttft_s for one in outcomes], float)
    tpot_s = np.array([one.tpot_s for one in outcomes], float)  # NaN for a single token
    e2e_s = np.array([one.e2e_s for one in outcomes], float)
    tokens = np.array([one.output_tokens for one in outcomes])
    slo = scenario.slo
    return {
        "rt_normalized_latency_s": float(np.mean(e2e_s / tokens)),
        "rt_ttft_mean_s": float(np.mean(ttft_s)),
        "rt_ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "rt_tpot_mean_s": 0.0 if np.isnan(tpot_s).all() else float(np.nanmean(tpot_s)),
        "rt_ttft_attained": float(np.mean(ttft_s <= (slo.ttft_s or math.inf))),
        "rt_tpot_attained": float(np.mean(~(tpot_s > (slo.tpot_s or math.inf)))),
        "rt_throughput": len(requests) / max(scenario.best_effort.for_s, engine.now_s),
    }


def _best_effort_summary(engine: Engine, names: list[str], until_s: float) -> dict[str, Any]:
    ended_s = [engine.outcome(name).finished_s for name in names]
    served = sum(end_s is not None and end_s <= until_s for end_s in ended_s)
    return {
        "be_throughput": served / until_s,
        "preemptions": float(engine.state.engine[0].num_preemptions),
        "num_steps": float(engine.state.engine[0].num_steps),
    }
