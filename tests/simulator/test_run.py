"""A simulated cluster loses no request, is deterministic, and agrees with simpler models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predictor.request import CLASSES, REAL_TIME
from predictor.step_time import Curve, StepTime
from simulator.assembly import simulate
from simulator.conditions import Conditions, Outage
from simulator.fleet import InstanceSpec
from simulator.mix import mix_from, mixed_workload
from simulator.result import SHED, STATUSES
from simulator.workload import RequestLengths, at_rate, noisy, poisson_gaps, tagged, typical, workload
from tests.simulator.small_clusters import A30, SECOND, config, families, lengths, plain_run, poisson, specs

FINISHED = STATUSES.index("finished")

CONDITIONS = {
    "plain": Conditions(),
    "several schedulers": Conditions(num_schedulers=4, decision_s=0.2, network_s=0.1, reservations=False),
    "stale": Conditions(indicator_period_s=0.5, indicator_delay_s=0.2, num_schedulers=2),
    "noise": Conditions(step_noise=0.3),
    "failures": Conditions(
        outages=(
            Outage(instance=0, from_s=2.0, until_s=6.0),
            Outage(instance=1, from_s=3.0),
            Outage(instance=2, from_s=0.0, until_s=4.0),
            Outage(instance=2, from_s=8.0, until_s=9.0),
        )
    ),
}
POLICIES = ("block", "marginal", "llumnix", "jsq", "lmetric", "round_robin", "min_qpm", "block: k = 2", "power_of_two")


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_conserves_requests(policy: str, name: str) -> None:
    """Every request finishes with all of its tokens, or is counted as lost."""
    work = poisson(250, 16.0)
    if policy == "block":
        work = tagged(work, noisy(0.5), np.random.default_rng(3))
    result = simulate(specs(), work, policy, CONDITIONS[name], seed=1)
    statuses = result.decisions.status
    finished = statuses == FINISHED
    lost = statuses == STATUSES.index("lost")
    assert finished.sum() + lost.sum() == len(work)
    assert (result.outcomes.produced_tokens[finished] == work.lengths.output_tokens[finished]).all()
    assert (result.outcomes.produced_tokens[lost] < work.lengths.output_tokens[lost]).all()
    if name == "failures":
        assert lost.any()
        assert (result.decisions.num_sends > 1).any()
        assert not (result.decisions.instance[result.work.arrival_s > 3.0] == 1).any()
    else:
        assert finished.all()
    first, last = result.outcomes.first_token_s[finished], result.outcomes.finished_s[finished]
    arrival_s = work.arrival_s[finished]
    assert (arrival_s < first).all()
    assert (first <= last).all()
    one_at_a_time = result.outcomes.produced_tokens[finished] == 1
    assert ((first < last) | one_at_a_time).all()


def test_conserves_requests_when_overloaded() -> None:
    """A queue much longer than the initial number of slots loses no request."""
    work = poisson(2000, 1000.0)
    result = simulate(specs(2, num_gpu_blocks=40), work, "jsq")
    assert (result.decisions.status == FINISHED).all()
    assert result.outcomes.num_preemptions.sum() > 0


@pytest.mark.parametrize("policy", ["slo", "polyserve"])
def test_requests_that_overtake_an_admission_queue_are_sent(policy: str) -> None:
    """While some requests wait, others are placed at once; each is at its instance before the next decision.

    Best effort leaves slack to the others, and may be shed after a minute; most of it is served.
    """
    entries = [
        {"name": "chat", "share": 2, "ttft_slo_s": 0.5, "tpot_slo_s": 0.04},
        {"name": "reports", "share": 1, "class": "best-effort", "ttft_slo_s": 2.0, "tpot_slo_s": 0.1},
        {"name": "slow", "share": 1, "ttft_slo_s": 1.0, "tpot_slo_s": 0.2},
    ]
    work = mixed_workload(poisson(250, 25.0), mix_from(entries), 0)
    result = simulate(specs(3), work, policy)
    assert work.service is not None
    is_real_time = work.service.request_class == CLASSES.index(REAL_TIME)
    assert 150 < is_real_time.sum() < 220
    assert (result.decisions.status[is_real_time] == FINISHED).all()
    assert np.isin(result.decisions.status, (FINISHED, STATUSES.index(SHED))).all()
    assert (result.decisions.status[~is_real_time] == FINISHED).mean() > 0.9


def test_two_instances_by_hand() -> None:
    """Steps take a second; least_loaded alternates, and the fourth request waits for the only seat."""
    # a and b go to instances 0 and 1, one prompt step and outputs - 1 decodes each: a ends at 3, b at 0.5 + 2.
    # c at 0.6 finds one request on each and goes to 0, where it waits for a's seat until 3, and ends at 4.
    # d at 2.6 finds two requests on 0, none on 1, and ends at 3.6.
    work = workload(
        RequestLengths(prompt_tokens=np.array([5, 5, 5, 5]), output_tokens=np.array([3, 2, 1, 1])),
        np.array([0.0, 0.5, 0.6, 2.6]),
    )
    made = [InstanceSpec(config=config(max_num_seqs=1), step_time=SECOND)] * 2
    result = simulate(made, work, "least_loaded")
    assert result.decisions.instance.tolist() == [0, 1, 0, 1]
    assert result.outcomes.first_token_s.tolist() == pytest.approx([1.0, 1.5, 4.0, 3.6])
    assert result.outcomes.finished_s.tolist() == pytest.approx([3.0, 2.5, 4.0, 3.6])


def test_is_an_m_d_1_queue() -> None:
    """With one seat, a step a request, and Poisson arrivals the mean wait is Pollaczek and Khinchine's."""
    num, load = 40_000, 0.7
    work = workload(
        RequestLengths(prompt_tokens=np.full(num, 5), output_tokens=np.ones(num, np.int64)),
        at_rate(poisson_gaps(num, np.random.default_rng(5)), load),
    )
    made = [InstanceSpec(config=config(max_num_seqs=1), step_time=SECOND)]
    result = simulate(made, work, "random", Conditions(sample_s=0))
    waits_s = result.outcomes.finished_s - work.arrival_s - 1.0
    assert waits_s.mean() == pytest.approx(load / (2 * (1 - load)), rel=0.08)


@pytest.mark.parametrize("policy", ["block", "power_of_two", "random"])
def test_same_seed_gives_the_same_result(policy: str) -> None:
    """The same seed gives the same bytes, another seed gives others."""
    work = tagged(poisson(150, 12.0), noisy(0.4), np.random.default_rng(1))
    conditions = Conditions(num_schedulers=3, step_noise=0.1, decision_s=0.05)
    runs = [simulate(specs(), work, policy, conditions, seed=seed) for seed in (7, 7, 8)]
    outcomes = [run.outcomes.tobytes() + run.decisions.tobytes() for run in runs]
    assert outcomes[0] == outcomes[1] != outcomes[2]


@pytest.mark.parametrize("changes", [{}, {"batcher": "vllm_v0"}, {"async_scheduling": True}], ids=str)
@pytest.mark.parametrize("policy", ["llumnix", "jsq", "block", "marginal"])
def test_agrees_with_a_plain_simulator(policy: str, changes: dict[str, Any]) -> None:
    """Decisions and outcomes equal those of engine objects that are driven one by one."""
    if changes.get("batcher"):
        changes = {**changes, "max_num_batched_tokens": 512}
    made = [InstanceSpec(config=config(**changes), step_time=A30, pace=1.0) for _ in range(3)]
    work = poisson(150, 20.0, seed=4)
    result = simulate(made, work, policy, Conditions(sample_s=0))
    chosen, ended = plain_run(made, work, policy)
    assert result.decisions.instance.tolist() == chosen
    assert result.outcomes.first_token_s.tolist() == pytest.approx([one.first_token_s for one in ended])
    assert result.outcomes.finished_s.tolist() == pytest.approx([one.finished_s for one in ended])
    assert result.outcomes.num_preemptions.tolist() == [one.num_preemptions for one in ended]


def test_prefix_caches_are_the_engines_own() -> None:
    """Prompts that share blocks hit as on engine objects, and more often with a policy that uses prefix hits."""
    work, names = families(200, 12.0)
    made = specs(3, enable_prefix_caching=True)
    for policy in ("jsq", "block", "marginal"):
        result = simulate(made, work, policy)
        chosen, ended = plain_run(made, work, policy, names)
        assert result.decisions.instance.tolist() == chosen
        assert result.outcomes.hit_tokens.tolist() == [one.prefix_hit_tokens for one in ended]
    aware, blind = (simulate(made, work, policy).outcomes.hit_tokens.sum() for policy in ("lmetric", "round_robin"))
    assert aware > blind > 0


def test_mixed_instances_serve_what_they_can() -> None:
    """Requests go only to instances where they fit; a request that fits no instance is refused."""
    made = [
        InstanceSpec(config=config(), step_time=A30),
        InstanceSpec(config=config(max_model_len=64, max_num_seqs=4, num_gpu_blocks=41), step_time=A30),
    ]
    work = workload(
        RequestLengths(prompt_tokens=np.array([30, 30, 200, 600]), output_tokens=np.array([5, 5, 5, 5])),
        np.array([0.0, 0.01, 0.02, 0.03]),
    )
    result = simulate(made, work, "least_loaded")
    assert result.decisions.instance.tolist() == [0, 1, 0, -1]
    assert [STATUSES[fate] for fate in result.decisions.status] == ["finished"] * 3 + ["refused"]


def test_slow_instances_get_less_where_that_is_predicted() -> None:
    """Block sends fewer requests to an instance that is three times slower, unless its predictor assumes a fast one."""
    work = poisson(300, 4.0)
    slow = InstanceSpec(config=config(), step_time=A30, pace=3.0, predicted_pace=3.0)
    fast = InstanceSpec(config=config(), step_time=A30)
    known = simulate([fast, slow], work, "block")
    unknown = simulate([fast, replace(slow, predicted_pace=1.0)], work, "block")
    shares = [np.mean(result.decisions.instance == 1) for result in (known, unknown)]
    assert shares[0] < 0.5 * shares[1]


def test_the_last_forecast_is_exact() -> None:
    """With true lengths, the last request's forecast is exact; with a wrong profile, it is wrong."""
    work = poisson(60, 20.0)
    result = simulate(specs(2), work, "block")
    assert result.decisions.predicted_e2e_s[-1] == pytest.approx(result.outcomes.finished_s[-1] - work.arrival_s[-1])
    wrong = StepTime(constant_s=1.0, by_tokens=Curve(x=(0.0,), y=(0.0,)))
    made = [replace(spec, predicted_step_time=wrong) for spec in specs(2)]
    off = simulate(made, work, "block").decisions.predicted_e2e_s[-1]
    assert off > 2 * (result.outcomes.finished_s[-1] - work.arrival_s[-1])


def test_stale_views_herd() -> None:
    """Without reservations, several schedulers that decide at the same moment choose the same instance."""
    num = 80
    work = workload(
        RequestLengths(prompt_tokens=np.full(num, 50), output_tokens=np.full(num, 20)),
        np.repeat(np.arange(10.0) * 30, 8),
    )
    made = specs(4)
    blind = Conditions(num_schedulers=8, decision_s=0.5, network_s=0.5, reservations=False)
    reserved = replace(blind, reservations=True, decision_s=0.0)

    def largest_group(conditions: Conditions) -> float:
        chosen = simulate(made, work, "least_loaded", conditions).decisions.instance.reshape(10, 8)
        return np.mean([np.bincount(row).max() for row in chosen])

    assert largest_group(reserved) == 2
    assert largest_group(blind) == 8


def test_requests_on_their_way_are_ahead_in_forecasts() -> None:
    """A request is forecast behind those that were placed at the same moment and have not arrived yet."""
    work = workload(RequestLengths(prompt_tokens=np.full(6, 128), output_tokens=np.full(6, 2)), np.zeros(6))
    network_s = 0.5
    result = simulate(specs(1), work, "block_ttft", Conditions(network_s=network_s))
    predicted = result.decisions.predicted_ttft_s
    assert predicted[0] > network_s
    assert (np.diff(predicted) > 0.02).all()  # a prompt fills a step
    assert predicted[-1] == pytest.approx(result.outcomes.first_token_s[-1])  # nothing comes after it


def test_indicators_grow_old() -> None:
    """What was told a while ago decides, with what this scheduler itself sent since; that evens it out again."""
    work = poisson(400, 14.0)
    waits = [
        np.mean(simulate(specs(4), work, "jsq", conditions, seed=1).outcomes.first_token_s - work.arrival_s)
        for conditions in (
            Conditions(),
            Conditions(indicator_period_s=4.0, num_schedulers=1),
            Conditions(indicator_period_s=4.0, num_schedulers=8),
        )
    ]
    assert waits[0] < waits[1] < waits[2]


def test_predicted_lengths_equal_the_predictors() -> None:
    """The compiled code predicts the same lengths from a tag as `predictor.lengths`."""
    from predictor.lengths import RESIDUALS, Tag, expected_tokens
    from simulator.fleet import residual_table
    from simulator.predicted_lengths import predicted_tokens

    generator = np.random.default_rng(0)
    for rule in RESIDUALS:
        table = residual_table(rule)
        for _ in range(2000):
            tag = Tag(
                median_tokens=float(generator.lognormal(5, 1)), spread=float(generator.choice([0, 0.1, 0.4, 1.0]))
            )
            produced = int(generator.lognormal(5, 1.5)) * int(generator.integers(0, 3) > 0)
            if tag.spread and produced and np.log(produced / tag.median_tokens) / tag.spread > 8:
                continue  # beyond the table, the kernel uses the tail's formula
            expected = expected_tokens(tag, produced, rule)
            assert predicted_tokens(np.log(tag.median_tokens), tag.spread, produced, table) == pytest.approx(
                expected, abs=1.01, rel=1e-4
            )


def test_typical_tags_are_the_same_for_all() -> None:
    """A typical tag is the distribution of all lengths."""
    median, spread = typical(lengths(500).output_tokens, np.random.default_rng(0))
    assert len(set(median)) == len(set(spread)) == 1
    assert 20 < median[0] < 60
