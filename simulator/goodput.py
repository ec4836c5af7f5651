"""The goodput of a cluster: the largest rate at which a share of the requests get all tokens by their deadlines.

By work, it is the largest rate at which a share of the tokens of prompts and responses belongs to such requests.
Requests without a TTFT target have no deadlines; they are served, but not counted.

A cluster that starts empty keeps deadlines at rates that it cannot sustain, and so does one whose traffic ends.
Therefore more requests may arrive before and after those that count, for `warm_up_s` each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.gain import ServiceLevels, attained, attainment_report
from predictor.state import FINISHED, PREFILL_LEG
from scheduler.provisioning.tiers import Tiers
from simulator.assembly import simulation
from simulator.autoscaling import moved_between_tiers
from simulator.capacity import MAX_TRIALS, Bracket
from simulator.metrics import latencies, served_requests
from simulator.parallel import Runner
from simulator.rate_limits import conditions_of_trial, rate_limits
from simulator.request_needs import kinds_of, needs_of
from simulator.result import SHED, STATUSES, UNFINISHED, RunResult
from simulator.run import Simulation
from simulator.scenario import Scenario
from simulator.workload import Workload

Flags = npt.NDArray[np.bool_]

ROUNDING = 1e-9  # of sums of shares
LEAST_S = 1e-9  # minimum time in which the counted requests arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputGoal:
    """A share of the requests, or of their tokens, that has to attain its deadlines."""

    share: float = 0.9
    by_work: bool = False

    def __post_init__(self) -> None:
        """Reject a share out of range."""
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(f"attained: must be a share above 0, at most 1, not {self.share!r}")

    @property
    def name(self) -> str:
        """The field of a trial's result that has to reach the share."""
        return "attained_tokens" if self.by_work else "attained"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputTrial:
    """One run that shows whether a goal is attained at a rate."""

    scenario: Scenario
    policy: str
    rate: float | None
    seed: int
    share: float
    by_work: bool = False
    warm_up_s: float = 0.0
    tiers: Tiers = ()  # between which all instances move


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCase:
    """A cluster and a policy whose goodput is wanted for a seed; the search starts at `first_rate`."""

    scenario: Scenario
    policy: str
    seed: int
    first_rate: float
    warm_up_s: float = 0.0
    tiers: Tiers = ()  # between which all instances move


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A goodput, and what the run at the highest rate that attains the share has shown (`run_trial`).

    The rate is 0 where requests miss the share even if they hardly meet. `at_least`: the share is still attained if all
    requests arrive at once, so that only more requests show the goodput.
    """

    rate: float
    at: dict[str, Any]
    at_least: bool = False


class TooManyMissedError(Exception):
    """So many requests have missed deadlines that the share cannot be attained any more."""


def run_trial(trial: GoodputTrial) -> dict[str, Any]:
    """Run a trial; one that certainly fails is stopped, and its result has only upper limits of the shares.

    `report` is what `block simulate` reports of the requests that count, also by class, tier, entry and tenant.
    `admitted` is the share of the requests that were placed where their deadlines are kept by forecast, and
    `admitted_missed` the share of these that missed one. With tiers, `num_serving` is how many instances are in tiers,
    or leave one, while the counted requests arrive.
    """
    scenario = trial.scenario
    work, counts = requests_of(trial)
    levels = with_deadlines(work)
    conditions = conditions_of_trial(scenario.conditions, work)
    running = simulation(
        scenario.instance_specs(), work, trial.policy, conditions, seed=trial.seed, whole_forecasts=False
    )
    moved = moved_between_tiers(running, trial.tiers) if trial.tiers else None
    has_deadline = ~np.isnan(levels.ttft_slo_s) & counts
    last = np.flatnonzero(counts)[-1]
    tokens = work.lengths.prompt_tokens + work.lengths.output_tokens
    worth = {
        "attained": has_deadline / has_deadline.sum(),
        "attained_tokens": has_deadline * tokens / tokens[has_deadline].sum(),
    }
    goal = GoodputGoal(share=trial.share, by_work=trial.by_work)
    at_most: dict[str, Any] = {}

    def watch(number: int) -> bool:
        kept = ~missed_so_far(running)
        at_most.update({name: float(values[kept].sum()) for name, values in worth.items()})
        if at_most[goal.name] < goal.share - ROUNDING:
            raise TooManyMissedError
        return bool(number > last and have_ended(running)[counts].all())

    try:
        result = running.run(watch)
    except TooManyMissedError:
        return {**at_most, "is_stopped": True}
    found = attained_in(result, counts)
    found["report"] = attainment_report(served_requests(result, latencies(result)).chosen(counts))
    admitted = has_deadline & (running.decisions.admitted_in_time > 0)
    found["admitted"] = float(admitted.sum() / has_deadline.sum())
    found["admitted_missed"] = float(missed_so_far(running)[admitted].mean()) if admitted.any() else None
    if moved is not None:
        start_s, end_s = work.arrival_s[counts][[0, -1]]
        found["num_serving"] = moved.serving_s(end_s, start_s) / max(end_s - start_s, LEAST_S)
    return found


def requests_of(trial: GoodputTrial) -> tuple[Workload, Flags]:
    """Draw the requests of a trial, with those that arrive before and after the ones that count, and say which do."""
    scenario, rate = trial.scenario, trial.rate
    work = scenario.workload(rate, trial.seed)
    num, num_around = len(work), 0 if rate is None else math.ceil(rate * trial.warm_up_s)
    if num_around:
        longer = scenario.changed(traffic={"num_requests": num + 2 * num_around})
        work = longer.workload(rate, trial.seed)
        if len(work) < num + 2 * num_around:
            raise ValueError("warm_up_s: the trace has too few requests for it")
    counts: Flags = np.zeros(len(work), np.bool_)
    counts[num_around : num_around + num] = True
    return work, counts


def with_deadlines(work: Workload) -> ServiceLevels:
    """Return the service levels of a workload; the error for one without deadlines names the mix."""
    if work.service is None or np.isnan(work.service.ttft_slo_s).all():
        raise ValueError("mix: goodput needs requests with ttft_slo_s; no entry has it")
    return work.service


def missed_so_far(running: Simulation) -> Flags:
    """Return which requests have a token that came after its deadline, or whose first token is late and missing.

    One with two legs is judged by its decode leg, which has a slot from the decision on.
    """
    work, now_s = running.work, running.now_s
    levels, outcomes = with_deadlines(work), running.requests.outcomes
    due_s = work.arrival_s + levels.ttft_slo_s  # NaN: never late
    last = np.where(np.isnan(levels.tpot_slo_s), 1, np.iinfo(np.int64).max)  # token with a deadline
    has_ended = outcomes.finished_s >= 0
    missed: Flags = has_ended & (outcomes.tokens_on_time < np.minimum(outcomes.produced_tokens, last))
    held = [number for scheduler in running.schedulers for number in scheduler.core.waiting]
    missed[held] |= due_s[held] < now_s
    missed |= running.decisions.status == STATUSES.index(SHED)
    numbers, rows = running.fleet.slots["number"], running.fleet.stack.requests
    served = (numbers >= 0) & (rows["leg"] != PREFILL_LEG)
    served[:, 0] = False  # which is no slot
    number, produced = numbers[served], rows["output_tokens"][served]
    late = (produced == 0) & (now_s > due_s[number])
    missed[number] |= late | (rows["tokens_on_time"][served] < np.minimum(produced, last[number]))
    return missed & ~np.isnan(levels.ttft_slo_s)


def have_ended(running: Simulation) -> Flags:
    """Return which requests have ended: served (also if that is not recorded yet), shed, refused or lost."""
    ended: Flags = running.requests.outcomes.finished_s >= 0
    ended |= running.decisions.status != STATUSES.index(UNFINISHED)
    numbers, rows = running.fleet.slots["number"], running.fleet.stack.requests
    served = (numbers >= 0) & (rows["leg"] != PREFILL_LEG) & (rows["status"] == FINISHED)
    served[:, 0] = False  # which is no slot
    ended[numbers[served]] = True
    return ended


def attained_in(result: RunResult, counts: Flags | None = None) -> dict[str, Any]:
    """Return the share of the requests that attained all deadlines, also by tokens, and how many had two legs."""
    served, chosen = served_requests(result, latencies(result)), result.decisions.prefill_instance
    if counts is not None:
        chosen = chosen[counts]
        due_s = np.where(counts, served.levels.ttft_slo_s, np.nan)  # without one, a request counts nowhere
        served = replace(served, levels=replace(served.levels, ttft_slo_s=due_s))
    part = attained(served)
    return {
        "attained": part["deadline_attained"],
        "attained_tokens": part["deadline_attained_tokens"],
        "missed_prompt_ratio": part["missed_prompt_ratio"],
        "disaggregated": float((chosen >= 0).mean()),
    }


def goodputs(
    cases: Sequence[GoodputCase],
    goals: Sequence[GoodputGoal],
    resolution: float,
    runner: Runner,
    on_trial: Callable[[], None],
) -> list[list[Goodput]]:
    """Find the goodput of each case by each goal.

    In each round, every case gets one trial, for its first goal whose search has not ended. The other searches of the
    case also use its result. Where the bound says that no rate attains a goal, one trial at the lowest rate has to
    confirm it.
    """
    searches = [_searches_of(case, goals, resolution) for case in cases]
    while open_searches := [
        (index, search)
        for index, own in enumerate(searches)
        if (search := next((one for one in own if not one.has_ended), None)) is not None
    ]:
        trials = [
            GoodputTrial(
                scenario=cases[index].scenario,
                policy=cases[index].policy,
                rate=search.next_rate(cases[index].first_rate),
                seed=cases[index].seed,
                share=search.goal.share,
                by_work=search.goal.by_work,
                warm_up_s=cases[index].warm_up_s,
                tiers=cases[index].tiers,
            )
            for index, search in open_searches
        ]
        for position, found in runner(run_trial, trials):
            index, asked = open_searches[position]
            rate = trials[position].rate
            assert rate is not None
            for search in searches[index]:
                search.learn(rate, found, asked=search is asked)
            on_trial()
    return [[search.goodput for search in own] for own in searches]


def _searches_of(case: GoodputCase, goals: Sequence[GoodputGoal], resolution: float) -> list[_Search]:
    work = case.scenario.workload(case.first_rate, case.seed)
    limits, possible = rate_limits(case.scenario, work), _possible_shares(case, work)
    return [
        _Search(
            goal=goal,
            resolution=resolution,
            bracket=Bracket(limits=limits),
            is_possible=possible.get(goal.name, 1.0) >= goal.share - ROUNDING,
        )
        for goal in goals
    ]


def _possible_shares(case: GoodputCase, work: Workload) -> dict[str, float]:
    """Return the shares of the requests, and of their tokens, that the bound allows; none where it is not exact."""
    specs, levels = case.scenario.instance_specs(), with_deadlines(work)
    if case.warm_up_s > 0 or case.scenario.conditions.step_noise > 0 or len(kinds_of(specs)) > 1:
        return {}
    possible = needs_of(specs[0], work)[0].is_possible
    tokens = (work.lengths.prompt_tokens + work.lengths.output_tokens)[~np.isnan(levels.ttft_slo_s)]
    return {"attained": float(possible.mean()), "attained_tokens": float(tokens[possible].sum() / tokens.sum())}


@dataclass(slots=True, kw_only=True)
class _Search:
    """The search for the goodput of one case by one goal."""

    goal: GoodputGoal
    resolution: float
    bracket: Bracket
    is_possible: bool = True  # by the bound, at some rate
    best: dict[str, Any] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether the goodput is known well enough, or too many trials were made for it."""
        bracket = self.bracket
        if bracket.num_trials >= MAX_TRIALS or bracket.is_at_limit:
            return True
        return bracket.is_closed and bracket.high - bracket.low <= self.resolution * bracket.middle

    def next_rate(self, first_rate: float) -> float:
        """Return the rate of the next trial."""
        if self.bracket.low == 0 and not self.is_possible:
            return self.bracket.limits.lowest
        return self.bracket.next_rate(first_rate)

    def learn(self, rate: float, found: dict[str, Any], *, asked: bool) -> None:
        """Learn from a trial; one that was stopped for another goal may show nothing."""
        self.bracket.num_trials += asked
        if not self.bracket.low < rate < self.bracket.high:
            return
        holds = found.get(self.goal.name, 0.0) >= self.goal.share
        if holds and found.get("is_stopped"):
            return
        if holds:
            self.best = found
        self.bracket.narrow(rate, holds=holds)

    @property
    def goodput(self) -> Goodput:
        """The middle of the bracket; of one that never closed, the rate that is known to attain the share."""
        return Goodput(rate=self.bracket.middle, at=self.best, at_least=self.bracket.holds_at_highest)
