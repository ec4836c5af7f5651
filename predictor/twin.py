"""An engine model that is made to stand as a real engine shows itself, again and again.

`transfer.engine_from` builds a model from a snapshot's values; this does the same from arrays, for a state that comes
anew with every step of the engine, in a tenth of the time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from predictor import steps
from predictor.blocks import chain_same
from predictor.compiled import direct, kernel, small_kernel
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.lengths import DEFAULT_RESIDUAL, expected_lengths
from predictor.request import CLASSES, MAX_PRIORITY
from predictor.state import NOBODY, NOTHING, RUNNING, UNBORN, WAITING, State
from predictor.step_time import StepTime, step_seconds

NUM_CLASSES = len(CLASSES)

# What can be wrong with an engine that shows itself, by the number that the kernels below return; 0 is nothing.
COMPLAINTS = (
    "",
    "running: there is a slot twice, or one that does not exist",
    "live: a count is below zero",
    "prompt_tokens: do not fit the model",
    "output_tokens: are as many as a request may have",
    "computed_tokens: are more than there are",
    "num_blocks: hold too few tokens",
    "num_blocks: are more than a request can ever need",
    "steps: have a request that neither runs nor waits",
    "steps: give a request no tokens",
    "scheduled: are more requests or tokens than a step of this engine can have",
    "tables: are shorter than what is held",
    "tables: name a block that does not exist",
    "blocks.reuse: are not of those that nobody holds",
)
(
    FINE, BAD_SLOT, BELOW_ZERO, BAD_PROMPT, TOO_MANY_OUTPUT, TOO_MANY_COMPUTED, TOO_FEW_BLOCKS, TOO_MANY_BLOCKS,
    STRANGER, NO_TOKENS, TOO_LARGE_STEP, SHORT_TABLE, UNKNOWN_BLOCK, WRONG_REUSE,
) = range(len(COMPLAINTS))  # fmt: skip


class ShownStep(NamedTuple):
    """A step under way: its requests' slots in order, their tokens, and whether they will sample."""

    start_s: float
    slots: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray


class ShownContents(NamedTuple):
    """What KV blocks hold: by block its content (0 for none) and place in the order of reuse (0 while held).

    By place among the running requests, then the waiting ones: their blocks, and the contents of their full blocks.
    An array that is the very one that was given last time is taken to hold the same.
    """

    content: np.ndarray
    reuse: np.ndarray
    tables: tuple[np.ndarray, ...]
    hashes: tuple[np.ndarray, ...]


class Shown(NamedTuple):
    """An engine's state at `now_s`, in arrays by slot; nothing in them is trusted.

    `live` has a record per slot with the counts of `state.REQUEST`, `scheduled_s` and `first_token_s`; `facts` one
    with `arrival_s`, `priority`, `prompt_tokens`, `max_tokens` and the fields of `state.FACTS`. Of the length of an
    answer, `known_tokens` is what is certain (0 where nothing is), else a tag's median and spread, NaN where there is
    none.
    """

    now_s: float
    num_free_blocks: int
    decodes_since_look: int
    running: np.ndarray
    waiting: np.ndarray
    steps: tuple[ShownStep, ...]
    live: np.ndarray
    facts: np.ndarray
    known_tokens: np.ndarray
    tag_median: np.ndarray
    tag_spread: np.ndarray
    contents: ShownContents | None = None


class Twin:
    """An engine model beside an engine; requests promised to it, and not shown yet, are added to `engine`."""

    def __init__(
        self,
        config: EngineConfig,
        step_time: StepTime,
        residual: str = DEFAULT_RESIDUAL,
        *,
        num_slots: int,
        track_blocks: bool,
    ) -> None:
        """Make an idle one, for an engine that shows so many slots."""
        self.engine = Engine(config, step_time, residual, track_blocks=track_blocks)
        self.engine.leave_slots(num_slots)
        self.num_slots = num_slots
        self._foretold_end_s = 0.0  # of the oldest step under way
        self._sorted, self._order = np.empty(0, np.uint64), np.empty(0, np.int64)  # contents, and their numbers
        self._content = np.zeros(len(self.engine.state.blocks), np.uint64)  # of each block, when last looked at
        self._numbers = np.full(len(self.engine.state.blocks), NOTHING)
        self._hashes: dict[int, np.ndarray] = {}  # by slot, as they were put last
        self._most_contents = 4 * self.engine.num_blocks + (1 << 16)
        if self.engine.tracks_blocks:
            self.engine.widen_table(-(-config.max_model_len // config.block_size))

    @property
    def is_worn(self) -> bool:
        """Tell whether it knows so many contents of blocks that a new one should take its place."""
        return len(self.engine.contents) > self._most_contents

    def follow(self, shown: Shown) -> None:
        """Stand as the engine stands; what is inconsistent is refused by name, and leaves nothing to forecast from."""
        self._learn(shown)
        state = self.engine.state
        head = state.engine[0]
        head.num_running = head.num_waiting = head.num_in_flight = head.waiting_head = head.oldest = 0
        self._require_possible(shown)
        slots = np.concatenate((shown.running, shown.waiting)).astype(np.int64)
        _require(put(state, slots, len(shown.running), self.num_slots, *self._columns(shown, slots)))
        if self.engine.tracks_blocks:
            self._follow_blocks(shown, slots)
        head.num_free_blocks = shown.num_free_blocks
        head.now_s = min(shown.now_s, *(step.start_s for step in shown.steps)) if shown.steps else shown.now_s
        head.decodes_since_look = shown.decodes_since_look
        head.steady = head.stuck = head.fruitless_preemptions = 0
        for place, step in enumerate(shown.steps):
            wrong = put_under_way(
                state, step.slots.astype(np.int64), step.tokens.astype(np.int64), step.sampled.astype(np.int64),
                float(step.start_s),
            )  # fmt: skip
            if wrong != FINE:
                head.num_in_flight = 0
                _require(wrong)
            if place == 0:
                self._foretold_end_s = float(state.steps[0].end_s)
        self.let_time_pass(shown.now_s)
        head.num_running, head.num_waiting = len(shown.running), len(shown.waiting)

    def let_time_pass(self, now_s: float) -> None:
        """Note that nothing has happened until now: a step that should have ended by then ends now at the earliest."""
        state = self.engine.state
        head = state.engine[0]
        if head.num_in_flight == 0:
            head.now_s = max(head.now_s, now_s)
        for ahead in range(head.num_in_flight):
            record = state.steps[(head.oldest + ahead) % 2]
            record.end_s = max(record.end_s, now_s)

    def late_s(self, now_s: float) -> float:
        """By how much the oldest step under way has outlasted its forecast."""
        return max(0.0, now_s - self._foretold_end_s) if self.engine.state.engine[0].num_in_flight else 0.0

    def step_seconds(
        self,
        *,
        num_tokens: int,
        num_sampled: int,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        prefill_qq: float,
        prefill_qkv: float,
        decode_longest: int,
    ) -> float | None:
        """What the profile alone says of a step, None for one that this engine could not have made."""
        costs = self.engine.state.costs
        most = len(costs.by_count)
        if not (0 < num_tokens < len(costs.by_tokens) and 0 <= num_sampled < most and 0 <= num_decodes < most):
            return None
        return float(
            step_seconds(
                costs, num_tokens, num_sampled, num_decodes, float(decode_context), num_prefills, prefill_qq,
                prefill_qkv, float(decode_longest),
            )
        )  # fmt: skip

    def _require_possible(self, shown: Shown) -> None:
        if len(shown.running) > self.engine.config.max_num_seqs:
            raise ValueError(f"running: {len(shown.running)} requests are more than max_num_seqs allows")
        if len(shown.running) + len(shown.waiting) > self.num_slots:
            raise ValueError(COMPLAINTS[BAD_SLOT])
        if len(shown.steps) > 2:
            raise ValueError(f"steps: at most 2 can be under way, not {len(shown.steps)}")
        if not 0 <= shown.num_free_blocks <= self.engine.num_blocks:
            raise ValueError(f"num_free_blocks: {shown.num_free_blocks} of {self.engine.num_blocks} cannot be free")
        if not all(math.isfinite(time_s) for time_s in (shown.now_s, *(step.start_s for step in shown.steps))):
            raise ValueError("steps: start at no time")

    def _columns(self, shown: Shown, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What requests are put from: what is shown of them, and how long their answers are thought to be, or NaN."""
        if slots.max(initial=0) >= self.num_slots or slots.min(initial=0) < 0:
            raise ValueError(COMPLAINTS[BAD_SLOT])
        output = shown.live["output_tokens"][slots]
        known = shown.known_tokens[slots]
        expected = expected_lengths(shown.tag_median[slots], shown.tag_spread[slots], output, self.engine.residual)
        return (
            _read_only(shown.live),
            _read_only(shown.facts),
            np.where(known > 0, np.maximum(known, output + 1), expected),
        )

    def _follow_blocks(self, shown: Shown, slots: np.ndarray) -> None:
        state, contents = self.engine.state, shown.contents
        assert contents is not None
        if not len(contents.content) == len(contents.reuse) == len(state.blocks):
            raise ValueError(f"blocks: {len(contents.content)} are shown of {len(state.blocks)}")
        for slot, row, table in zip(slots.tolist(), contents.hashes, contents.tables, strict=True):
            if len(table) > state.tables.shape[1] or len(row) > state.hashes.shape[1]:
                raise ValueError("tables: are longer than a request can be")
            state.tables[slot, : len(table)] = table
            if self._hashes.get(slot) is not row:
                state.hashes[slot, : len(row)], found = self._numbers_of(row)
                if not found.all():
                    raise ValueError("hashes: stand for nothing")
                self._hashes[slot] = row
        lengths = np.fromiter(map(len, contents.tables), np.int64, len(slots))
        num_hashes = np.fromiter(map(len, contents.hashes), np.int64, len(slots))
        free = np.flatnonzero(contents.reuse)
        order = free[np.argsort(contents.reuse[free])]
        if len(order) != shown.num_free_blocks:
            raise ValueError(f"num_free_blocks: {shown.num_free_blocks}, but {len(order)} are shown to be free")
        _require(hold(state, slots, lengths, num_hashes, order, self._numbers))

    def _learn(self, shown: Shown) -> None:
        """Number the contents that are new; the state may grow by it."""
        contents = shown.contents
        if contents is None or len(contents.content) != len(self._content):
            return
        changed = np.flatnonzero(contents.content != self._content)
        slots = (*shown.running.tolist(), *shown.waiting.tolist())
        rows = [row for slot, row in zip(slots, contents.hashes, strict=True) if self._hashes.get(slot) is not row]
        told = np.concatenate((contents.content[changed], *rows))
        if not len(told):
            return
        _, found = self._numbers_of(told)
        new = np.unique(told[~found & (told != 0)])
        if len(new):
            self.engine.know_contents(new.tolist())
            numbers = np.fromiter(map(self.engine.contents.__getitem__, new.tolist()), np.int64, len(new))
            places = np.searchsorted(self._sorted, new)
            self._sorted, self._order = np.insert(self._sorted, places, new), np.insert(self._order, places, numbers)
        numbers, found = self._numbers_of(contents.content[changed])
        self._numbers[changed] = np.where(found, numbers, NOTHING)
        self._content[changed] = contents.content[changed]

    def _numbers_of(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The engine's numbers of contents, and which of them it knows."""
        if not len(self._sorted):
            return np.zeros(len(hashes), np.int64), np.zeros(len(hashes), np.bool_)
        places = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return self._order[places], self._sorted[places] == hashes


@small_kernel
def complaint_about(engine: np.record, shown: np.record, fact: np.record, runs: bool) -> int:
    """Tell what is wrong with what is shown of one request."""
    if (
        shown.output_tokens < 0 or shown.computed_tokens < 0 or shown.placeholders < 0 or shown.full_blocks < 0
        or shown.in_flight_tokens < 0 or shown.stale_tokens < 0 or shown.num_blocks < 0
        or shown.num_preemptions < 0 or shown.hit_tokens < 0
    ):  # fmt: skip
        return BELOW_ZERO
    prompt = np.int64(fact.prompt_tokens)
    if prompt <= 0 or prompt >= engine.max_model_len:
        return BAD_PROMPT
    most = min(np.int64(fact.max_tokens), engine.max_model_len - prompt)
    if shown.output_tokens >= most:
        return TOO_MANY_OUTPUT
    if shown.computed_tokens > prompt + shown.output_tokens + shown.placeholders:
        return TOO_MANY_COMPUTED
    num_blocks = np.int64(shown.num_blocks) if runs else 0
    if runs and num_blocks * engine.block_size < shown.computed_tokens:
        return TOO_FEW_BLOCKS
    if max(num_blocks, np.int64(shown.full_blocks)) * engine.block_size >= prompt + most + engine.block_size:
        return TOO_MANY_BLOCKS
    return FINE


@small_kernel
def put_facts(facts: np.record, reported: np.record) -> None:
    """Copy a request's service level, weight, tenant and class; impossible values count as not given."""
    facts.ttft_slo_s = reported.ttft_slo_s if 0 < reported.ttft_slo_s < np.inf else np.nan
    facts.tpot_slo_s = reported.tpot_slo_s if 0 < reported.tpot_slo_s < np.inf else np.nan
    facts.weight = reported.weight if 0 < reported.weight < np.inf else 1.0
    facts.tenant = reported.tenant
    facts.request_class = np.int64(reported.request_class) if 0 <= reported.request_class < NUM_CLASSES else 0


@kernel
def put_requests(
    state: State, slots: np.ndarray, num_running: int, num_slots: int, live: np.ndarray, facts: np.ndarray,
    lengths: np.ndarray,
) -> int:  # fmt: skip
    """Put requests into their slots and queues, the first `num_running` of them as running."""
    engine = state.engine[0]
    for slot in range(num_slots):
        state.requests[slot].status = UNBORN
    for place in range(len(slots)):
        slot = slots[place]
        request, shown, fact = state.requests[slot], live[slot], facts[slot]
        if request.status != UNBORN:
            return BAD_SLOT
        runs = place < num_running
        wrong = complaint_about(engine, shown, fact, runs)
        if wrong != FINE:
            return wrong
        prompt = fact.prompt_tokens
        most = min(np.int64(fact.max_tokens), engine.max_model_len - prompt)
        known = np.int64(prompt) + shown.output_tokens
        request.status = RUNNING if runs else WAITING
        request.prompt_tokens = prompt
        request.output_tokens = shown.output_tokens
        request.computed_tokens = shown.computed_tokens
        request.placeholders = shown.placeholders
        request.in_flight_tokens = shown.in_flight_tokens
        request.stale_tokens = shown.stale_tokens
        length = lengths[place]
        request.final_tokens = np.int64(length) if length < most else most
        request.max_tokens = most
        request.num_blocks = shown.num_blocks if runs else 0
        request.full_blocks = shown.full_blocks
        request.num_hashes = 0
        request.scheduled_s = shown.scheduled_s if shown.scheduled_s >= 0 else float(NOBODY)
        request.first_token_s = shown.first_token_s if shown.first_token_s >= 0 else float(NOBODY)
        request.finished_s = NOBODY
        request.arrival_s = fact.arrival_s if 0 <= fact.arrival_s < np.inf else 0.0
        request.serial = slot
        request.tie_break = place
        request.priority = min(MAX_PRIORITY, max(-MAX_PRIORITY, fact.priority))
        request.expected_tokens = request.final_tokens
        request.num_preemptions = shown.num_preemptions
        request.hit_tokens = shown.hit_tokens
        put_facts(state.facts[slot], fact)
        if shown.prefill_tokens >= 0:
            request.prefill_tokens = shown.prefill_tokens
        else:
            decodes = shown.computed_tokens + 1 == known + shown.placeholders
            request.prefill_tokens = 0 if decodes else known
        if runs:
            state.running[place] = slot
        else:
            state.waiting[place - num_running] = slot
    return FINE


@kernel
def put_step(state: State, slots: np.ndarray, tokens: np.ndarray, sampled: np.ndarray, start_s: float) -> int:
    """Put a step under way, behind the one that there may be already."""
    engine = state.engine[0]
    index = steps.current(state)
    step = state.steps[index]
    num_tokens = 0
    if len(slots) > engine.max_num_seqs:
        return TOO_LARGE_STEP
    for place in range(len(slots)):
        if not 0 <= slots[place] < len(state.requests) or state.requests[slots[place]].status == UNBORN:
            return STRANGER
        if not 0 < tokens[place] < len(state.costs.by_tokens):
            return NO_TOKENS if tokens[place] <= 0 else TOO_LARGE_STEP
        num_tokens += tokens[place]
    if num_tokens >= len(state.costs.by_tokens):
        return TOO_LARGE_STEP
    steps.begin(state)
    steps.clear_sums(step)
    for place in range(len(slots)):
        request, entry = state.requests[slots[place]], state.batch[index, place]
        entry.slot, entry.tokens, entry.sampled = slots[place], tokens[place], 1 if sampled[place] else 0
        # what is in flight and in no older step came after this one
        older = request.in_flight_tokens
        if engine.num_in_flight > 0:
            for other in range(state.steps[engine.oldest].num_scheduled):
                if state.batch[engine.oldest, other].slot == slots[place]:
                    older = tokens[place]
        steps.add_to_sums(step, entry, max(0, request.computed_tokens - older))
    step.num_scheduled = len(slots)
    steps.put_under_way(state, start_s)
    return FINE


@kernel
def put_blocks(
    state: State, slots: np.ndarray, lengths: np.ndarray, num_hashes: np.ndarray, order: np.ndarray,
    numbers: np.ndarray,
) -> int:  # fmt: skip
    """Let blocks be held by whose tables they are in, the others be free in this order, and all hold these contents."""
    for content in range(len(state.cached)):
        state.cached[content] = NOBODY
    for index in range(len(state.blocks)):
        block = state.blocks[index]
        block.num_refs = 0
        block.content = block.next_same = NOTHING
        if numbers[index] != NOTHING:
            block.content = numbers[index]
            chain_same(state, index, numbers[index])
    num_held = 0
    for place in range(len(slots)):
        request = state.requests[slots[place]]
        request.num_hashes = num_hashes[place]
        if lengths[place] < max(request.num_blocks, request.full_blocks):
            return SHORT_TABLE
        for position in range(lengths[place]):
            index = state.tables[slots[place], position]
            if not 0 <= index < len(state.blocks):
                return UNKNOWN_BLOCK
            if position < request.num_blocks:
                num_held += state.blocks[index].num_refs == 0
                state.blocks[index].num_refs += 1
    if num_held + len(order) != len(state.blocks):
        return WRONG_REUSE
    return chain_free(state, order)


@kernel
def chain_free(state: State, order: np.ndarray) -> int:
    """Let these blocks be free, and be reused in this order."""
    before = NOBODY
    for index in order:
        block = state.blocks[index]
        if block.num_refs > 0:
            return WRONG_REUSE
        block.previous_free, block.next_free = before, NOBODY
        if before != NOBODY:
            state.blocks[before].next_free = index
        before = index
    engine = state.engine[0]
    engine.free_head = order[0] if len(order) > 0 else NOBODY
    engine.free_tail = before
    return FINE


put, put_under_way, hold = direct(put_requests), direct(put_step), direct(put_blocks)


def _read_only(array: np.ndarray) -> np.ndarray:
    """Make of arrays of one type also one type for compiled code."""
    view = array.view()
    view.flags.writeable = False
    return view


def _require(wrong: int) -> None:
    if wrong != FINE:
        raise ValueError(COMPLAINTS[wrong])
