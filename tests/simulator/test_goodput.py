"""The search for goodput finds where a share of the requests stops to attain its deadlines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.goodput import GoodputCase, GoodputGoal, GoodputTrial, attained_in, goodputs, requests_of, run_trial
from simulator.parallel import one_by_one
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
    found = goodputs(cases, [GoodputGoal()], 0.01, fake_runner(lambda trial: 40.0 + trial.seed), lambda: None)
    assert [one.rate for (one,) in found] == pytest.approx([40.0, 41.0, 42.0], rel=0.01)
    assert all(one.at["rate"] <= 40.0 + seed < 1.02 * one.at["rate"] for seed, (one,) in enumerate(found))


@pytest.mark.parametrize(("share", "at_least"), [(1.0, True), (0.0, False)])
def test_searches_end_where_no_rate_can_close_them(share: float, at_least: bool) -> None:
    """Few requests that may all arrive at once show a least rate; targets that hardly any rate keeps show 0."""
    cases = [GoodputCase(scenario=small(), policy="jsq", seed=0, first_rate=20.0)]
    rates: list[float] = []

    def runner(_: Callable[..., Any], trials: Sequence[GoodputTrial], /) -> Iterator[tuple[int, dict[str, Any]]]:
        rates.extend(trial.rate for trial in trials if trial.rate is not None)
        yield 0, {"attained": share}

    ((found,),) = goodputs(cases, [GoodputGoal()], 0.01, runner, lambda: None)
    assert found.at_least == at_least
    assert found.rate == (rates[-1] if at_least else 0.0)
    assert len(rates) < 15
    assert 1e-3 < rates[-1] < 1e5


def test_one_trial_confirms_that_no_rate_attains() -> None:
    """Where an idle instance misses too many deadlines, the search does not try one lower rate after the other."""
    impossible = small(mix=[{"name": "all", "share": 1, "ttft_slo_s": 1e-6, "tpot_slo_s": 0.08}])
    cases = [GoodputCase(scenario=impossible, policy="jsq", seed=0, first_rate=20.0)]
    goals = [GoodputGoal(share=share, by_work=by_work) for share in (0.9, 0.99) for by_work in (False, True)]
    trials: list[None] = []
    (found,) = goodputs(cases, goals, 0.01, one_by_one, lambda: trials.append(None))
    assert [one.rate for one in found] == [0.0] * 4
    assert len(trials) == 1


def test_the_run_at_the_goodput_is_reported() -> None:
    """What its trial attained is kept by class, entry and tier, of the requests that count."""
    mix = [{"name": "fast", "share": 1, "ttft_slo_s": 0.3, "tpot_slo_s": 0.08},
           {"name": "slow", "share": 1, "ttft_slo_s": 3.0, "tpot_slo_s": 0.2, "class": "best-effort"}]  # fmt: skip
    trial = GoodputTrial(scenario=small(mix=mix), policy="jsq", rate=12.0, seed=0, share=1e-9, warm_up_s=2.0)
    found = run_trial(trial)
    report = found["report"]
    assert report["num_with_targets"] == 200
    assert report["deadline_attained"] == found["attained"]
    assert report["by_mix"]["fast"] == report["by_class"]["real-time"] == report["by_tier"]["0.08"]
    fast, slow = (report["by_mix"][name] for name in ("fast", "slow"))
    kept = sum(part["num_with_targets"] * part["deadline_attained"] for part in (fast, slow))
    assert kept / 200 == pytest.approx(found["attained"])
    assert fast["deadline_attained"] < slow["deadline_attained"]


def test_searches_learn_from_each_other() -> None:
    """A stopped trial shows only what cannot be exceeded; goals that differ need few trials more than one."""
    goals = [GoodputGoal(share=share, by_work=by_work) for share in (0.9, 0.99) for by_work in (False, True)]
    goodput = {"attained": 40.0, "attained_tokens": 30.0}
    rates: list[float] = []

    def runner(_: Callable[..., Any], trials: Sequence[GoodputTrial], /) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, trial in enumerate(trials):
            rates.append(trial.rate)
            shares = {name: min(1.0, 0.9 * (known / trial.rate) ** 0.5) for name, known in goodput.items()}
            name = "attained_tokens" if trial.by_work else "attained"
            if shares[name] < trial.share:  # as if it were stopped as soon as this is known
                shares = {other: trial.share - 1e-6 if other == name else 1.0 for other in shares}
                yield index, {**shares, "is_stopped": True}
            else:
                yield index, shares

    (found,) = goodputs(
        [GoodputCase(scenario=small(), policy="jsq", seed=0, first_rate=20.0)], goals, 0.01, runner, lambda: None
    )
    exact = [40.0, 30.0, 40.0 * (0.9 / 0.99) ** 2, 30.0 * (0.9 / 0.99) ** 2]
    assert [one.rate for one in found] == pytest.approx(exact, rel=0.01)
    assert len(rates) == len(set(rates)) < 40
    alone = len(rates)
    rates.clear()
    for goal in goals:
        goodputs([GoodputCase(scenario=small(), policy="jsq", seed=0, first_rate=20.0)], [goal], 0.01, runner,
                 lambda: None)  # fmt: skip
    assert len(rates) > alone


def test_trials_count_requests_and_tokens() -> None:
    """A trial has the share of the requests whose tokens all came in time; far too much load stops it early."""
    light = run_trial(GoodputTrial(scenario=small(), policy="jsq", rate=2.0, seed=0, share=0.9))
    assert light["attained"] == light["attained_tokens"] == 1.0
    assert light["disaggregated"] == 0.0
    many = small(traffic={"num_requests": 1000})
    for by_work, name in ((False, "attained"), (True, "attained_tokens")):
        trial = GoodputTrial(scenario=many, policy="jsq", rate=500.0, seed=0, share=0.9, by_work=by_work)
        stopped, whole = run_trial(trial), run_trial(dataclasses.replace(trial, share=1e-9))
        assert stopped["is_stopped"]
        assert whole[name] <= stopped[name] < 0.9
        assert all(whole[other] <= stopped[other] for other in ("attained", "attained_tokens"))
    scenario = small()
    work = scenario.workload(30.0, 0)
    result = simulate(scenario.instance_specs(), work, "jsq", scenario.conditions)
    whole = result.outcomes.tokens_on_time == result.outcomes.produced_tokens
    tokens = work.lengths.prompt_tokens + work.lengths.output_tokens
    found = attained_in(result)
    assert 0 < found["attained"] == whole.mean() < 1
    assert found["attained_tokens"] == pytest.approx(np.average(whole, weights=tokens))


def test_trials_say_what_was_admitted_in_time() -> None:
    """With exact forecasts hardly one misses a deadline, with noisy steps more do; `jsq` admits none in time."""
    trial = GoodputTrial(scenario=small(), policy="slo", rate=30.0, seed=0, share=1e-9)
    found = run_trial(trial)
    assert 0 < found["attained"] <= found["admitted"] < 1
    assert found["admitted_missed"] < 0.01
    noisy = run_trial(dataclasses.replace(trial, scenario=small(conditions={"step_noise": 0.5})))
    assert noisy["admitted_missed"] > found["admitted_missed"]
    jsq = run_trial(dataclasses.replace(trial, policy="jsq"))
    assert jsq["admitted"] == 0
    assert jsq["admitted_missed"] is None


def test_a_warm_up_shows_what_a_short_run_hides() -> None:
    """An empty cluster keeps deadlines at a rate that a full one does not; those around count nowhere, but load it."""
    scenario = small(traffic={"num_requests": 40})
    short = GoodputTrial(scenario=scenario, policy="jsq", rate=40.0, seed=0, share=1e-9)
    warm = dataclasses.replace(short, warm_up_s=10.0)
    work, counts = requests_of(warm)
    assert (len(work), int(counts.sum()), int(np.flatnonzero(counts)[0])) == (840, 40, 400)
    assert run_trial(warm)["attained"] < run_trial(short)["attained"]
    result = simulate(scenario.instance_specs(), work, "jsq", scenario.conditions)
    kept = result.outcomes.tokens_on_time == result.outcomes.produced_tokens
    assert run_trial(warm)["attained"] == kept[counts].mean()  # although it ends before the last requests do


def test_requests_without_deadlines_count_nowhere() -> None:
    """Best effort is served beside; a TTFT target alone is one deadline, also for a trial that is stopped."""
    entries = [
        {"name": "first", "share": 1, "ttft_slo_s": 0.3},
        {"name": "rest", "share": 3, "class": "best-effort"},
    ]
    scenario = scenario_from({**SMALL, "mix": entries})
    light = run_trial(GoodputTrial(scenario=scenario, policy="jsq", rate=2.0, seed=0, share=0.9))
    assert light["attained"] == light["attained_tokens"] == 1.0
    many = scenario.changed(traffic={"num_requests": 1000})
    trial = GoodputTrial(scenario=many, policy="jsq", rate=500.0, seed=0, share=0.9)
    stopped, whole = run_trial(trial), run_trial(dataclasses.replace(trial, share=1e-9))
    assert 0 < whole["attained"] <= stopped["attained"] < 0.9


@pytest.mark.parametrize("share", [0, 1.5, -0.1, float("nan"), True, "0.9"])
def test_shares_are_checked(share: Any) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=r"^attained: must be a share above 0, at most 1"):
        GoodputGoal(share=share)


def test_targets_are_required() -> None:
    """A workload without deadlines is refused."""
    scenario = scenario_from(SMALL)
    with pytest.raises(ValueError, match="mix"):
        run_trial(GoodputTrial(scenario=scenario, policy="jsq", rate=2.0, seed=0, share=0.9))
