"""The capacity of a cluster: the largest rate at which an SLO holds, with a confidence interval.

Each seed is one sample of traffic: the same for all policies, and the same pattern at all rates. The capacity of each
seed is found by bisection. Capacities differ between seeds, so brackets are halved only until their width is small
compared with that difference, and seeds are added until the mean is precise enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtrit

from predictor.suggestions import require_choice
from simulator.assembly import simulation
from simulator.metrics import latencies, percentile_of_all
from simulator.parallel import Runner, one_by_one
from simulator.rate_limits import RateLimits, conditions_of_trial, rate_limits
from simulator.request_slots import count_late
from simulator.scenario import Scenario

CONFIDENCE = 0.95
MAX_TRIALS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjective:
    """What a run must meet: a percentile of a latency below a limit."""

    metric: str = "ttft_s"
    percentile: float = 99.0
    limit_s: float = 3.0

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        require_choice("objective.metric", self.metric, ("ttft_s", "tpot_s", "e2e_s"))
        if not 0 < self.percentile <= 100:
            raise ValueError(f"objective.percentile: must be above 0 and at most 100, not {self.percentile}")
        if not 0 < self.limit_s < math.inf:
            raise ValueError(f"objective.limit_s: must be a number above 0, not {self.limit_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run that shows whether the objective holds at a rate."""

    scenario: Scenario
    policy: str
    rate: float
    seed: int
    objective: LatencyObjective = field(default_factory=LatencyObjective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """When a search ends: the relative width of brackets, the relative confidence interval, the number of seeds.

    If capacities are compared seed by seed (`paired`), noise between seeds cancels out, so every bracket is narrowed.
    """

    resolution: float = 0.005
    precision: float = 0.01
    seeds: int = 5
    max_seeds: int = 5
    first_rate: float = 10.0
    paired: bool = False


@dataclass(slots=True)
class Bracket:
    """The trials of one seed so far: the objective holds at the rate `low` and not at `high`."""

    low: float = 0.0
    high: float = math.inf
    num_trials: int = 0
    limits: RateLimits = field(default_factory=RateLimits)

    def next_rate(self, first_rate: float) -> float:
        """Return the rate of the next trial: in growing strides while one end is open, else in the middle."""
        if self.low == 0 and self.high == math.inf:
            return first_rate
        stride = math.pow(1.15, math.pow(1.6, max(0, self.num_trials - 1)))
        if self.high == math.inf:
            return min(self.low * stride, self.limits.highest)
        if self.low == 0:
            return max(self.high / stride, self.limits.lowest)
        return (self.low + self.high) / 2

    def learn(self, rate: float, *, holds: bool) -> None:
        """Narrow the bracket by the result of a trial."""
        self.num_trials += 1
        self.narrow(rate, holds=holds)

    def narrow(self, rate: float, *, holds: bool) -> None:
        """Narrow the bracket by what another search has shown."""
        if holds:
            self.low = max(self.low, rate)
        else:
            self.high = min(self.high, rate)

    @property
    def is_closed(self) -> bool:
        """Whether both ends are known."""
        return self.low > 0 and self.high < math.inf

    @property
    def holds_at_highest(self) -> bool:
        """Whether the objective holds at all rates, as far as so few requests show."""
        return self.high == math.inf and self.low >= self.limits.highest

    @property
    def is_at_limit(self) -> bool:
        """Whether the bracket stays open, as no rate beyond the limits can close it."""
        return self.holds_at_highest or (self.low == 0 and self.high <= self.limits.lowest)

    @property
    def middle(self) -> float:
        """The estimate of the capacity; of a bracket that is open, the rate at which the objective is known to hold."""
        return (self.low + self.high) / 2 if self.is_closed else self.low

    @property
    def width(self) -> float:
        """How far the ends are apart; 0 where one is open."""
        return self.high - self.low if self.is_closed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The mean capacity over seeds, with its confidence interval, and the capacity of each seed.

    It is 0 for a seed where the objective is missed even by requests that hardly meet. `at_least`: for some seed the
    objective still holds if all requests arrive at once, so that only more requests show the capacity.
    """

    policy: str
    mean: float
    ci95: float  # half the width of the interval
    per_seed: tuple[float, ...]
    num_trials: int
    at_least: bool = False


OnTrial = Callable[[Trial, float], None]  # called with each trial and its measured percentile


class ObjectiveMissedError(Exception):
    """A running trial can no longer meet its objective."""


def trial_s(trial: Trial) -> float:
    """Run a trial; return the measured percentile, or infinity if it was stopped because it misses the objective."""
    scenario, objective = trial.scenario, trial.objective
    work = scenario.workload(trial.rate, trial.seed)
    conditions = conditions_of_trial(scenario.conditions, work)
    running = simulation(scenario.instance_specs(), work, trial.policy, conditions, seed=trial.seed)
    max_late = (1 - objective.percentile / 100) * len(work) + 1

    def watch(_: int) -> None:
        now_s, limit_s = running.now_s, objective.limit_s
        held = [number for scheduler in running.schedulers for number in scheduler.core.waiting]
        num_waiting_late = sum(now_s - work.arrival_s[number] > limit_s for number in held)
        if num_waiting_late + count_late(running.fleet, running.requests, now_s, limit_s) > max_late:
            raise ObjectiveMissedError

    try:
        result = running.run(watch if objective.metric == "ttft_s" else None)
    except ObjectiveMissedError:
        return math.inf
    values = getattr(latencies(result), objective.metric)
    if objective.metric == "tpot_s":  # a response of one token has no TPOT
        values = np.where((result.outcomes.produced_tokens <= 1) & ~np.isnan(latencies(result).e2e_s), 0.0, values)
    return percentile_of_all(values, objective.percentile)


def capacities(
    cases: Sequence[tuple[Scenario, str]],
    objective: LatencyObjective,
    search: Search,
    runner: Runner = one_by_one,
    on_trial: OnTrial | None = None,
) -> list[Capacity]:
    """Find the capacities of several cases in parallel: in each round, every unfinished bracket gets one trial."""
    limits = [rate_limits(scenario, scenario.workload(search.first_rate, 0)) for scenario, _ in cases]
    brackets: dict[tuple[int, int], Bracket] = {
        (case, seed): Bracket(limits=limits[case]) for case in range(len(cases)) for seed in range(search.seeds)
    }
    while True:
        unfinished = [key for key in brackets if not _is_settled(key, brackets, search)]
        if not unfinished:
            for case in range(len(cases)):
                own = _of_case(case, brackets)
                if len(own) < search.max_seeds and not _is_precise([own[seed].middle for seed in own], search):
                    brackets[case, len(own)] = Bracket(limits=limits[case])
                    unfinished.append((case, len(own)))
            if not unfinished:
                break
        trials = [
            Trial(
                scenario=cases[case][0],
                policy=cases[case][1],
                rate=brackets[case, seed].next_rate(_first_rate(case, brackets, search)),
                seed=seed,
                objective=objective,
            )
            for case, seed in unfinished
        ]
        for index, value_s in runner(trial_s, trials):
            brackets[unfinished[index]].learn(trials[index].rate, holds=value_s < objective.limit_s)
            if on_trial is not None:
                on_trial(trials[index], value_s)
    return [_capacity(policy, _of_case(case, brackets)) for case, (_, policy) in enumerate(cases)]


def _of_case(case: int, brackets: dict[tuple[int, int], Bracket]) -> dict[int, Bracket]:
    return {seed: bracket for (other, seed), bracket in brackets.items() if other == case}


def _first_rate(case: int, brackets: dict[tuple[int, int], Bracket], search: Search) -> float:
    """Start at the mean capacity of the other seeds, if one is known."""
    known = [bracket.middle for bracket in _of_case(case, brackets).values() if bracket.is_closed]
    return float(np.mean(known)) if known else search.first_rate


def _is_settled(key: tuple[int, int], brackets: dict[tuple[int, int], Bracket], search: Search) -> bool:
    """Return whether a bracket is finished: as narrow as required, or narrow compared with the noise between seeds.

    A capacity that is uniform over a bracket has a standard deviation of width / √12; below a quarter of the standard
    deviation between seeds, it adds 3 % to that.
    """
    bracket = brackets[key]
    if bracket.num_trials >= MAX_TRIALS or bracket.is_at_limit:
        return True
    if not bracket.is_closed:
        return False
    width = bracket.width
    if width <= search.resolution * bracket.middle:
        return True
    if search.paired:
        return False
    others = _of_case(key[0], brackets).values()
    if len(others) < 3 or not all(other.is_closed for other in others):
        return False
    spread = float(np.std([other.middle for other in others], ddof=1))
    return width / math.sqrt(12) < spread / 4


def _is_precise(values: Sequence[float], search: Search) -> bool:
    return half_width(values) <= search.precision * float(np.mean(values))


def half_width(values: Sequence[float]) -> float:
    """Return half the 95 % confidence interval of a mean, by Student's t."""
    if len(values) < 2:
        return math.inf
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error


def _capacity(policy: str, own: dict[int, Bracket]) -> Capacity:
    values = [own[seed].middle for seed in sorted(own)]
    widths = [own[seed].width for seed in sorted(own)]
    rest = float(np.mean(widths)) / 2 if len(values) < 2 else float(np.mean(widths)) / math.sqrt(12 * len(values))
    ci95 = rest if len(values) < 2 else math.hypot(half_width(values), rest)
    return Capacity(
        policy=policy,
        mean=float(np.mean(values)),
        ci95=ci95,
        per_seed=tuple(values),
        num_trials=sum(bracket.num_trials for bracket in own.values()),
        at_least=any(bracket.holds_at_highest for bracket in own.values()),
    )


def gain(better: Capacity, than: Capacity) -> tuple[float, float]:
    """Return by what share one capacity exceeds another, seed by seed, and half the 95 % interval of that.

    Seeds are left out for which the other capacity is 0; without any left, both numbers are NaN.
    """
    pairs = zip(better.per_seed, than.per_seed, strict=False)
    ratios = [one / other - 1 for one, other in pairs if other > 0]
    if not ratios:
        return math.nan, math.nan
    return float(np.mean(ratios)), half_width(ratios)
