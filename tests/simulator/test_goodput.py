"""The search for goodput finds where a share of the requests stops to attain its deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.goodput import GoodputCase, GoodputTrial, attained_in, goodputs, run_trial
from simulator.scenario import Scenario, scenario_from
from tests.simulator.test_capacity import SMALL

TARGETS = [{"name": "all", "share": 1, "ttft_slo_s": 0.3, "tpot_slo_s": 0.08}]


def small(**changes: Any) -> Scenario:
    """Two small instances, and requests with targets."""
    return scenario_from({**SMALL, "mix": TARGETS}).changed(**changes)


def fake_runner(goodput: Callable[[GoodputTrial], float]) -> Any:
    """A runner whose trials attain less the higher the rate is."""

    def runner(_: Callable[..., Any], trials: Sequence[GoodputTrial], /) -> Iterator[tuple[int, dict[str, float]]]:
        for index, trial in enumerate(trials):
            attained = 0.9 * (goodput(trial) / trial.rate) ** 0.5
            yield index, {"attained": attained, "rate": trial.rate}

    return runner


@pytest.mark.parametrize("first_rate", [1.0, 30.0, 700.0])
def test_brackets_close_around_the_goodput(first_rate: float) -> None:
    """Each case ends within the resolution, with what the highest rate that holds has shown."""
    cases = [GoodputCase(scenario=small(), policy="jsq", seed=seed, first_rate=first_rate) for seed in range(3)]
    found = goodputs(cases, 0.9, 0.01, fake_runner(lambda trial: 40.0 + trial.seed), lambda: None)
    assert [one.rate for one in found] == pytest.approx([40.0, 41.0, 42.0], rel=0.01)
    assert all(one.at["rate"] <= 40.0 + seed < 1.02 * one.at["rate"] for seed, one in enumerate(found))


def test_trials_count_requests_and_tokens() -> None:
    """A trial has the share of the requests whose tokens all came in time; far too much load stops it early."""
    light = run_trial(GoodputTrial(scenario=small(), policy="jsq", rate=2.0, seed=0, share=0.9))
    assert light["attained"] == light["attained_tokens"] == 1.0
    assert light["disaggregated"] == 0.0
    many = small(traffic={"num_requests": 1000})
    assert run_trial(GoodputTrial(scenario=many, policy="jsq", rate=500.0, seed=0, share=0.9)) == {"attained": 0.0}
    scenario = small()
    work = scenario.workload(30.0, 0)
    result = simulate(scenario.instance_specs(), work, "jsq", scenario.conditions)
    whole = result.outcomes.tokens_on_time == result.outcomes.produced_tokens
    tokens = work.lengths.prompt_tokens + work.lengths.output_tokens
    found = attained_in(result)
    assert 0 < found["attained"] == whole.mean() < 1
    assert found["attained_tokens"] == pytest.approx(np.average(whole, weights=tokens))


def test_targets_are_required() -> None:
    """A workload without deadlines is refused."""
    scenario = scenario_from(SMALL)
    with pytest.raises(ValueError, match="mix"):
        run_trial(GoodputTrial(scenario=scenario, policy="jsq", rate=2.0, seed=0, share=0.9))
