"""An engine model that is made to stand as a real engine shows itself, again and again.

`transfer.engine_from` builds a model from a snapshot's values; this does the same from arrays, for a state that comes
anew with every step of the engine, in a tenth of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from predictor import steps
from predictor.blocks import chain_all
from predictor.compiled import direct
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.lengths import DEFAULT_RESIDUAL, expected_lengths
from predictor.state import NOBODY, NOTHING, REQUEST, RUNNING, WAITING
from predictor.step_time import StepTime, step_seconds
from predictor.transfer import require_possible_step

sum_up = direct(steps.sum_up)
put_under_way = direct(steps.put_under_way)
chain = direct(chain_all)

COUNTS = (
    "output_tokens", "computed_tokens", "placeholders", "in_flight_tokens", "stale_tokens", "num_blocks",
    "full_blocks", "num_preemptions", "hit_tokens",
)  # fmt: skip
FARTHEST_PRIORITY = 2**31


class ShownStep(NamedTuple):
    """A step under way: its requests' slots in order, their tokens, and whether they will sample."""

    start_s: float
    slots: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray


class ShownContents(NamedTuple):
    """What KV blocks hold: by block its content (0 for none) and place in the order of reuse (0 while held).

    By place among the running requests, then the waiting ones: their blocks, and the contents of their full blocks.
    """

    content: np.ndarray
    reuse: np.ndarray
    tables: tuple[np.ndarray, ...]
    hashes: tuple[np.ndarray, ...]


class Shown(NamedTuple):
    """An engine's state at `now_s`, in arrays by slot; nothing in them is trusted.

    `live` has a record per slot with `COUNTS`, `prefill_tokens`, `scheduled_s` and `first_token_s`; `facts` one with
    `arrival_s`, `priority`, `prompt_tokens` and `max_tokens`. Of the length of an answer, `known_tokens` is what is
    certain (0 where nothing is), else a tag's median and spread, NaN where there is none.
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
        if self.engine.tracks_blocks:
            self.engine.widen_table(-(-config.max_model_len // config.block_size))
        self._sorted, self._order = np.empty(0, np.uint64), np.empty(0, np.int64)  # contents, and their numbers
        self._most_contents = 4 * self.engine.num_blocks + (1 << 16)

    @property
    def is_worn(self) -> bool:
        """Tell whether it knows so many contents of blocks that a new one should take its place."""
        return len(self.engine.contents) > self._most_contents

    def follow(self, shown: Shown) -> None:
        """Stand as the engine stands; what is inconsistent is refused by name, and leaves nothing to forecast from."""
        if shown.contents is not None:
            self._learn(shown.contents)
        state = self.engine.state
        head = state.engine[0]
        head.num_running = head.num_waiting = head.num_in_flight = head.waiting_head = head.oldest = 0
        slots = np.concatenate((shown.running, shown.waiting)).astype(np.int64)
        self._require_slots(shown, slots)
        self._follow_requests(shown, slots)
        self._follow_blocks(shown, slots)
        num_running, num_waiting = len(shown.running), len(shown.waiting)
        state.running[:num_running] = shown.running
        state.waiting[:num_waiting] = shown.waiting
        head.num_running, head.num_waiting = num_running, num_waiting
        head.now_s = min(shown.now_s, *(step.start_s for step in shown.steps)) if shown.steps else shown.now_s
        head.decodes_since_look = shown.decodes_since_look
        head.steady = head.stuck = head.fruitless_preemptions = 0
        try:
            for step in shown.steps:
                self._follow_step(step, shown.now_s, slots)
        except ValueError:
            head.num_running = head.num_waiting = head.num_in_flight = 0
            raise

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

    def _require_slots(self, shown: Shown, slots: np.ndarray) -> None:
        _require(len(shown.running) <= self.engine.config.max_num_seqs, "running", "are more than max_num_seqs allows")
        _require(slots.max(initial=0) < self.num_slots and slots.min(initial=0) >= 0, "running", "name unknown slots")
        _require(len(np.unique(slots)) == len(slots), "running", "and waiting name a slot twice")
        _require(len(shown.steps) <= 2, "steps", "are more than two")
        _require(0 <= shown.num_free_blocks <= self.engine.num_blocks, "num_free_blocks", "are more than there are")
        _require(bool(np.isfinite(shown.now_s)), "now_s", "is no time")

    def _follow_requests(self, shown: Shown, slots: np.ndarray) -> None:
        config = self.engine.config
        live, facts = shown.live[slots], shown.facts[slots]
        rows = np.zeros(len(slots), REQUEST)
        for name in COUNTS:
            rows[name] = live[name]
        prompt, output, computed = rows["prompt_tokens"], rows["output_tokens"], rows["computed_tokens"]
        prompt[:] = facts["prompt_tokens"]
        most = np.minimum(facts["max_tokens"], config.max_model_len - prompt)
        for name in COUNTS:
            _require((rows[name] >= 0).all(), name, "are below zero")
        _require(((prompt > 0) & (prompt < config.max_model_len)).all(), "prompt_tokens", "do not fit the model")
        _require((output < most).all(), "output_tokens", "are as many as a request may have")
        _require(
            (computed <= prompt + output + rows["placeholders"]).all(), "computed_tokens", "are more than there are"
        )
        num_running = len(shown.running)
        rows["status"][:num_running], rows["status"][num_running:] = RUNNING, WAITING
        rows["num_blocks"][num_running:] = 0
        held_tokens = rows["num_blocks"].astype(np.int64) * config.block_size
        _require((held_tokens[:num_running] >= computed[:num_running]).all(), "num_blocks", "hold too few tokens")
        _require((held_tokens < prompt + most + config.block_size).all(), "num_blocks", "are more than ever needed")
        rows["max_tokens"] = most
        rows["final_tokens"] = rows["expected_tokens"] = self._lengths(shown, slots, output, most)
        known = prompt + output
        decoding = computed + 1 == known + rows["placeholders"]
        prefill = live["prefill_tokens"]
        rows["prefill_tokens"] = np.where(prefill >= 0, prefill, np.where(decoding, 0, known))
        rows["finished_s"] = NOBODY
        rows["arrival_s"] = _times(facts["arrival_s"])
        rows["scheduled_s"] = _times(live["scheduled_s"], NOBODY)
        rows["first_token_s"] = _times(live["first_token_s"], NOBODY)
        rows["priority"] = np.clip(facts["priority"], -FARTHEST_PRIORITY, FARTHEST_PRIORITY)
        rows["serial"] = slots
        rows["tie_break"] = np.argsort(np.argsort(rows["arrival_s"], kind="stable"), kind="stable")
        self.engine.state.requests[slots] = rows

    def _lengths(self, shown: Shown, slots: np.ndarray, output: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Where answers end: where they are known to, else where their tags say, else at the latest possible."""
        expected = expected_lengths(shown.tag_median[slots], shown.tag_spread[slots], output, self.engine.residual)
        known = shown.known_tokens[slots]
        lengths = np.where(known > 0, np.maximum(known, output + 1), expected)
        return np.fmin(lengths, most)

    def _follow_step(self, step: ShownStep, now_s: float, slots: np.ndarray) -> None:
        """Put a step under way; the time it has run already is taken off."""
        state = self.engine.state
        _require(bool(np.isfinite(step.start_s)), "steps", "start at no time")
        _require(np.isin(step.slots, slots).all(), "steps", "have requests that neither run nor wait")
        _require((step.tokens > 0).all(), "steps", "give a request no tokens")
        require_possible_step(state, len(step.slots), int(step.tokens.sum()))
        head = state.engine[0]
        index = (head.oldest + head.num_in_flight) % 2
        record, batch = state.steps[index], state.batch[index]
        count = record.num_scheduled = len(step.slots)
        record.num_preempted = 0
        batch.slot[:count] = step.slots
        batch.tokens[:count] = step.tokens
        batch.sampled[:count] = step.sampled != 0
        rows = state.requests[step.slots]
        older = step.tokens if head.num_in_flight else rows["in_flight_tokens"]
        if head.num_in_flight:  # what is in flight and in no older step came after this one
            in_older = np.isin(step.slots, state.batch[head.oldest].slot[: state.steps[head.oldest].num_scheduled])
            older = np.where(in_older, step.tokens, rows["in_flight_tokens"])
        sum_up(state, np.maximum(rows["computed_tokens"] - older, 0).astype(np.int64))
        put_under_way(state, step.start_s)
        if head.num_in_flight == 1:
            self._foretold_end_s = float(record.end_s)
        record.end_s = max(record.end_s, now_s)

    def _follow_blocks(self, shown: Shown, slots: np.ndarray) -> None:
        state = self.engine.state
        state.engine[0].num_free_blocks = shown.num_free_blocks
        if not self.engine.tracks_blocks:
            return
        contents = shown.contents
        assert contents is not None
        num_blocks = len(state.blocks)
        _require(len(contents.content) == len(contents.reuse) == num_blocks, "blocks", "are not as many as there are")
        held = state.requests["num_blocks"][slots]
        left = state.requests["full_blocks"][slots]
        lengths = np.fromiter(map(len, contents.tables), np.int64, len(slots))
        _require((lengths >= np.maximum(held, left)).all(), "tables", "are shorter than what is held")
        _require(lengths.max(initial=0) <= state.tables.shape[1], "tables", "are longer than a request can be")
        at_slot, at_place = _places(slots, lengths)
        entries = _joined(contents.tables, np.int64)
        _require(entries.max(initial=0) < num_blocks and entries.min(initial=0) >= 0, "tables", "name unknown blocks")
        state.tables[at_slot, at_place] = entries
        held_entries = entries[at_place < np.repeat(held, lengths)]
        self._chain_free(contents, np.bincount(held_entries, minlength=num_blocks), shown.num_free_blocks)
        self._follow_hashes(contents, slots)
        self._chain_contents(contents)

    def _learn(self, contents: ShownContents) -> None:
        """Number the contents that are new; the state may grow by it."""
        told = np.concatenate((contents.content, *contents.hashes))
        _, found = self._numbers_of(told)
        new = np.unique(told[~found & (told != 0)])
        if not len(new):
            return
        self.engine.know_contents(new.tolist())
        known = np.fromiter(self.engine.contents, np.uint64, len(self.engine.contents))
        self._order = np.argsort(known)
        self._sorted = known[self._order]

    def _numbers_of(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The engine's numbers of contents, and which of them it knows."""
        if not len(self._sorted):
            return np.zeros(len(hashes), np.int64), np.zeros(len(hashes), np.bool_)
        places = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return self._order[places], self._sorted[places] == hashes

    def _follow_hashes(self, contents: ShownContents, slots: np.ndarray) -> None:
        state = self.engine.state
        lengths = np.fromiter(map(len, contents.hashes), np.int64, len(slots))
        _require(lengths.max(initial=0) <= state.hashes.shape[1], "hashes", "are more than a request can have")
        numbers, found = self._numbers_of(_joined(contents.hashes, np.uint64))
        _require(found.all(), "hashes", "stand for nothing")
        state.hashes[_places(slots, lengths)] = numbers
        state.requests["num_hashes"][slots] = lengths

    def _chain_free(self, contents: ShownContents, refs: np.ndarray, num_free: int) -> None:
        state = self.engine.state
        free = np.flatnonzero(contents.reuse)
        _require(np.array_equal(free, np.flatnonzero(refs == 0)), "blocks.reuse", "are not of those that nobody holds")
        _require(len(free) == num_free, "num_free_blocks", "are not as many as are free")
        order = free[np.argsort(contents.reuse[free], kind="stable")]
        blocks, head = state.blocks, state.engine[0]
        blocks["num_refs"] = refs
        blocks["next_free"][order[:-1]] = order[1:]
        blocks["previous_free"][order[1:]] = order[:-1]
        if len(order):
            blocks["next_free"][order[-1]] = blocks["previous_free"][order[0]] = NOBODY
        head.free_head, head.free_tail = (order[0], order[-1]) if len(order) else (NOBODY, NOBODY)

    def _chain_contents(self, contents: ShownContents) -> None:
        state = self.engine.state
        state.cached[:] = NOBODY
        state.blocks["content"] = NOTHING
        state.blocks["next_same"] = NOBODY
        cached = np.flatnonzero(contents.content)
        numbers, _ = self._numbers_of(contents.content[cached])
        chain(state, cached, numbers)


def _places(slots: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of lists of such lengths that lie in the rows of such slots."""
    starts = np.cumsum(lengths) - lengths
    return np.repeat(slots, lengths), np.arange(lengths.sum()) - np.repeat(starts, lengths)


def _joined(arrays: tuple[np.ndarray, ...], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)


def _times(values: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """What is a time from 0 on, and something else for what is not."""
    return np.where(np.isfinite(values) & (values >= 0), values, otherwise)


def _require(condition: bool | np.bool, what: str, complaint: str) -> None:
    if not condition:
        raise ValueError(f"{what}: {complaint}")
