"""Legs of disaggregated requests in the engine model: held blocks, fetches, shared links, forecasts, snapshots."""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.engine_replica import EngineReplica
from predictor.forecast import Forecaster
from predictor.indicators import SUMS, sum_up
from predictor.load import LOAD
from predictor.outcome import Outcome
from predictor.request import DECODE, PREFILL, RequestFacts
from predictor.snapshot_of_engine import snapshot_of
from predictor.step_time import StepTime
from tests.conformance.leg_workloads import leg_workload, our_request
from tests.predictor.test_engine_replica import reported_from
from tests.strategies import AFFINE, ONE_SECOND

SEEDS = range(1000, 1020)
LINK = {"kv_bytes_per_token": 4, "kv_transfer_bytes_per_s": 8.0, "kv_transfer_base_s": 0.25}
ROOMY = EngineConfig(kv_role="kv_both", num_gpu_blocks=1000, max_model_len=512, kv_transfer_base_s=1.0)


def loaded(seed: int, step_time: StepTime = ONE_SECOND, **changes: Any) -> tuple[Engine, list[RequestFacts]]:
    """Return an engine with the legs of a random workload, of which no transfer fails."""
    load = leg_workload(seed)
    engine = Engine(EngineConfig(**{**load["engine"], **changes}), step_time)
    requests = [our_request(request) for request in load["requests"]]
    if changes:  # transfers take as long as the engine says
        requests = [replace(request, transfer_s=None) for request in requests]
    for request in requests:
        engine.add(request)
    return engine, requests


def outcomes(engine: Engine, requests: list[RequestFacts]) -> list[Outcome]:
    """Run an engine to its end."""
    engine.advance()
    return [engine.outcome(request.request_id) for request in requests if request.request_id in engine.slots]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_block_is_lost(seed: int) -> None:
    """After the last request and the last transfer, all blocks are free."""
    engine, requests = loaded(seed)
    assert all(outcome.finished_s is not None for outcome in outcomes(engine, requests))
    engine.advance(engine.now_s + 1000)
    assert engine.state.engine[0].num_free_blocks == engine.num_blocks
    assert engine.state.engine[0].num_transfers == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_going_from_event_to_event_changes_nothing(seed: int) -> None:
    """Repeated steps end before a transfer does that changes them."""
    engine, requests = loaded(seed)
    stepped, _ = loaded(seed)
    while stepped.next_step() is not None:
        pass
    assert outcomes(engine, requests) == outcomes(stepped, requests)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_goes_on_as_the_engine(seed: int, *, shared: bool) -> None:
    """Also in the middle of transfers, and as arrays of a report."""
    changes = {**LINK, "kv_transfer_shared": shared, "scheduling_policy": "fcfs"}
    engine, _ = loaded(seed, **changes)
    rng = Random(seed)
    for _ in range(6):
        for _ in range(rng.randint(1, 12)):
            engine.next_step()
        snapshot = snapshot_of(engine, engine.now_s)
        original = engine_from(snapshot, ONE_SECOND)  # without own contents of requests that have ended
        copied = engine_from(snapshot_of(original, original.now_s), ONE_SECOND)
        assert steps_of(original, 40) == steps_of(copied, 40)
        replica = EngineReplica(snapshot.config, ONE_SECOND, num_slots=60, track_blocks=False)
        replica.update(reported_from(replace(snapshot, kv_cache=None, reserved=())))
        head = replica.engine.state.engine[0]
        assert head.num_free_blocks == snapshot.num_free_blocks
        assert head.num_holding == sum(item.num_blocks > 0 for item in snapshot.waiting)


def steps_of(engine: Engine, count: int) -> list[dict[str, Any]]:
    """Return the next steps."""
    steps = []
    while len(steps) < count and (step := engine.next_step()) is not None:
        steps.append(asdict(step) | {"step": 0})
    return steps


def fluid_ends(starts: list[float], work: list[float]) -> list[float]:
    """Return when transfers end that share a link equally, by small steps of time."""
    left, ends, now, tick = list(work), [0.0] * len(work), 0.0, 1 / 4096
    while any(end == 0 for end in ends):
        active = [index for index, start in enumerate(starts) if start <= now and left[index] > 0]
        for index in active:
            left[index] -= tick / len(active)
            if left[index] <= 1e-12:
                ends[index] = now + tick
        now += tick
    return ends


@pytest.mark.parametrize("seed", range(10))
def test_transfers_share_the_link(seed: int) -> None:
    """Each of n transfers gets a part in n of the bandwidth."""
    rng = Random(seed)
    count = rng.randint(1, 5)
    starts = sorted(rng.randint(0, 40) / 16 for _ in range(count))
    work = [rng.randint(1, 64) / 16 for _ in range(count)]
    engine = Engine(replace(ROOMY, kv_transfer_shared=True), StepTime(constant_s=1 / 1024))
    for index in range(count):
        engine.add(
            RequestFacts(
                request_id=str(index), arrival_s=starts[index], prompt_tokens=20, output_tokens=2, leg=DECODE,
                transfer_s=work[index],
            )
        )  # fmt: skip
    engine.advance()
    first = [engine.outcome(str(index)).first_token_s for index in range(count)]
    assert first == pytest.approx(fluid_ends(starts, work), abs=8 / 1024)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("until_s", [0.7, 6.0, 14.0, 30.0])
def test_a_replica_goes_on_with_fetches_that_overlap(until_s: float, *, shared: bool) -> None:
    """Each has got the part of the link that was its own when it was reported."""
    config = replace(ROOMY, **LINK, kv_transfer_shared=shared, enable_prefix_caching=False)
    step_time = StepTime(constant_s=1 / 64)
    engine = Engine(config, step_time)
    for index in range(6):
        tokens = 20 + 7 * (index % 3)
        engine.add(
            RequestFacts(
                request_id=str(index), arrival_s=3.0 * index, prompt_tokens=tokens, output_tokens=3, leg=DECODE
            )
        )
    engine.advance(until_s)
    snapshot = snapshot_of(engine, engine.now_s)
    replica = EngineReplica(config, step_time, num_slots=60, track_blocks=False)
    replica.update(reported_from(replace(snapshot, reserved=())))
    for request in snapshot.reserved:
        replica.engine.add(request)
    engine.advance()
    replica.engine.advance()
    found = replica.engine.state.requests.finished_s
    expected = engine.state.requests.finished_s
    assert sorted(found[found > until_s]) == pytest.approx(sorted(expected[expected > until_s]))


def test_a_transfer_takes_base_bytes_and_blocks() -> None:
    """Only what is not cached is fetched."""
    config = replace(
        ROOMY,
        kv_bytes_per_token=100,
        kv_transfer_bytes_per_s=1000.0,
        kv_transfer_block_s=0.5,
        enable_prefix_caching=True,
    )
    engine = Engine(config, ONE_SECOND)
    engine.add(RequestFacts(request_id="warm", prompt_tokens=33, output_tokens=1, prefix_hashes=(1, 2)))
    engine.advance()
    engine.add(
        RequestFacts(
            request_id="fetched", arrival_s=10, prompt_tokens=48, output_tokens=1, prefix_hashes=(1, 2), leg=DECODE
        )
    )
    engine.advance(10.5)
    assert engine.is_fetching("fetched")
    assert engine.fetch_end_s("fetched") == pytest.approx(10 + 1.0 + 16 * 0.1 + 1 * 0.5)


def test_blocks_of_a_prefill_are_held_for_its_lease_or_until_they_are_fetched() -> None:
    """A lease can be extended, and released."""
    engine = Engine(replace(ROOMY, kv_lease_s=30.0), ONE_SECOND)
    for name in ("released", "extended", "expired"):
        engine.add(RequestFacts(request_id=name, prompt_tokens=32, leg=PREFILL))
    engine.advance(1.0)
    assert [engine.is_held(name) for name in engine.slots] == [True] * 3
    assert engine.forget_finished() == []
    engine.release_held("released", at_s=2.0)
    engine.hold_until("extended", 50.0)
    engine.advance(30.9)
    assert [engine.is_held(name) for name in ("released", "extended", "expired")] == [False, True, True]
    engine.advance(31.0)
    assert [engine.is_held(name) for name in ("extended", "expired")] == [True, False]
    engine.advance(50.0)
    assert engine.state.engine[0].num_free_blocks == engine.num_blocks
    assert len(engine.forget_finished()) == 3


@pytest.mark.parametrize(("policy", "finishes"), [("fail", False), ("recompute", True)])
def test_a_failed_fetch_follows_the_policy(policy: str, *, finishes: bool) -> None:
    """The request is aborted, or computes its prompt."""
    engine = Engine(replace(ROOMY, kv_load_failure_policy=policy), ONE_SECOND)
    engine.add(RequestFacts(request_id="one", prompt_tokens=40, output_tokens=3, leg=DECODE, transfer_s=9.0))
    engine.advance(2.0)
    engine.end_fetch("one", ok=False, valid_tokens=16, at_s=2.5)
    engine.advance()
    outcome = engine.outcome("one")
    assert (outcome.output_tokens == 3) == finishes
    assert outcome.first_token_s == (3.5 if finishes else None)
    assert engine.state.engine[0].num_free_blocks == engine.num_blocks


def test_the_blocks_of_an_aborted_fetch_are_free_after_it() -> None:
    """The transfer writes to them until then."""
    engine = Engine(ROOMY, ONE_SECOND)
    engine.add(RequestFacts(request_id="one", prompt_tokens=40, output_tokens=3, leg=DECODE, transfer_s=9.0))
    engine.advance(2.0)
    engine.abort("one")
    assert engine.state.engine[0].num_free_blocks == engine.num_blocks - 3
    assert engine.forget_finished() == []
    engine.advance(9.0)
    assert engine.state.engine[0].num_free_blocks == engine.num_blocks
    assert len(engine.forget_finished()) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forecast_of_a_leg_is_what_happens(seed: int) -> None:
    """Of one that arrives now, or later, in an engine to which nothing else comes."""
    rng = Random(seed)
    engine, _ = loaded(seed, AFFINE, **LINK, scheduling_policy="fcfs")
    engine.advance(rng.uniform(0, 5))
    legs = {"kv_producer": [PREFILL], "kv_consumer": [DECODE]}.get(engine.config.kv_role, [PREFILL, DECODE])
    room = min(engine.config.max_model_len, engine.num_blocks * engine.config.block_size) - 1
    request = RequestFacts(
        request_id="candidate", prompt_tokens=rng.randint(1, room // 2), output_tokens=rng.randint(1, room // 3 + 1),
        leg=rng.choice(legs), held_s=1.0, in_s=rng.choice((0.0, rng.uniform(0, 3))),
    )  # fmt: skip
    now_s = max(engine.now_s, 5.0)
    engine.advance(now_s)
    (forecast,) = Forecaster(engine).forecast([request], now_s)
    engine.add(replace(request, arrival_s=now_s + request.in_s, in_s=0.0))
    engine.advance()
    outcome = engine.outcome("candidate")
    assert outcome.first_token_s is not None
    assert outcome.finished_s is not None
    assert forecast.ttft_s == pytest.approx(outcome.first_token_s - now_s)
    assert forecast.e2e_s == pytest.approx(outcome.finished_s - now_s)
    assert (forecast.fetched_s is None) == (request.leg == PREFILL)
    if forecast.fetched_s is not None:
        assert request.in_s < forecast.fetched_s < forecast.ttft_s


def test_an_engine_without_the_role_refuses_a_leg() -> None:
    """In one line that names the field."""
    engine = Engine(EngineConfig(kv_role="kv_producer"), ONE_SECOND)
    with pytest.raises(ValueError, match="^leg: decode needs an engine with kv_role kv_consumer or kv_both$"):
        engine.add(RequestFacts(request_id="one", prompt_tokens=3, leg=DECODE))
    with pytest.raises(ValueError, match="^kv_role: sarathi serves no decode legs"):
        Engine(EngineConfig(kv_role="kv_both", batcher="sarathi"), ONE_SECOND)


def test_indicators_know_legs() -> None:
    """Prompts that are fetched are not queued prefill."""
    engine = Engine(ROOMY, ONE_SECOND)
    engine.add(RequestFacts(request_id="prefill", prompt_tokens=32, leg=PREFILL, held_s=20.0))
    engine.add(RequestFacts(request_id="decode", prompt_tokens=64, output_tokens=2, leg=DECODE, transfer_s=20.0))
    engine.advance(3.0)
    sums = np.zeros(len(SUMS))
    sum_up(engine.state, sums, np.zeros(len(LOAD)))
    values = dict(zip(SUMS, sums.tolist(), strict=True))
    assert (values["num_fetching"], values["num_held_blocks"]) == (1, 2)
    assert (values["queued_prefill_tokens"], values["num_waiting_blocks"]) == (0, 0)
