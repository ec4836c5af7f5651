"""Snapshots of engines, and engines made from snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.lengths import Tag
from predictor.request import RequestFacts
from predictor.snapshot import VERSION, LiveRequest, Snapshot
from predictor.snapshot_of_engine import snapshot_of
from predictor.state import FINISHED
from tests.inspecting import expect_blocks_conserved, expect_nothing_left
from tests.strategies import AFFINE, Load, examples, load_of, loads

CLOSE = 1e-9
every_batcher = pytest.mark.parametrize("batcher", BATCHERS)
LOADS = {batcher: loads(batcher, ending=True, max_requests=12, tick_s=0.004) for batcher in BATCHERS}
moments = st.floats(0.0, 1.05)


def halfway(load: Load, moment: float) -> tuple[Engine, float]:
    """Run a load's engine up to a moment of its run; it knows later arrivals already."""
    whole = load.loaded(AFFINE)
    whole.advance()
    engine = load.loaded(AFFINE)
    engine.advance(moment * whole.now_s)
    return engine, moment * whole.now_s


def has_gap(engine: Engine) -> bool:
    """Return whether a request ended unpredictably while in a step that is in flight; a snapshot leaves it out."""
    rows = engine.state.requests
    return any(rows[slot].in_flight_tokens > 0 and rows[slot].status == FINISHED for slot in engine.slots.values())


def unfinished(engine: Engine) -> list[str]:
    """List the requests that have not ended."""
    return [name for name in engine.slots if engine.outcome(name).finished_s is None]


@every_batcher
def test_a_snapshot_of_a_copy_is_the_snapshot(batcher: str) -> None:
    """The snapshot of an engine made from a snapshot is the same."""

    @examples(30)
    @given(LOADS[batcher], moments)
    def check(load: Load, moment: float) -> None:
        engine, now_s = halfway(load, moment)
        snapshot = snapshot_of(engine, now_s)
        copied = engine_from(snapshot, AFFINE)
        expect_blocks_conserved(copied)
        again = snapshot_of(copied, now_s)
        for before, after in zip(snapshot.steps, again.steps, strict=True):
            assert after.start_s == pytest.approx(before.start_s, rel=CLOSE, abs=CLOSE)
        assert replace(again, steps=snapshot.steps) == snapshot
        assert [step.scheduled for step in again.steps] == [step.scheduled for step in snapshot.steps]

    check()


@every_batcher
def test_a_copy_continues_like_the_engine(batcher: str) -> None:
    """After a snapshot, every request ends at the same time as on the engine, with the same number of preemptions."""

    @examples(30)
    @given(LOADS[batcher], moments)
    def check(load: Load, moment: float) -> None:
        engine, now_s = halfway(load, moment)
        copied = engine_from(snapshot_of(engine, now_s), AFFINE)
        names = unfinished(engine)
        assert sorted(copied.slots) == sorted(names)
        close = CLOSE if not has_gap(engine) else 0.2
        for one in (engine, copied):
            one.advance()
            expect_nothing_left(one)
        for name in names:
            ours, theirs = copied.outcome(name), engine.outcome(name)
            assert ours.finished_s == pytest.approx(theirs.finished_s, rel=close, abs=close)
            if close == CLOSE:
                assert (ours.output_tokens, ours.num_preemptions) == (theirs.output_tokens, theirs.num_preemptions)

    check()


@every_batcher
def test_forecasts_from_a_snapshot_equal_the_engines(batcher: str) -> None:
    """The copy and the engine give the same forecasts."""

    @examples(30)
    @given(LOADS[batcher], moments)
    def check(load: Load, moment: float) -> None:
        first, *others = load.requests
        candidate = replace(Load(engine=load.engine, requests=[first]).our_requests()[0], request_id="candidate")
        engine, now_s = halfway(Load(engine=load.engine, requests=others or [first]), moment)
        copied = engine_from(snapshot_of(engine, now_s), AFFINE)
        if has_gap(engine):
            return
        (ours,) = Forecaster(copied).forecast([candidate], now_s)
        (theirs,) = Forecaster(engine).forecast([candidate], now_s)
        for name in ("ttft_s", "e2e_s", "tpot_s", "queue_s", "delay_sum_s", "delay_worst_s"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=CLOSE, abs=CLOSE), name
        for name in ("output_tokens", "num_preemptions", "prefix_hit_tokens", "others_preempted"):
            assert getattr(ours, name) == getattr(theirs, name), name

    check()


def test_the_elapsed_time_of_a_step_counts() -> None:
    """A request that arrives during a step waits for its end, not for its whole duration."""
    engine = load_of("vllm_v1", (40, 30)).loaded(AFFINE)
    record = engine.next_step()
    assert record is not None
    snapshot = snapshot_of(engine, record.start_s)
    candidate = RequestFacts(request_id="new", prompt_tokens=4, output_tokens=1)
    queues_s = []
    for share in (0.0, 0.25, 0.75):
        now_s = record.start_s + share * (record.end_s - record.start_s)
        copied = engine_from(replace(snapshot, taken_s=now_s), AFFINE)
        queues_s.append(Forecaster(copied).forecast([candidate], now_s)[0].queue_s)
    whole = record.end_s - record.start_s
    assert queues_s == pytest.approx([whole, 0.75 * whole, 0.25 * whole], rel=CLOSE)


def test_an_overdue_step_ends_now() -> None:
    """A step that has run longer than predicted ends at the time of the snapshot, not in the past."""
    engine = load_of("vllm_v1", (40, 30)).loaded(AFFINE)
    record = engine.next_step()
    assert record is not None
    late_s = record.end_s + 5.0
    copied = engine_from(snapshot_of(engine, late_s), AFFINE)
    candidate = RequestFacts(request_id="new", prompt_tokens=4, output_tokens=1)
    assert Forecaster(copied).forecast([candidate], late_s)[0].queue_s == pytest.approx(0.0, abs=CLOSE)


def test_reserved_requests_count() -> None:
    """A reserved request that the engine does not report yet goes before a new one."""
    config = EngineConfig(batcher="orca", max_num_seqs=1)
    reserved = RequestFacts(request_id="reserved", prompt_tokens=30, output_tokens=20)
    candidate = RequestFacts(request_id="new", prompt_tokens=4, output_tokens=1)
    empty = Snapshot(version=VERSION, taken_s=1.0, config=config, num_free_blocks=4096)
    alone = Forecaster(engine_from(empty, AFFINE)).forecast([candidate], 1.0)[0]
    behind = Forecaster(engine_from(replace(empty, reserved=(reserved,)), AFFINE)).forecast([candidate], 1.0)[0]
    assert alone.queue_s == 0.0
    assert behind.queue_s > 0.1


@pytest.mark.parametrize(
    ("residual", "left"), [("plus_ten", 10), ("conditional_median", 24), ("conditional_quartile", 9)]
)
def test_the_rest_of_a_running_request_follows_the_rule(residual: str, left: int) -> None:
    """After 40 tokens with a tag of 20, one rule predicts ten more, the others a quantile of the possible lengths."""
    request = RequestFacts(request_id="long", prompt_tokens=16, tag=Tag(median_tokens=20.0, spread=1.0))
    live = LiveRequest(request=request, produced_tokens=40, computed_tokens=55, num_blocks=4)
    snapshot = Snapshot(
        version=VERSION,
        taken_s=0.0,
        config=EngineConfig(enable_prefix_caching=False),
        num_free_blocks=4091,
        running=(live,),
    )
    engine = engine_from(snapshot, AFFINE, residual)
    engine.advance()
    assert engine.outcome("long").output_tokens == 40 + left


def test_a_former_block_may_be_listed_twice_but_a_held_one_may_not() -> None:
    """The table of a waiting request may name a block that it no longer holds; a running one holds each block once."""
    engine = load_of("vllm_v1", (6, 4), (6, 4), max_num_seqs=1, num_gpu_blocks=16).loaded(AFFINE)
    engine.next_step()
    engine.next_step()
    snapshot = snapshot_of(engine, engine.now_s)
    (running,), (waiting,) = snapshot.running, snapshot.waiting
    former = replace(snapshot, waiting=(replace(waiting, block_ids=(3, 3)),))
    expect_blocks_conserved(engine_from(former, AFFINE))
    held = replace(snapshot, running=(replace(running, block_ids=2 * running.block_ids[:1]),))
    with pytest.raises(ValueError, match="^block_ids: of 'a' hold a block twice"):
        engine_from(held, AFFINE)
