"""Searches find known capacities, with correct intervals."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from services.parallel import processes, ray_cluster
from simulator.capacity import Bracket, LatencyObjective, Search, Trial, capacities, gain, half_width, trial_s
from simulator.parallel import Runner, one_by_one
from simulator.scenario import Scenario, scenario_from

MAX_STARTS = 5
SMALL = {
    "instances": {
        "profile": "llama-2-7b-a30",
        "count": 2,
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks": 200, "max_model_len": 1024,
                   "enable_prefix_caching": False},
    },
    "traffic": {"prompt_tokens": "uniform:16:128", "output_tokens": "uniform:16:64", "num_requests": 200},
    "conditions": {"sample_s": 0.0},
}  # fmt: skip


def scenario(**changes: Any) -> Scenario:
    """Two small instances."""
    return scenario_from(SMALL).changed(**changes)


def fake_runner(true: Callable[[int, str], float]) -> Any:
    """A runner whose trials hold below a known capacity."""

    def runner(_: Callable[[Trial], float], trials: Sequence[Trial], /) -> Iterator[tuple[int, float]]:
        for index, trial in enumerate(trials):
            yield index, 1.0 if trial.rate < true(trial.seed, trial.policy) else 9.0

    return runner


@pytest.mark.parametrize("first_rate", [0.5, 20.0, 900.0])
def test_brackets_close_around_the_capacity(first_rate: float) -> None:
    """From any first rate, a search ends within its resolution."""
    search = Search(seeds=3, max_seeds=3, resolution=0.002, first_rate=first_rate, paired=True)
    (found,) = capacities([(scenario(), "jsq")], LatencyObjective(), search, fake_runner(lambda seed, _: 30.0 + seed))
    assert found.per_seed == pytest.approx((30.0, 31.0, 32.0), rel=0.002)
    assert found.mean == pytest.approx(31.0, rel=0.002)


@pytest.mark.parametrize(("capacity", "at_least"), [(math.inf, True), (0.0, False)])
def test_a_search_ends_where_no_rate_can_close_it(capacity: float, at_least: bool) -> None:
    """The rates of trials stay within what the requests can show; the result says that it is a lower limit, or 0."""
    search = Search(seeds=2, max_seeds=2, first_rate=20.0)
    rates: list[float] = []
    found, other = capacities(
        [(scenario(), "jsq"), (scenario(), "block")], LatencyObjective(), search, fake_runner(lambda *_: capacity),
        lambda trial, _: rates.append(trial.rate),
    )  # fmt: skip
    assert found.at_least == at_least
    assert found.per_seed == ((max(rates),) * 2 if at_least else (0.0, 0.0))
    assert found.ci95 == 0
    assert found.num_trials < 30
    assert 1e-3 < rates[-1] < 1e5
    assert at_least or math.isnan(gain(other, found)[0])


def test_noise_ends_a_search_early_and_adds_seeds() -> None:
    """Brackets are not narrowed below the noise; seeds are added until the mean is precise or the maximum is reached."""
    noisy = np.random.default_rng(0).normal(30, 3, 100)
    fine = Search(seeds=5, max_seeds=5, resolution=0.001, first_rate=30.0, paired=True)
    rough = Search(seeds=5, max_seeds=5, resolution=0.001, first_rate=30.0)
    many = Search(seeds=5, max_seeds=40, resolution=0.001, precision=0.05, first_rate=30.0)
    results = [
        capacities([(scenario(), "jsq")], LatencyObjective(), search, fake_runner(lambda seed, _: noisy[seed]))[0]
        for search in (fine, rough, many)
    ]
    assert results[1].num_trials < 0.8 * results[0].num_trials
    assert abs(results[1].mean - results[0].mean) < results[0].ci95
    assert 5 < len(results[2].per_seed) <= 40
    assert results[2].ci95 < results[0].ci95


def test_gains_are_compared_seed_by_seed() -> None:
    """Noise that two policies share does not widen the interval of their ratio."""
    noisy = np.random.default_rng(0).normal(30, 4, 100)
    search = Search(seeds=6, max_seeds=6, resolution=0.001, first_rate=30.0, paired=True)
    better, worse = capacities(
        [(scenario(), "block"), (scenario(), "jsq")],
        LatencyObjective(),
        search,
        fake_runner(lambda seed, policy: noisy[seed] * (1.1 if policy == "block" else 1.0)),
    )
    share, half = gain(better, worse)
    assert share == pytest.approx(0.1, abs=0.005)
    assert half < 0.01 < better.ci95 / better.mean


def test_intervals_contain_the_mean_as_often_as_they_should() -> None:
    """Of the intervals of normal samples, 95 % contain the true mean."""
    generator = np.random.default_rng(1)
    samples = generator.normal(10, 2, (2000, 5))
    inside = [abs(np.mean(row) - 10) <= half_width(row) for row in samples]
    assert 0.93 < np.mean(inside) < 0.97
    assert half_width([1.0]) == math.inf


def test_trials_stop_when_they_miss_the_objective() -> None:
    """An overloaded trial stops and returns infinity; others return the objective's percentile."""
    trial = Trial(scenario=scenario(traffic={"num_requests": 3000}), policy="jsq", rate=500.0, seed=0)
    assert trial_s(trial) == math.inf
    easy = Trial(scenario=scenario(), policy="jsq", rate=0.5, seed=0)
    assert 0 < trial_s(easy) < 1.0
    for metric in ("tpot_s", "e2e_s"):
        assert 0 < trial_s(Trial(scenario=scenario(), policy="jsq", rate=0.5, seed=0,
                                 objective=LatencyObjective(metric=metric))) < 60.0  # fmt: skip


def test_a_real_search_finds_the_capacity() -> None:
    """Below a measured capacity the objective holds for its seed, well above it does not."""
    objective = LatencyObjective(limit_s=1.0)
    search = Search(seeds=2, max_seeds=2, resolution=0.02, first_rate=4.0)
    (found,) = capacities([(scenario(), "jsq")], objective, search)
    for seed, capacity in enumerate(found.per_seed):
        values = [
            trial_s(Trial(scenario=scenario(), policy="jsq", rate=capacity * share, seed=seed, objective=objective))
            for share in (0.8, 1.3)
        ]
        assert values[0] < 1.0 <= values[1]


def test_processes_return_the_same_results() -> None:
    """Two processes return what one process returns."""
    trials = [Trial(scenario=scenario(), policy="jsq", rate=rate, seed=0) for rate in (2.0, 4.0, 6.0)]
    alone = dict(one_by_one(trial_s, trials))
    with processes(2) as runner:
        assert dict(runner(trial_s, trials)) == alone


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")  # as many processes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a Ray that was started twice
def test_ray_returns_the_same_results() -> None:
    """A local Ray cluster returns what this process returns."""
    trials = [Trial(scenario=scenario(), policy="jsq", rate=rate, seed=0) for rate in (2.0, 4.0)]
    alone = dict(one_by_one(trial_s, trials))
    with ExitStack() as stack:
        assert dict(started_ray(stack)(trial_s, trials)) == alone


def started_ray(stack: ExitStack) -> Runner:
    """Start a local Ray cluster; Ray gives up after 30 s or less, which may be too short for a busy machine."""
    for _ in range(MAX_STARTS - 1):
        try:
            return stack.enter_context(ray_cluster("local", num_cpus=2))
        except Exception as error:  # Ray raises no other kind
            if "timed out" not in str(error).lower():
                raise
            sys.modules["ray"].shutdown()
    return stack.enter_context(ray_cluster("local", num_cpus=2))


def test_brackets_take_growing_strides() -> None:
    """A capacity far from the first rate is reached in few trials."""
    bracket, rate = Bracket(), 1.0
    for _ in range(12):
        rate = bracket.next_rate(1.0)
        if rate > 5000:
            break
        bracket.learn(rate, holds=True)
    assert rate > 5000


@pytest.mark.parametrize("bad", [{"metric": "ttft"}, {"percentile": 0}, {"limit_s": -1.0}])
def test_bad_objectives_are_refused(bad: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=f"objective.{next(iter(bad))}"):
        LatencyObjective(**bad)
