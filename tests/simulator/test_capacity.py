"""Capacities are found where they are, with intervals that hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from services.parallel import processes, ray_cluster
from simulator.capacity import Bracket, Objective, Search, Trial, capacities, gain, half_width, trial_s
from simulator.parallel import one_by_one
from simulator.scenario import Scenario, scenario_from

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


def pretending(true: Callable[[int, str], float]) -> Any:
    """A runner for which a trial holds below a capacity that is known."""

    def runner(_: Callable[[Trial], float], trials: Sequence[Trial], /) -> Iterator[tuple[int, float]]:
        for place, trial in enumerate(trials):
            yield place, 1.0 if trial.rate < true(trial.seed, trial.policy) else 9.0

    return runner


@pytest.mark.parametrize("first_rate", [0.5, 20.0, 900.0])
def test_brackets_close_around_the_capacity(first_rate: float) -> None:
    """Wherever a search begins, it ends within its resolution."""
    search = Search(seeds=3, most_seeds=3, resolution=0.002, first_rate=first_rate, paired=True)
    (found,) = capacities([(scenario(), "jsq")], Objective(), search, pretending(lambda seed, _: 30.0 + seed))
    assert found.per_seed == pytest.approx((30.0, 31.0, 32.0), rel=0.002)
    assert found.mean == pytest.approx(31.0, rel=0.002)


def test_noise_ends_a_search_early_and_adds_seeds() -> None:
    """What is lost in noise is not measured; seeds are added until the mean is known well enough, or there are none."""
    noisy = np.random.default_rng(0).normal(30, 3, 100)
    fine = Search(seeds=5, most_seeds=5, resolution=0.001, first_rate=30.0, paired=True)
    rough = Search(seeds=5, most_seeds=5, resolution=0.001, first_rate=30.0)
    many = Search(seeds=5, most_seeds=40, resolution=0.001, precision=0.05, first_rate=30.0)
    results = [
        capacities([(scenario(), "jsq")], Objective(), search, pretending(lambda seed, _: noisy[seed]))[0]
        for search in (fine, rough, many)
    ]
    assert results[1].num_trials < 0.8 * results[0].num_trials
    assert abs(results[1].mean - results[0].mean) < results[0].ci95
    assert 5 < len(results[2].per_seed) <= 40
    assert results[2].ci95 < results[0].ci95


def test_gains_are_compared_seed_by_seed() -> None:
    """Noise that two policies share does not widen the interval of their ratio."""
    noisy = np.random.default_rng(0).normal(30, 4, 100)
    search = Search(seeds=6, most_seeds=6, resolution=0.001, first_rate=30.0, paired=True)
    better, worse = capacities(
        [(scenario(), "block"), (scenario(), "jsq")],
        Objective(),
        search,
        pretending(lambda seed, policy: noisy[seed] * (1.1 if policy == "block" else 1.0)),
    )
    share, half = gain(better, worse)
    assert share == pytest.approx(0.1, abs=0.005)
    assert half < 0.01 < better.ci95 / better.mean


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    """Ninety-five in a hundred intervals of normal samples hold the true mean."""
    generator = np.random.default_rng(1)
    samples = generator.normal(10, 2, (2000, 5))
    inside = [abs(np.mean(row) - 10) <= half_width(row) for row in samples]
    assert 0.93 < np.mean(inside) < 0.97
    assert half_width([1.0]) == math.inf


def test_trials_know_when_there_is_no_hope() -> None:
    """An overload is given up, and the objective's percentile is measured where there is hope."""
    trial = Trial(scenario=scenario(traffic={"num_requests": 3000}), policy="jsq", rate=500.0, seed=0)
    assert trial_s(trial) == math.inf
    easy = Trial(scenario=scenario(), policy="jsq", rate=0.5, seed=0)
    assert 0 < trial_s(easy) < 1.0
    for metric in ("tpot_s", "e2e_s"):
        assert 0 < trial_s(Trial(scenario=scenario(), policy="jsq", rate=0.5, seed=0,
                                 objective=Objective(metric=metric))) < 60.0  # fmt: skip


def test_a_real_search_finds_the_edge() -> None:
    """Just below a measured capacity the objective holds for its seed, and well above it does not."""
    objective = Objective(limit_s=1.0)
    search = Search(seeds=2, most_seeds=2, resolution=0.02, first_rate=4.0)
    (found,) = capacities([(scenario(), "jsq")], objective, search)
    for seed, capacity in enumerate(found.per_seed):
        values = [
            trial_s(Trial(scenario=scenario(), policy="jsq", rate=capacity * share, seed=seed, objective=objective))
            for share in (0.8, 1.3)
        ]
        assert values[0] < 1.0 <= values[1]


def test_processes_find_the_same() -> None:
    """Two processes measure what one does."""
    trials = [Trial(scenario=scenario(), policy="jsq", rate=rate, seed=0) for rate in (2.0, 4.0, 6.0)]
    alone = dict(one_by_one(trial_s, trials))
    with processes(2) as runner:
        assert dict(runner(trial_s, trials)) == alone


def test_ray_finds_the_same() -> None:
    """A local Ray cluster measures what this process does."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'block-serving[ray]'")
    trials = [Trial(scenario=scenario(), policy="jsq", rate=rate, seed=0) for rate in (2.0, 4.0)]
    alone = dict(one_by_one(trial_s, trials))
    with ray_cluster("local") as runner:
        assert dict(runner(trial_s, trials)) == alone


def test_brackets_take_growing_strides() -> None:
    """A capacity far away is reached in few steps."""
    bracket, rate = Bracket(), 1.0
    for _ in range(12):
        rate = bracket.next_rate(1.0)
        if rate > 5000:
            break
        bracket.learn(rate, holds=True)
    assert rate > 5000


@pytest.mark.parametrize("bad", [{"metric": "ttft"}, {"percentile": 0}, {"limit_s": -1.0}])
def test_bad_objectives_are_refused(bad: dict[str, Any]) -> None:
    """Each by its name."""
    with pytest.raises(ValueError, match=f"objective.{next(iter(bad))}"):
        Objective(**bad)
