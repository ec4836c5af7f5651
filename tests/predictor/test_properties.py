"""Properties of every local scheduler: fast-forward equals stepping, and tokens and blocks are conserved."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from predictor.batching import BATCHERS
from predictor.engine import Engine
from predictor.outcome import StepRecord
from tests.inspecting import counts_of, expect_blocks_conserved, expect_nothing_left, times_of
from tests.strategies import AFFINE, BENT, Load, crowded, examples, loads

CLOSE = 1e-9
LONGEST_RUN = 2000
# They admit a prompt that is longer than the budget, alone or beside decodes.
MAY_EXCEED_BUDGET = ("orca", "faster_transformer", "lightllm")
every_batcher = pytest.mark.parametrize("batcher", BATCHERS)
BATCHER_LOADS = {batcher: loads(batcher) for batcher in BATCHERS}
# What SGLang reserves for responses is seldom too little.
BATCHER_LOADS["sglang"] |= BATCHER_LOADS["sglang"].map(crowded)
ENDING_LOADS = {batcher: loads(batcher, ending=True) for batcher in BATCHERS}


def run_by_steps(engine: Engine) -> bool:
    """Run step by step; return whether the run ended."""
    return len(list(islice(iter(engine.next_step, None), LONGEST_RUN))) < LONGEST_RUN


def expect_same(one: Engine, other: Engine) -> None:
    """Compare two engines completely: counts exactly, times within rounding."""
    assert counts_of(one) == counts_of(other)
    assert times_of(one) == pytest.approx(times_of(other), rel=CLOSE, abs=CLOSE)


@every_batcher
def test_from_event_to_event_is_step_by_step(batcher: str) -> None:
    """Skipping repeated steps changes no outcome, no counter, and no block's position in the free list."""
    preemptions = Counter[bool]()

    @examples(90 * len(BATCHERS[batcher].kv_layouts))
    @given(BATCHER_LOADS[batcher])
    def check(load: Load) -> None:
        for step_time in (AFFINE, BENT):
            stepped, fast = load.loaded(step_time), load.loaded(step_time)
            if not run_by_steps(stepped):
                return  # an endless run, see the next test
            fast.advance()
            expect_same(stepped, fast)
            preemptions[stepped.state.engine[0].num_preemptions > 0] += 1

    check()
    assert preemptions[True] >= 2 or batcher in MAY_EXCEED_BUDGET


def test_an_engine_going_in_circles_stops_as_stuck() -> None:
    """Two equal requests that do not fit together, of which admission prefers one and preemption the other, end the run."""
    requests = [
        {
            "id": name, "arrival_s": 0.0, "prompt_tokens": 4, "output_tokens": 12, "max_tokens": 12, "priority": 0,
            "prefix_hashes": [],
        }
        for name in ("a", "b")
    ]  # fmt: skip
    engine = {
        "batcher": "vllm_v1", "max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "num_gpu_blocks": 5,
        "max_model_len": 16, "scheduling_policy": "priority", "enable_prefix_caching": False,
        "scheduler_reserve_full_isl": False,
    }  # fmt: skip
    stuck = Load(engine=engine, requests=requests).loaded()
    stuck.advance()
    expect_blocks_conserved(stuck)
    unfinished = [name for name in ("a", "b") if stuck.outcome(name).finished_s is None]
    assert bool(stuck.state.engine[0].stuck) == bool(unfinished)


@every_batcher
def test_time_may_be_cut_into_slices(batcher: str) -> None:
    """Advancing in slices, with requests added just before they arrive, equals advancing at once."""

    @examples(40)
    @given(ENDING_LOADS[batcher], st.lists(st.floats(0.0, 1.1), max_size=8))
    def check(load: Load, cuts: list[float]) -> None:
        at_once, sliced = load.loaded(AFFINE), Engine(load.config, AFFINE)
        at_once.advance()
        stops = [(cut * at_once.now_s, None) for cut in cuts]
        requests = list(zip(load.our_requests(), load.ranks(), strict=True))
        stops += [(request.arrival_s, (request, rank)) for request, rank in requests]
        for stop_s, arriving in sorted(stops, key=lambda stop: stop[0]):
            sliced.advance(math.nextafter(stop_s, -1))
            if arriving is not None:
                sliced.add(arriving[0], tie_break=arriving[1])
        sliced.advance()
        expect_same(at_once, sliced)

    check()


class Book:
    """Counts tokens and blocks of a run, step by step."""

    def __init__(self, load: Load, engine: Engine) -> None:
        self.load, self.engine = load, engine
        self.spent: Counter[str] = Counter()
        self.life: Counter[str] = Counter()  # tokens computed or found since a request's last admission
        self.found: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def enter(self, record: StepRecord) -> None:
        """Check one step's limits, and count the tokens that it computes."""
        settings, engine = self.load.config, self.engine
        head = engine.state.engine[0]
        step = engine.state.steps[(head.oldest + head.num_in_flight - 1) % 2]
        assert step.num_scheduled == len(record.scheduled), "a request is in the step twice"
        assert set(record.scheduled) <= set(record.running)
        assert not set(record.running) & set(record.waiting)
        assert len(record.running) == len(set(record.running)) <= settings.max_num_seqs
        assert record.free_blocks >= 0
        assert all(tokens > 0 for tokens in record.scheduled.values())
        total = sum(record.scheduled.values())
        if settings.batcher in MAY_EXCEED_BUDGET:
            total -= max(record.scheduled.values(), default=0)
        budget = settings.max_num_batched_tokens
        if settings.batcher == "sglang":  # its budget is for prefills: all running requests decode
            budget = max(settings.max_model_len, budget) + settings.max_num_seqs
        assert total <= budget
        for name in record.preempted:
            self.lost[name] += self.life.pop(name)
        for name, tokens in record.scheduled.items():
            computed = int(engine.state.requests[engine.slots[name]].computed_tokens)
            if name not in self.life:
                self.life[name] = computed - tokens
                self.found[name] += computed - tokens
            self.life[name] += tokens
            self.spent[name] += tokens
            assert computed == self.life[name]

    def close(self) -> None:
        """Check that every token was computed once, except those found in the cache or computed again."""
        for request in self.load.our_requests():
            name = request.request_id
            outcome = self.engine.outcome(name)
            assert outcome.output_tokens == self.engine.lengths(request)[0]
            needed = request.prompt_tokens + outcome.output_tokens - 1
            if name not in self.life:  # its last token was in flight when it was preempted
                assert self.load.config.async_scheduling
                assert self.spent[name] + self.found[name] == self.lost[name] >= needed
                continue
            wasted = self.spent[name] - (needed + self.lost[name] - self.found[name])
            ends_early = outcome.output_tokens < self.engine.lengths(request)[1]
            assert 0 <= wasted <= (1 if self.load.config.async_scheduling and ends_early else 0)
            assert outcome.num_preemptions > 0 or outcome.prefix_hit_tokens == self.found[name]


@every_batcher
def test_tokens_and_blocks_are_conserved(batcher: str) -> None:
    """At every step each block is free or held, limits hold, and at the end every token has been computed."""

    @examples(60)
    @given(BATCHER_LOADS[batcher])
    def check(load: Load) -> None:
        engine = load.loaded()
        book = Book(load, engine)
        num_steps = 0
        for record in islice(iter(engine.next_step, None), LONGEST_RUN // 4):
            book.enter(record)
            expect_blocks_conserved(engine)
            num_steps += 1
        if num_steps < LONGEST_RUN // 4:
            book.close()
            expect_nothing_left(engine)

    check()


@every_batcher
def test_an_aborted_request_leaves_nothing_behind(batcher: str) -> None:
    """An aborted request disappears at once, all others end, and all blocks are freed."""

    @examples(40)
    @given(ENDING_LOADS[batcher], st.integers(0, 10**6), st.floats(0.0, 1.0))
    def check(load: Load, choice: int, moment: float) -> None:
        names = sorted(spec["id"] for spec in load.requests)
        victim = names[choice % len(names)]
        whole = load.loaded(AFFINE)
        whole.advance()
        stepped, fast = load.loaded(AFFINE), load.loaded(AFFINE)
        for engine in (stepped, fast):
            engine.advance(moment * whole.now_s)
            engine.abort(victim)
            assert victim not in engine.running() + engine.waiting()
            expect_blocks_conserved(engine)
            engine.abort(victim)  # a second time changes nothing
        for record in islice(iter(stepped.next_step, None), LONGEST_RUN):
            assert victim not in [*record.scheduled, *record.running, *record.waiting, *record.preempted]
        fast.advance()
        expect_same(stepped, fast)
        for engine in (stepped, fast):
            expect_nothing_left(engine)
            for name in names:
                outcome = engine.outcome(name)
                assert name == victim or outcome.output_tokens == whole.outcome(name).output_tokens
        stepped.forget_finished()
        assert stepped.slots == {}

    check()


@every_batcher
def test_aborting_a_request_before_its_arrival_removes_it(batcher: str) -> None:
    """The outcome is the same as without the request."""

    @examples(20)
    @given(ENDING_LOADS[batcher])
    def check(load: Load) -> None:
        assume(len(load.requests) > 1)
        last = max(load.requests, key=lambda spec: spec["arrival_s"])
        others = Load(engine=load.engine, requests=[spec for spec in load.requests if spec is not last])
        engine, without = load.loaded(AFFINE), others.loaded(AFFINE)
        engine.abort(last["id"])
        engine.advance()
        without.advance()
        for spec in others.requests:
            assert engine.outcome(spec["id"]) == without.outcome(spec["id"])

    check()
