"""Snapshots: what an engine is at a moment, and the engine that comes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.lengths import Tag
from predictor.request import Request
from predictor.snapshot import VERSION, KvCache, LiveRequest, Snapshot, StepUnderWay
from predictor.transfer import engine_from, snapshot_of
from tests.inspecting import expect_blocks_conserved, expect_nothing_left
from tests.strategies import AFFINE, Load, examples, load_of, loads

CLOSE = 1e-9
every_batcher = pytest.mark.parametrize("batcher", BATCHERS)
LOADS = {batcher: loads(batcher, distinct_arrivals=True, max_requests=12, tick_s=0.004) for batcher in BATCHERS}
moments = st.floats(0.0, 1.05)


def halfway(load: Load, moment: float) -> tuple[Engine, float]:
    """Run a load's engine up to a moment of its run; who comes later is known to it already."""
    whole = load.loaded(AFFINE)
    whole.advance()
    engine = load.loaded(AFFINE)
    engine.advance(moment * whole.now_s)
    return engine, moment * whole.now_s


def has_gap(engine: Engine) -> bool:
    """Tell whether a request ended unforeseen while it was in a step still under way, which a snapshot leaves out."""
    return any(engine.state.requests[slot].in_flight_tokens > 0 and engine.outcome(name).finished_s is not None
               for name, slot in engine.slots.items())  # fmt: skip


def unfinished(engine: Engine) -> list[str]:
    """List the requests that have not ended."""
    return [name for name in engine.slots if engine.outcome(name).finished_s is None]


@every_batcher
def test_a_snapshot_of_a_copy_is_the_snapshot(batcher: str) -> None:
    """Writing down an engine made from a snapshot gives that snapshot again."""

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
def test_a_copy_goes_on_as_the_engine_does(batcher: str) -> None:
    """From a snapshot on, every request ends when it ends on the engine itself, after as many preemptions."""

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
def test_forecasts_from_a_snapshot_are_the_engines(batcher: str) -> None:
    """Asking the copy is asking the engine."""

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


def test_the_time_a_step_has_run_is_taken_off() -> None:
    """A request that comes while a step is under way waits for its end, not for its whole length."""
    engine = load_of("vllm_v1", (40, 30)).loaded(AFFINE)
    record = engine.next_step()
    assert record is not None
    snapshot = snapshot_of(engine, record.start_s)
    candidate = Request(request_id="new", prompt_tokens=4, output_tokens=1)
    queues_s = []
    for share in (0.0, 0.25, 0.75):
        now_s = record.start_s + share * (record.end_s - record.start_s)
        copied = engine_from(replace(snapshot, taken_s=now_s), AFFINE)
        queues_s.append(Forecaster(copied).forecast([candidate], now_s)[0].queue_s)
    whole = record.end_s - record.start_s
    assert queues_s == pytest.approx([whole, 0.75 * whole, 0.25 * whole], rel=CLOSE)


def test_a_step_overdue_ends_now() -> None:
    """A step that has run longer than foreseen ends at the moment of the snapshot, not in the past."""
    engine = load_of("vllm_v1", (40, 30)).loaded(AFFINE)
    record = engine.next_step()
    assert record is not None
    late_s = record.end_s + 5.0
    copied = engine_from(snapshot_of(engine, late_s), AFFINE)
    candidate = Request(request_id="new", prompt_tokens=4, output_tokens=1)
    assert Forecaster(copied).forecast([candidate], late_s)[0].queue_s == pytest.approx(0.0, abs=CLOSE)


def test_reserved_requests_count() -> None:
    """Who was promised to the engine and has not shown up yet goes before who comes now."""
    config = EngineConfig(batcher="orca", max_num_seqs=1)
    promised = Request(request_id="promised", prompt_tokens=30, output_tokens=20)
    candidate = Request(request_id="new", prompt_tokens=4, output_tokens=1)
    empty = Snapshot(version=VERSION, taken_s=1.0, config=config, num_free_blocks=4096)
    alone = Forecaster(engine_from(empty, AFFINE)).forecast([candidate], 1.0)[0]
    behind = Forecaster(engine_from(replace(empty, reserved=(promised,)), AFFINE)).forecast([candidate], 1.0)[0]
    assert alone.queue_s == 0.0
    assert behind.queue_s > 0.1


@pytest.mark.parametrize(("residual", "left"), [("plus_ten", 10), ("conditional_median", 31)])
def test_what_is_left_of_a_running_request_follows_the_rule(residual: str, left: int) -> None:
    """After 40 tokens of a request tagged 20 one rule foresees ten more, the other the median of what is possible."""
    request = Request(request_id="long", prompt_tokens=16, tag=Tag(median_tokens=20.0, spread=1.0))
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


SMALL = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_gpu_blocks=11, max_model_len=32)
RUNNING = LiveRequest(
    request=Request(request_id="a", prompt_tokens=9, output_tokens=6, prefix_hashes=("x", "y")),
    produced_tokens=2, computed_tokens=10, num_blocks=3, full_blocks=2, block_ids=(0, 1, 2),
)  # fmt: skip
WAITING = LiveRequest(request=Request(request_id="b", prompt_tokens=5, output_tokens=3))
SOUND = Snapshot(
    version=VERSION, taken_s=3.0, config=SMALL, num_free_blocks=7, running=(RUNNING,), waiting=(WAITING,),
    kv_cache=KvCache(free_block_ids=(3, 4, 5, 6, 7, 8, 9), contents={0: "x", 1: "y"}),
)  # fmt: skip


def served(snapshot: Snapshot) -> None:
    """Make a snapshot's engine, forecast a request on it, and serve everybody."""
    engine = engine_from(snapshot, AFFINE)
    expect_blocks_conserved(engine)
    candidate = Request(request_id="candidate", prompt_tokens=9, output_tokens=4, prefix_hashes=("x", "z"))
    Forecaster(engine).forecast([candidate], snapshot.taken_s)
    engine.add(candidate)
    engine.advance()
    expect_nothing_left(engine)


def test_a_sound_snapshot_is_served() -> None:
    """The snapshot that the cases below spoil is good itself."""
    served(SOUND)


def running_with(**changes: object) -> Snapshot:
    """Spoil what the sound snapshot says of its running request."""
    return replace(SOUND, running=(replace(RUNNING, **changes),))


def cache_with(**changes: object) -> Snapshot:
    """Spoil what the sound snapshot says of the blocks."""
    assert SOUND.kv_cache is not None
    return replace(SOUND, kv_cache=replace(SOUND.kv_cache, **changes))


def stepping(*steps: StepUnderWay, **changes: object) -> Snapshot:
    """Put steps under way on the sound snapshot."""
    return replace(running_with(**changes), steps=steps)


SPOILT = {
    "version": lambda: replace(SOUND, version=VERSION + 1),
    "no version": lambda: replace(SOUND, version=0),
    "taken_s nan": lambda: replace(SOUND, taken_s=math.nan),
    "taken_s negative": lambda: replace(SOUND, taken_s=-1.0),
    "num_free_blocks negative": lambda: replace(SOUND, num_free_blocks=-1),
    "num_free_blocks too many": lambda: replace(SOUND, num_free_blocks=12),
    "num_free_blocks lies": lambda: replace(SOUND, num_free_blocks=6),
    "num_free_blocks bool": lambda: replace(SOUND, num_free_blocks=True),
    "request twice": lambda: replace(SOUND, waiting=(WAITING, WAITING)),
    "running and reserved": lambda: replace(SOUND, reserved=(RUNNING.request,)),
    "too many running": lambda: replace(SOUND, config=replace(SMALL, max_num_seqs=1), running=(RUNNING, WAITING)),
    "produced all": lambda: running_with(produced_tokens=23, computed_tokens=10),
    "produced negative": lambda: running_with(produced_tokens=-1),
    "computed beyond": lambda: running_with(computed_tokens=12),
    "computed beyond blocks": lambda: running_with(num_blocks=2, block_ids=(0, 1)),
    "placeholders for nothing": lambda: running_with(placeholders=400, computed_tokens=10),
    "in flight for nothing": lambda: running_with(in_flight_tokens=3),
    "more blocks than it needs": lambda: running_with(num_blocks=10, block_ids=tuple(range(10))),
    "blocks not listed": lambda: running_with(block_ids=(0, 1)),
    "block twice": lambda: running_with(block_ids=(0, 1, 1)),
    "block out of range": lambda: running_with(block_ids=(0, 1, 10)),
    "block negative": lambda: running_with(block_ids=(0, 1, -1)),
    "block both held and free": lambda: running_with(block_ids=(0, 1, 3)),
    "full beyond listed": lambda: running_with(full_blocks=4),
    "full beyond computed": lambda: running_with(full_blocks=3),
    "full without content": lambda: cache_with(contents={0: "x"}),
    "content that is not full": lambda: running_with(full_blocks=1),
    "content of a block that is filling": lambda: cache_with(contents={0: "x", 1: "y", 2: "z"}),
    "own content of a block that is filling": lambda: cache_with(own_contents={2: ("a", 2)}),
    "shared block that is filling": lambda: replace(
        SOUND, running=(RUNNING, replace(RUNNING, request=replace(RUNNING.request, request_id="c")))
    ),
    "content out of range": lambda: cache_with(contents={0: "x", 1: "y", 10: "z"}),
    "content negative": lambda: cache_with(contents={0: "x", 1: "y", -1: "z"}),
    "own content negative": lambda: cache_with(own_contents={3: ("b", -5)}),
    "own content far out": lambda: cache_with(own_contents={3: ("b", 1 << 40)}),
    "free twice": lambda: cache_with(free_block_ids=(3, 4, 5, 6, 7, 8, 8)),
    "free too few": lambda: cache_with(free_block_ids=(3, 4, 5)),
    "free out of range": lambda: cache_with(free_block_ids=(3, 4, 5, 6, 7, 8, 10)),
    "blocks without caching": lambda: replace(SOUND, config=replace(SMALL, enable_prefix_caching=False)),
    "a stranger in a step": lambda: stepping(StepUnderWay(start_s=2.9, scheduled={"nobody": 1})),
    "a stranger sampled": lambda: stepping(StepUnderWay(start_s=2.9, scheduled={"a": 1}, sampled=("nobody",))),
    "sampled but not scheduled": lambda: stepping(
        StepUnderWay(start_s=2.9, scheduled={"a": 1}, sampled=("a", "b")), in_flight_tokens=1
    ),
    "step at no time": lambda: stepping(StepUnderWay(start_s=math.inf, scheduled={"a": 1})),
    "step in the future": lambda: stepping(
        StepUnderWay(start_s=1e300, scheduled={"a": 1}, sampled=("a",)), in_flight_tokens=1
    ),
    "no tokens in a step": lambda: stepping(StepUnderWay(start_s=2.9, scheduled={"a": 0})),
    "a step too large": lambda: stepping(StepUnderWay(start_s=2.9, scheduled={"a": 2**31 - 1}, sampled=("a",))),
    "not in flight": lambda: stepping(StepUnderWay(start_s=2.9, scheduled={"a": 1}, sampled=("a",))),
    "two steps of an engine that has one": lambda: stepping(
        *[StepUnderWay(start_s=2.9, scheduled={"a": 1}, sampled=("a",))] * 2, in_flight_tokens=2
    ),
    "three steps": lambda: stepping(*[StepUnderWay(start_s=2.9, scheduled={"a": 1})] * 3),
    "a reserved request too long": lambda: replace(SOUND, reserved=(Request(request_id="c", prompt_tokens=40),)),
}


def tries(case: str) -> str:
    """Serve a spoilt snapshot; say what was wrong with it, or nothing if that did not matter."""
    try:
        served(SPOILT[case]())
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    import sys

    print(repr(tries(sys.argv[1])))
