"""The goodput of a cluster: the largest rate at which a share of the requests get all tokens by their deadlines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.assembly import simulation
from simulator.capacity import MAX_TRIALS, Bracket
from simulator.kernels import count_missed
from simulator.parallel import Runner
from simulator.result import RunResult
from simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputTrial:
    """One run that shows whether a share of the requests attain their deadlines at a rate."""

    scenario: Scenario
    policy: str
    rate: float
    seed: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCase:
    """A cluster and a policy whose goodput is wanted for a seed; the search starts at `first_rate`."""

    scenario: Scenario
    policy: str
    seed: int
    first_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A goodput, and what the run at the highest rate that attains the share has shown (`run_trial`)."""

    rate: float
    at: dict[str, Any]


class TooManyMissedError(Exception):
    """So many requests have missed deadlines that the share cannot be attained any more."""


def run_trial(trial: GoodputTrial) -> dict[str, Any]:
    """Run a trial; one that certainly fails is stopped, and has `attained` 0 and nothing else."""
    scenario = trial.scenario
    work = scenario.workload(trial.rate, trial.seed)
    if work.service is None or np.isnan(work.service.ttft_slo_s).any():
        raise ValueError("mix: goodput needs ttft_slo_s and tpot_slo_s for all requests")
    running = simulation(scenario.instance_specs(), work, trial.policy, scenario.conditions, seed=trial.seed)
    max_missed = (1 - trial.share) * len(work) + 1

    def watch(_: int) -> None:
        now_s = running.now_s
        due_s = work.arrival_s + work.service.ttft_slo_s  # type: ignore[union-attr]  # checked above
        held = [number for scheduler in running.schedulers for number in scheduler.core.waiting]
        missed = int((due_s[held] < now_s).sum()) if held else 0
        if missed + count_missed(running.fleet, running.requests, now_s) > max_missed:
            raise TooManyMissedError

    try:
        return attained_in(running.run(watch))
    except TooManyMissedError:
        return {"attained": 0.0}


def attained_in(result: RunResult) -> dict[str, Any]:
    """Return the share of the requests that attained all deadlines, also by tokens, and how many had two legs."""
    lengths, outcomes = result.work.lengths, result.outcomes
    whole = (outcomes.finished_s >= 0) & (outcomes.tokens_on_time >= outcomes.produced_tokens)
    tokens = lengths.prompt_tokens + lengths.output_tokens
    missed = lengths.prompt_tokens[~whole]
    return {
        "attained": float(whole.mean()),
        "attained_tokens": float(tokens[whole].sum() / tokens.sum()),
        "missed_prompt_ratio": float(missed.mean() / lengths.prompt_tokens.mean()) if len(missed) else None,
        "disaggregated": float((result.decisions.prefill_instance >= 0).mean()),
    }


def goodputs(
    cases: Sequence[GoodputCase], share: float, resolution: float, runner: Runner, on_trial: Callable[[], None]
) -> list[Goodput]:
    """Find the goodput of each case; in each round, every unfinished bracket gets one trial."""
    brackets = [Bracket() for _ in cases]
    best: list[dict[str, Any]] = [{} for _ in cases]
    while unfinished := [index for index, bracket in enumerate(brackets) if not _is_settled(bracket, resolution)]:
        trials = [
            GoodputTrial(
                scenario=cases[index].scenario,
                policy=cases[index].policy,
                rate=brackets[index].next_rate(cases[index].first_rate),
                seed=cases[index].seed,
                share=share,
            )
            for index in unfinished
        ]
        for position, found in runner(run_trial, trials):
            index, rate = unfinished[position], trials[position].rate
            holds = found["attained"] >= share
            if holds and rate >= brackets[index].low:
                best[index] = found
            brackets[index].learn(rate, holds=holds)
            on_trial()
    return [Goodput(rate=_rate(bracket), at=found) for bracket, found in zip(brackets, best, strict=True)]


def _is_settled(bracket: Bracket, resolution: float) -> bool:
    if bracket.num_trials >= MAX_TRIALS:
        return True
    return bracket.is_closed and bracket.high - bracket.low <= resolution * bracket.middle


def _rate(bracket: Bracket) -> float:
    """Return the middle of a bracket; of one that never closed, the rate that is known to attain the share."""
    return bracket.middle if bracket.high < math.inf else bracket.low
