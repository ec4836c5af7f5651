"""The largest rate at which an SLO holds, and how sure that is.

Every seed is one sample of traffic, the same for all policies and, in its pattern, at all rates. Its own capacity is
found by bisection; between seeds capacities differ, so brackets are halved only until what is left of them is small
against that, and seeds are added until the mean is known well enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtrit

from simulator.assembly import simulation
from simulator.kernels import count_late
from simulator.metrics import latencies, percentile_of_all
from simulator.parallel import Runner, one_by_one
from simulator.scenario import Scenario

CONFIDENCE = 0.95
MOST_DOUBLINGS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What must hold of a run: a percentile of a latency below a limit."""

    metric: str = "ttft_s"
    percentile: float = 99.0
    limit_s: float = 3.0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.metric not in ("ttft_s", "tpot_s", "e2e_s"):
            raise ValueError(f"objective.metric: {self.metric!r} is none of ttft_s, tpot_s, e2e_s")
        if not 0 < self.percentile <= 100:
            raise ValueError(f"objective.percentile: must lie above 0 and at most at 100, not {self.percentile}")
        if not 0 < self.limit_s < math.inf:
            raise ValueError(f"objective.limit_s: must be a number above 0, not {self.limit_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run, to see whether the objective holds at this rate."""

    scenario: Scenario
    policy: str
    rate: float
    seed: int
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How far to go: relative width of brackets, number of seeds, and the confidence interval that is good enough.

    Where capacities are compared seed by seed (`paired`), noise between seeds cancels out and no bracket is left wide.
    """

    resolution: float = 0.005
    precision: float = 0.01
    seeds: int = 5
    most_seeds: int = 5
    first_rate: float = 10.0
    paired: bool = False


@dataclass(slots=True)
class Bracket:
    """What one seed has shown: the objective holds at `low` and not at `high`."""

    low: float = 0.0
    high: float = math.inf
    num_trials: int = 0

    def next_rate(self, first_rate: float) -> float:
        """Where to look next: out in growing strides while one end is open, else in the middle."""
        if self.low == 0 and self.high == math.inf:
            return first_rate
        stride = math.pow(1.15, math.pow(1.6, max(0, self.num_trials - 1)))
        if self.high == math.inf:
            return self.low * stride
        if self.low == 0:
            return self.high / stride
        return (self.low + self.high) / 2

    def learn(self, rate: float, *, holds: bool) -> None:
        """Take in a trial."""
        self.num_trials += 1
        if holds:
            self.low = max(self.low, rate)
        else:
            self.high = min(self.high, rate)

    @property
    def is_closed(self) -> bool:
        """Tell whether both ends are known."""
        return self.low > 0 and self.high < math.inf

    @property
    def middle(self) -> float:
        """The best guess."""
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The mean over seeds, with its confidence interval; `per_seed` are the seeds' own."""

    policy: str
    mean: float
    ci95: float  # half the width
    per_seed: tuple[float, ...]
    num_trials: int


Told = Callable[[Trial, float], None]


class HopelessError(Exception):
    """A trial cannot meet its objective any more."""


def trial_s(trial: Trial) -> float:
    """Run a trial; return the measured percentile, infinity where it is given up as hopeless."""
    scenario, objective = trial.scenario, trial.objective
    work = scenario.workload(trial.rate, trial.seed)
    running = simulation(scenario.units(), work, trial.policy, scenario.conditions, seed=trial.seed)
    most_late = (1 - objective.percentile / 100) * len(work) + 1

    def watch(_: int) -> None:
        now_s, limit_s = running.now_s, objective.limit_s
        held = [number for scheduler in running.schedulers for number in scheduler.core.waiting]
        waiting = sum(now_s - work.arrival_s[number] > limit_s for number in held)
        if waiting + count_late(running.fleet, running.requests, now_s, limit_s) > most_late:
            raise HopelessError

    try:
        result = running.run(watch if objective.metric == "ttft_s" else None)
    except HopelessError:
        return math.inf
    values = getattr(latencies(result), objective.metric)
    if objective.metric == "tpot_s":  # an answer of one token has none
        values = np.where((result.outcomes.produced_tokens <= 1) & ~np.isnan(latencies(result).e2e_s), 0.0, values)
    return percentile_of_all(values, objective.percentile)


def capacities(
    cases: Sequence[tuple[Scenario, str]],
    objective: Objective,
    search: Search,
    runner: Runner = one_by_one,
    told: Told | None = None,
) -> list[Capacity]:
    """Find the capacities of several cases side by side: in each round every open bracket gets one trial."""
    brackets: dict[tuple[int, int], Bracket] = {
        (case, seed): Bracket() for case in range(len(cases)) for seed in range(search.seeds)
    }
    while True:
        wanted = [key for key in brackets if not _is_settled(key, brackets, search)]
        if not wanted:
            for case in range(len(cases)):
                own = _of_case(case, brackets)
                if len(own) < search.most_seeds and not _is_precise([own[seed].middle for seed in own], search):
                    brackets[case, len(own)] = Bracket()
                    wanted.append((case, len(own)))
            if not wanted:
                break
        trials = [
            Trial(
                scenario=cases[case][0],
                policy=cases[case][1],
                rate=brackets[case, seed].next_rate(_first_rate(case, brackets, search)),
                seed=seed,
                objective=objective,
            )
            for case, seed in wanted
        ]
        for place, value_s in runner(trial_s, trials):
            brackets[wanted[place]].learn(trials[place].rate, holds=value_s < objective.limit_s)
            if told is not None:
                told(trials[place], value_s)
    return [_summed_up(policy, _of_case(case, brackets)) for case, (_, policy) in enumerate(cases)]


def _of_case(case: int, brackets: dict[tuple[int, int], Bracket]) -> dict[int, Bracket]:
    return {seed: bracket for (other, seed), bracket in brackets.items() if other == case}


def _first_rate(case: int, brackets: dict[tuple[int, int], Bracket], search: Search) -> float:
    """Begin where other seeds were found to end."""
    known = [bracket.middle for bracket in _of_case(case, brackets).values() if bracket.is_closed]
    return float(np.mean(known)) if known else search.first_rate


def _is_settled(key: tuple[int, int], brackets: dict[tuple[int, int], Bracket], search: Search) -> bool:
    """Tell whether a bracket need not be halved any more: it is as narrow as asked for, or its width is lost in noise.

    A capacity spread evenly over a bracket has a standard deviation of its width / √12; where that is below a quarter
    of the one between seeds, it adds 3 % to it.
    """
    bracket = brackets[key]
    if bracket.num_trials >= MOST_DOUBLINGS:
        return True
    if not bracket.is_closed:
        return False
    width = bracket.high - bracket.low
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
    """Half the 95 % confidence interval of a mean, by Student's t."""
    if len(values) < 2:
        return math.inf
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error


def _summed_up(policy: str, own: dict[int, Bracket]) -> Capacity:
    values = [own[seed].middle for seed in sorted(own)]
    widths = [own[seed].high - own[seed].low for seed in sorted(own)]
    rest = float(np.mean(widths)) / 2 if len(values) < 2 else float(np.mean(widths)) / math.sqrt(12 * len(values))
    ci95 = rest if len(values) < 2 else math.hypot(half_width(values), rest)
    return Capacity(
        policy=policy,
        mean=float(np.mean(values)),
        ci95=ci95,
        per_seed=tuple(values),
        num_trials=sum(bracket.num_trials for bracket in own.values()),
    )


def gain(better: Capacity, than: Capacity) -> tuple[float, float]:
    """By which share one capacity is above another, seed by seed, and half the 95 % confidence interval of that."""
    ratios = [one / other - 1 for one, other in zip(better.per_seed, than.per_seed, strict=False)]
    return float(np.mean(ratios)), half_width(ratios)
