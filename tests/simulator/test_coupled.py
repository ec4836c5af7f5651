"""Coupled engines: the same outcomes as engines that run one after the other, again and again, until they agree."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.gain import default_levels
from predictor.request import RequestFacts
from predictor.state import HELD, NONE
from scheduler.candidates import RequestIndicators
from scheduler.intentions import Ask
from simulator import coupled
from simulator.assembly import simulate, simulation
from simulator.conditions import Conditions, Outage
from simulator.coupled_run import CoupledSimulation
from simulator.fleet import InstanceSpec
from simulator.goodput import missed_so_far
from simulator.metrics import latencies, request_table, summary
from simulator.request_slots import collect_finished
from simulator.result import STATUSES
from simulator.workload import Workload
from tests.simulator.small_clusters import A30, config, poisson
from tests.simulator.small_clusters import specs as small_specs

HOP_S = 0.004
MAX_ROUNDS = 300
PREFILL, DECODE = "prefill", "decode"


def pools(num_prefill: int, num_decode: int, **changes: Any) -> list[InstanceSpec]:
    """Prefill and decode instances."""
    made = {"kv_bytes_per_token": 131072, "kv_transfer_bytes_per_s": 2e9, **changes}
    return [
        *[InstanceSpec(config=config(kv_role="kv_producer", **made), step_time=A30, role=PREFILL)] * num_prefill,
        *[InstanceSpec(config=config(kv_role="kv_consumer", **made), step_time=A30, role=DECODE)] * num_decode,
    ]


class Legs(NamedTuple):
    """Where a request is served: without a prefill instance, as a whole on the other one."""

    prefill: int | None
    decode: int


class Times(NamedTuple):
    """What happened to a request."""

    prefilled_s: float
    fetched_s: float
    first_token_s: float
    finished_s: float


def until_they_agree(
    specs: list[InstanceSpec], work: Workload, legs: list[Legs], num: int | None = None
) -> list[Times]:
    """Run each engine alone with what the others did in the last round, until a round changes nothing.

    Prefill engines are told when blocks were fetched, decode engines when prefill legs ended.
    """
    num = num or len(work)
    fetched = [math.inf] * num
    ended = [math.inf] * num
    for _ in range(MAX_ROUNDS):
        before = list(fetched), list(ended)
        for index, spec in enumerate(specs):
            if spec.role == PREFILL:
                for number, time_s in _prefill(spec, work, legs, index, fetched).items():
                    ended[number] = time_s
        times = _decode_all(specs, work, legs, ended)
        fetched = [times[number].fetched_s if number in times else math.inf for number in range(num)]
        if (fetched, ended) == before:
            return [times[number] for number in range(num)]
    raise AssertionError("the rounds do not end")


def _prefill(
    spec: InstanceSpec, work: Workload, legs: list[Legs], index: int, fetched: list[float]
) -> dict[int, float]:
    engine = Engine(spec.config, spec.step_time)
    mine = [number for number, one in enumerate(legs) if one.prefill == index]
    for number in mine:
        engine.add(_request(work, number, leg=PREFILL, held_s=1e9))
    for number in sorted((one for one in mine if fetched[one] < math.inf), key=fetched.__getitem__):
        engine.advance(fetched[number])
        engine.release_held(str(number), at_s=fetched[number])
    engine.advance(1e6)
    outcomes = {number: engine.outcome(str(number)).finished_s for number in mine}
    return {number: time_s for number, time_s in outcomes.items() if time_s is not None}


def _decode_all(specs: list[InstanceSpec], work: Workload, legs: list[Legs], ended: list[float]) -> dict[int, Times]:
    times: dict[int, Times] = {}
    for index, spec in enumerate(specs):
        engine = Engine(spec.config, spec.step_time)
        mine = [number for number, one in enumerate(legs) if one.decode == index]
        for number in mine:
            if legs[number].prefill is None:
                engine.add(_request(work, number))
            elif ended[number] < math.inf:
                engine.add(_request(work, number, leg=DECODE, arrival_s=ended[number] + HOP_S))
        engine.advance()
        for name, slot in engine.slots.items():
            number, outcome = int(name), engine.outcome(name)
            is_whole = legs[number].prefill is None
            fetched_s = -1.0 if is_whole else float(engine.state.requests[slot].transfer_s)
            assert outcome.first_token_s is not None
            assert outcome.finished_s is not None
            prefilled_s = -1.0 if is_whole else ended[number]
            times[number] = Times(prefilled_s, fetched_s, outcome.first_token_s, outcome.finished_s)
    return times


def _request(work: Workload, number: int, **changes: Any) -> RequestFacts:
    return RequestFacts(**{
        "request_id": str(number),
        "prompt_tokens": int(work.lengths.prompt_tokens[number]),
        "output_tokens": int(work.lengths.output_tokens[number]),
        "arrival_s": float(work.arrival_s[number]),
        **changes,
    })  # fmt: skip


def run_coupled(specs: list[InstanceSpec], work: Workload, legs: list[Legs]) -> list[Times]:
    """Serve requests on given instances by the simulator."""
    running = simulation(specs, work, "round_robin", Conditions(hop_s=HOP_S, sample_s=0.0))
    assert isinstance(running, CoupledSimulation)
    for number, one in enumerate(legs):
        now_s = float(work.arrival_s[number])
        running.refresh(now_s)
        if one.prefill is None:
            running.send_by(coupled.send_whole, number, one.decode, now_s, now_s)
        else:
            running.send_by(coupled.await_decode, number, one.decode, now_s, now_s + 0.1)
            running.send_by(coupled.send_prefill, number, one.prefill, now_s, now_s, 0.1)
    running.run_out()
    for index in range(len(specs)):
        collect_finished(running.fleet, running.requests, index)
    asked, found = running.requests.outcomes, running.requests.legs
    return [
        Times(*map(float, (leg.prefilled_s, leg.fetched_s, one.first_token_s, one.finished_s)))
        for one, leg in zip(asked, found, strict=True)
    ]


CASES = {
    "room": {},
    "little memory": {"num_gpu_blocks": 60},
    "links of their own": {"kv_transfer_shared": False, "kv_transfer_base_s": 0.02},
    "sync": {"async_scheduling": False},
    "slow link": {"kv_transfer_bytes_per_s": 2e8},
    "few seats": {"max_num_seqs": 3, "num_gpu_blocks": 80},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_coupled_engines_agree_with_engines_alone(case: str, seed: int) -> None:
    """Each request's prefill end, fetch end, first and last token are those of the rounds."""
    generator = np.random.default_rng([seed, len(case)])
    specs = pools(2, 2, **CASES[case])
    work = poisson(80, 14.0, seed, max_tokens=300)
    legs = [
        Legs(None if generator.random() < 0.2 else int(generator.integers(2)), int(generator.integers(2, 4)))
        for _ in range(len(work))
    ]
    expected = until_they_agree(specs, work, legs)
    found = run_coupled(specs, work, legs)
    assert np.array(found) == pytest.approx(np.array(expected), abs=1e-7)


def test_prefill_engines_wait_for_their_blocks() -> None:
    """With blocks for one prompt only, each prefill waits until the blocks of the one before are fetched."""
    specs = pools(1, 1, num_gpu_blocks=30, kv_transfer_bytes_per_s=2e8)
    work = poisson(12, 50.0, 3, max_tokens=500)
    work.lengths.prompt_tokens[:] = 300
    found = run_coupled(specs, work, [Legs(0, 1)] * len(work))
    expected = until_they_agree(specs, work, [Legs(0, 1)] * len(work))
    assert np.array(found) == pytest.approx(np.array(expected), abs=1e-7)
    order = sorted(found)
    assert all(later.prefilled_s > earlier.fetched_s for earlier, later in pairwise(order))


@pytest.mark.parametrize("policy", ["block", "marginal", "pd_least", "pd_threshold", "pd_dynamo", "random", "jsq"])
def test_all_requests_end(policy: str) -> None:
    """Every request ends with all its tokens; nothing stays held or reserved."""
    work = poisson(200, 16.0)
    running = simulation(pools(2, 2), work, policy, Conditions(sample_s=0.5))
    result = running.run()
    assert (result.decisions.status == STATUSES.index("finished")).all()
    assert (result.outcomes.produced_tokens == work.lengths.output_tokens).all()
    assert (result.decisions.instance >= 2).all()
    assert (result.decisions.decided_s == work.arrival_s).all()
    has_two = result.decisions.prefill_instance >= 0
    assert (result.decisions.prefill_instance[has_two] < 2).all()
    assert has_two.all() or policy in ("block", "marginal", "pd_threshold", "pd_dynamo")
    assert (result.legs.fetched_s[has_two] >= result.legs.prefilled_s[has_two]).all()
    assert (result.outcomes.first_token_s[has_two] > result.legs.fetched_s[has_two]).all()
    assert (running.fleet.instances.num_underway == 0).all()


@pytest.mark.parametrize("failed", [0, 1, 2, 3])
@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
def test_requests_start_again_where_an_instance_fails(failed: int, on_failure: str) -> None:
    """Every request ends, or is lost in the middle of its response by a decode instance."""
    work = poisson(200, 16.0)
    conditions = Conditions(outages=(Outage(instance=failed, from_s=4.0, until_s=7.0),))
    specs = pools(2, 2, kv_load_failure_policy=on_failure, kv_transfer_bytes_per_s=3e8)
    result = simulate(specs, work, "pd_least", conditions)
    lost = result.decisions.status == STATUSES.index("lost")
    assert (lost | (result.decisions.status == STATUSES.index("finished"))).all()
    assert (result.outcomes.produced_tokens[~lost] == work.lengths.output_tokens[~lost]).all()
    assert lost.any() == (failed >= 2)
    assert (result.decisions.num_sends > 1).any() or (on_failure == "recompute" and failed < 2)


def test_blocks_of_a_lost_decode_leg_are_held_until_the_lease_ends() -> None:
    """The blocks that a failed decode instance would have fetched are free after the lease."""
    work = poisson(40, 16.0)
    specs = pools(1, 2, kv_lease_s=5.0, kv_transfer_bytes_per_s=1e8)
    running = simulation(specs, work, "pd_least", Conditions(outages=(Outage(instance=1, from_s=1.5),)))
    result = running.run()
    assert np.isin(result.decisions.status, [STATUSES.index("finished"), STATUSES.index("lost")]).all()
    coupled.advance_coupled(running.fleet, running.requests, result.end_s + 6.0, HOP_S)
    stack = running.fleet.stack
    assert not (stack.requests.stage[0] == HELD).any()
    assert stack.engine[0, 0].num_free_blocks == stack.engine[0, 0].num_blocks


def test_forecasts_of_legs_equal_those_of_sidecars() -> None:
    """A prefill leg, and a decode leg that arrives later, are forecast as by the engine model itself."""
    specs, work = pools(1, 1, num_gpu_blocks=400), poisson(13, 20.0)
    work.lengths.output_tokens[:12] = 100
    legs = [Legs(0, 1)] * 12
    now_s, in_s = float(work.arrival_s[11]) + 1.0, 0.05
    running = simulation(specs, work, "block", Conditions(hop_s=HOP_S, sample_s=0.0))
    assert isinstance(running, CoupledSimulation)
    expected = until_they_agree(specs, work, legs, num=12)
    decoding = Engine(specs[1].config, specs[1].step_time)
    for number in range(12):
        arrival_s = float(work.arrival_s[number])
        running.refresh(arrival_s)
        running.send_by(coupled.await_decode, number, 1, arrival_s, arrival_s + 0.1)
        running.send_by(coupled.send_prefill, number, 0, arrival_s, arrival_s, 0.1)
        decoding.add(_request(work, number, leg=DECODE, arrival_s=expected[number].prefilled_s + HOP_S))
    running.refresh(now_s)
    decoding.advance(now_s)
    assert decoding.running()
    found = {}
    for leg, row, later_s in ((PREFILL, 0, 0.0), (DECODE, 1, in_s)):
        table = running.schedulers[0].core.instances.table
        among = table.candidates(RequestIndicators(prompt_tokens=1, tag_tokens=1.0), now_s, np.array([row]))
        ask = Ask(among, (), True, leg, later_s)
        columns = running.forecasts.forecast(running.fleet, running.requests, ask, 12, now_s)
        found[leg] = {name: float(column[0]) for name, column in columns.items()}
    (told,) = Forecaster(decoding).forecast([_request(work, 12, leg=DECODE, in_s=in_s)], now_s)
    assert found[DECODE]["predicted_e2e_s"] == pytest.approx(told.e2e_s, abs=1e-9)
    idle = Engine(specs[0].config, specs[0].step_time)
    (alone,) = Forecaster(idle).forecast([_request(work, 12, leg=PREFILL)], now_s)
    assert found[PREFILL]["predicted_e2e_s"] == pytest.approx(alone.e2e_s, abs=1e-9)


def test_summaries_have_the_pools_apart() -> None:
    """Shares of time and blocks by role, and the means of what two legs took."""
    work = poisson(200, 16.0)
    result = simulate(pools(2, 1), work, "pd_least", Conditions(sample_s=0.2))
    found = summary(result)
    assert {role: pool["num_instances"] for role, pool in found["pools"].items()} == {PREFILL: 2, DECODE: 1}
    assert 0 < found["pools"][PREFILL]["busy_share"] < found["pools"][DECODE]["busy_share"] <= 1
    assert found["pools"][PREFILL]["link_busy_share"] == 0 < found["pools"][DECODE]["link_busy_share"]
    assert found["pools"][DECODE]["held_blocks_share"] == 0 < found["pools"][PREFILL]["held_blocks_share"]
    took, legs = latencies(result), found["legs"]
    parts = (legs[name] for name in ("prefill_s", "held_s", "first_step_s"))
    assert sum(parts) == pytest.approx(float(took.ttft_s.mean()))
    assert legs["disaggregated"] == 1
    rows = request_table(result)
    assert set(rows["prefill_instance"]) == {"instance-0", "instance-1"}
    assert (rows["fetched_s"] > rows["prefilled_s"]).all()
    assert "pools" not in summary(simulate(small_specs(), work, "jsq"))


def test_a_request_with_two_legs_misses_once() -> None:
    """Where both legs are late, that is one missed request, at any time."""
    short_s = np.full(30, 1e-6)
    work = replace(poisson(30, 30.0), service=replace(default_levels(30), ttft_slo_s=short_s, tpot_slo_s=short_s))
    running = simulation(pools(1, 1), work, "round_robin", Conditions(hop_s=HOP_S, sample_s=0.0))
    for number in range(len(work)):
        now_s = float(work.arrival_s[number])
        running.refresh(now_s)
        running.send_by(coupled.await_decode, number, 1, now_s, now_s + 0.1)
        running.send_by(coupled.send_prefill, number, 0, now_s, now_s, 0.1)
        running.now_s = now_s + 1e-3
        assert missed_so_far(running).sum() == number + 1
    running.run_out()
    running.now_s = math.inf
    assert missed_so_far(running).all()


def test_blocks_of_an_engine_that_failed_are_not_left_to_the_lease() -> None:
    """A decode leg whose prefill engine failed before holds no blocks there: those of others stay as they are."""
    running = simulation(pools(1, 1), poisson(1, 1.0), "round_robin", Conditions())
    legs, last = running.requests.legs[0], running.fleet.stack.requests[0, -1]
    legs.prefill, legs.prefill_slot, legs.decode, legs.decode_slot, legs.prefilled_s = 0, NONE, 1, 1, 1.0
    last.stage, last.transfer_s = HELD, 77.0
    coupled.lose_decode(running.fleet, running.requests, 0, 2.0)
    assert (last.transfer_s, legs.decode) == (77.0, NONE)
