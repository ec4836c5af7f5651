"""An engine model that is set, again and again, to the state which a real engine reports.

`snapshot_conversion.engine_from` builds a model from the values of a snapshot; this does the same from arrays, in a
tenth of the time, because an engine reports its state with every step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from predictor import reported_transfers, steps
from predictor.blocks import chain_same
from predictor.compiled import direct, kernel, small_kernel
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.lengths import DEFAULT_RESIDUAL, expected_lengths
from predictor.request import CLASSES, LEGS, MAX_PRIORITY
from predictor.state import (
    EXPECTED,
    FINISHED,
    HALF_CREDIT,
    NO_CONTENT,
    NO_TRANSFER,
    NONE,
    PENDING,
    RUNNING,
    WAITING,
    State,
)
from predictor.step_time import StepTime, step_seconds

NUM_CLASSES, NUM_LEGS = len(CLASSES), len(LEGS)
NO_SLOTS = np.empty(0, np.int64)

# Errors in a reported state, by the number that the kernels below return; 0 is none.
ERRORS = (
    "",
    "running: a slot is there twice, or does not exist",
    "live: a count is below zero",
    "prompt_tokens: do not fit the model",
    "output_tokens: are not below the request's limit",
    "computed_tokens: are more than the request has tokens",
    "num_blocks: hold too few tokens",
    "num_blocks: are more than the request can need",
    "steps: contain a request that neither runs nor waits",
    "steps: give a request no tokens",
    "scheduled: are more requests or tokens than a step of this engine can have",
    "tables: are shorter than the number of blocks held",
    "tables: name a block that does not exist",
    "blocks.reuse: does not list the blocks that no request holds",
    "drafts: are more than a step of this engine can have",
)
(
    OK, BAD_SLOT, BELOW_ZERO, BAD_PROMPT, TOO_MANY_OUTPUT, TOO_MANY_COMPUTED, TOO_FEW_BLOCKS, TOO_MANY_BLOCKS,
    UNKNOWN_REQUEST, NO_TOKENS, TOO_LARGE_STEP, SHORT_TABLE, UNKNOWN_BLOCK, WRONG_REUSE, TOO_MANY_DRAFTS,
) = range(len(ERRORS))  # fmt: skip


class ReportedStep(NamedTuple):
    """A step in flight: its requests' slots in order, their tokens, and whether they will sample.

    `drafts` are the draft tokens among those of each request.
    """

    start_s: float
    slots: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    drafts: np.ndarray


class ReportedContents(NamedTuple):
    """The contents of KV blocks.

    By block: its content (0 for none), and its position in the order of reuse (0 while it is held). By request, the
    running ones before the waiting ones: its blocks, and the contents of its full blocks. An array that is identical
    to that of the last report must be unchanged.
    """

    content: np.ndarray
    reuse: np.ndarray
    tables: tuple[np.ndarray, ...]
    hashes: tuple[np.ndarray, ...]


class ReportedMemory(NamedTuple):
    """What an engine's local scheduler remembers between steps, as in `snapshot.Memory`.

    `numbers` are `state.MEMORY_SIZE`, and `clients` has the first fields of `state.CLIENT`.
    """

    num_steps: int
    correction: float
    numbers: np.ndarray
    clients: np.ndarray


class ReportedState(NamedTuple):
    """An engine's state at `now_s`, in arrays by slot; all of it is checked before use.

    `live` has a record per slot with the counts of `state.REQUEST`, `scheduled_s` and `first_token_s`; `facts` one
    with `arrival_s`, `priority`, `prompt_tokens`, `max_tokens` and the fields of `state.FACTS`. The length of a
    response is `known_tokens` where it is certain (else 0), or is predicted by a tag's median and spread (NaN without a
    tag).

    `facts` has the `leg` of each request, and `live` the `stage` of its transfer, with `fetch_started_s`,
    `fetch_ended_s` and `held_until_s` (negative: not yet). `held` are the slots of requests that have ended, and whose
    blocks are held until they are fetched; `held_s` says for how long that is predicted, by slot, NaN where it is not.
    """

    now_s: float
    num_free_blocks: int
    decodes_since_look: int
    running: np.ndarray
    waiting: np.ndarray
    steps: tuple[ReportedStep, ...]
    live: np.ndarray
    facts: np.ndarray
    known_tokens: np.ndarray
    tag_median: np.ndarray
    tag_spread: np.ndarray
    contents: ReportedContents | None = None
    memory: ReportedMemory | None = None
    held: np.ndarray = NO_SLOTS
    held_s: np.ndarray | None = None
    adapters: np.ndarray | None = (
        None  # the fields of `state.ADAPTER`, the least recently used one first; None: unknown
    )


class EngineReplica:
    """An engine model beside an engine; reserved requests that the engine does not report yet are added to `engine`."""

    def __init__(
        self,
        config: EngineConfig,
        step_time: StepTime,
        residual: str = DEFAULT_RESIDUAL,
        *,
        num_slots: int,
        track_blocks: bool,
    ) -> None:
        """Initialise an idle one, for an engine that reports `num_slots` slots."""
        self.engine = Engine(config, step_time, residual, track_blocks=track_blocks)
        self.engine.exclude_slots(num_slots)
        self.num_slots = num_slots
        self._predicted_end_s = 0.0  # of the oldest step in flight
        self._sorted, self._order = np.empty(0, np.uint64), np.empty(0, np.int64)  # contents, sorted, and their numbers
        self._content = np.zeros(len(self.engine.state.blocks), np.uint64)  # of each block, in the last report
        self._numbers = np.full(len(self.engine.state.blocks), NO_CONTENT)
        self._hashes: dict[int, np.ndarray] = {}  # by slot, in the last report
        self._max_contents = 4 * self.engine.num_blocks + (1 << 16)
        if self.engine.tracks_blocks:
            self.engine.widen_table(-(-config.max_model_len // config.block_size))

    @property
    def needs_replacement(self) -> bool:
        """Whether it has numbered so many contents of blocks that a new replica should replace it."""
        return len(self.engine.contents) > self._max_contents

    def update(self, reported: ReportedState) -> None:
        """Set the model to a reported state; an inconsistent one is refused by name, and leaves an idle model."""
        self._number_contents(reported)
        state = self.engine.state
        head = state.engine[0]
        head.num_running = head.num_waiting = head.num_in_flight = head.waiting_head = head.oldest = 0
        head.num_holding = head.num_transfers = head.num_fetching = 0
        head.next_transfer_s = math.inf
        self._require_possible(reported)
        slots = np.concatenate((reported.running, reported.waiting, reported.held)).astype(np.int64)
        counts = len(reported.running), len(reported.waiting)
        _require_ok(put(state, slots, *counts, self.num_slots, *self._columns(reported, slots)))
        self._put_transfers(reported, slots)
        if reported.adapters is not None:
            self._put_adapters(reported.adapters)
        if self.engine.tracks_blocks:
            self._update_blocks(reported, slots)
        head.num_free_blocks = reported.num_free_blocks
        head.now_s = min([reported.now_s, *(step.start_s for step in reported.steps)])
        head.decodes_since_look = reported.decodes_since_look
        head.steady = head.stuck = head.fruitless_preemptions = head.num_encoder_entries = 0
        head.encoder_free = head.encoder_reclaimable = self.engine.config.encoder_cache_size
        if reported.memory is not None:
            self._remember(reported.memory)
        elif head.estimator_momentum > 0:  # the correction of its local scheduler counts as complete
            head.correction = head.pace / head.estimator_factor
        for ahead, step in enumerate(reported.steps):
            error = put_in_flight(
                state, step.slots.astype(np.int64), step.tokens.astype(np.int64), step.sampled.astype(np.int64),
                step.drafts.astype(np.int64), float(step.start_s),
            )  # fmt: skip
            if error != OK:
                head.num_in_flight = 0
                _require_ok(error)
            if ahead == 0:
                self._predicted_end_s = float(state.steps[0].end_s)
        self.wait_until(reported.now_s)
        head.num_running, head.num_waiting = len(reported.running), len(reported.waiting)

    def _put_transfers(self, reported: ReportedState, slots: np.ndarray) -> None:
        """Continue the transfers; the blocks of a prefill leg are held as predicted, else while the lease lasts."""
        config = self.engine.config
        if not config.kv_role:
            return
        held_s = np.full(len(slots), np.nan) if reported.held_s is None else reported.held_s[slots]
        put_transfers(
            self.engine.state, slots, len(reported.running), len(reported.waiting), _read_only(reported.live),
            np.asarray(held_s, np.float64), float(config.kv_lease_s), float(reported.now_s),
        )  # fmt: skip

    def wait_until(self, now_s: float) -> None:
        """Advance the clock without an event: a step whose predicted end has passed ends now at the earliest."""
        state = self.engine.state
        head = state.engine[0]
        if head.num_in_flight == 0:
            head.now_s = max(head.now_s, now_s)
        for ahead in range(head.num_in_flight):
            record = state.steps[(head.oldest + ahead) % 2]
            record.end_s = max(record.end_s, now_s)

    def late_s(self, now_s: float) -> float:
        """Return for how long the oldest step in flight has been running beyond its predicted end."""
        return max(0.0, now_s - self._predicted_end_s) if self.engine.state.engine[0].num_in_flight else 0.0

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
        """Return the profile's seconds for a step, uncorrected; None for a step that this engine cannot have made."""
        costs = self.engine.state.costs
        limit = len(costs.by_count)
        if not (0 < num_tokens < len(costs.by_tokens) and 0 <= num_sampled < limit and 0 <= num_decodes < limit):
            return None
        drafting_s = self.engine.config.draft_step_s if num_sampled > 0 else 0.0
        return drafting_s + float(
            step_seconds(
                costs, num_tokens, num_sampled, num_decodes, float(decode_context), num_prefills, prefill_qq,
                prefill_qkv, float(decode_longest),
            )
        )  # fmt: skip

    def _require_possible(self, reported: ReportedState) -> None:
        if len(reported.running) > self.engine.config.max_num_seqs:
            raise ValueError(f"running: {len(reported.running)} requests are more than max_num_seqs allows")
        if len(reported.running) + len(reported.waiting) + len(reported.held) > self.num_slots:
            raise ValueError(ERRORS[BAD_SLOT])
        if len(reported.steps) > 2:
            raise ValueError(f"steps: at most 2 can be in flight, not {len(reported.steps)}")
        if not 0 <= reported.num_free_blocks <= self.engine.num_blocks:
            raise ValueError(f"num_free_blocks: {reported.num_free_blocks} of {self.engine.num_blocks} cannot be free")
        if not all(math.isfinite(time_s) for time_s in (reported.now_s, *(step.start_s for step in reported.steps))):
            raise ValueError("steps: now_s and start_s must be finite")

    def _remember(self, memory: ReportedMemory) -> None:
        """Set what the local scheduler remembers."""
        _require_memory(memory)
        head, clients = self.engine.state.engine[0], self.engine.state.clients
        count = len(memory.clients)
        if count > len(clients):
            raise ValueError(f"memory.clients: {count} are more than {self.engine.config.batcher} counts")
        head.num_steps, head.correction, head.num_clients = memory.num_steps, memory.correction, count
        head.memory = memory.numbers
        if count:
            rows = clients.view(np.ndarray)
            for name in memory.clients.dtype.names or ():
                rows[name][:count] = memory.clients[name]

    def _put_adapters(self, adapters: np.ndarray) -> None:
        """Set which LoRA adapters are in host memory, and which of them in GPU slots."""
        head, config = self.engine.state.engine[0], self.engine.config
        if len(adapters) > config.num_cpu_loras or np.count_nonzero(adapters["is_active"]) > config.max_loras:
            raise ValueError(f"adapters: {len(adapters)} are more than max_loras and max_cpu_loras allow")
        head.num_adapters = len(adapters)
        rows = self.engine.state.adapters.view(np.ndarray)
        rows["number"][: len(adapters)] = adapters["number"]
        rows["is_active"][: len(adapters)] = adapters["is_active"] != 0

    def _columns(self, reported: ReportedState, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the reported columns, and the known or predicted lengths of responses, NaN for unknown."""
        if slots.max(initial=0) >= self.num_slots or slots.min(initial=0) < 0:
            raise ValueError(ERRORS[BAD_SLOT])
        output = reported.live["output_tokens"][slots]
        known = reported.known_tokens[slots]
        median, spread = reported.tag_median[slots], reported.tag_spread[slots]
        predicted = expected_lengths(median, spread, output, self.engine.residual)
        return (
            _read_only(reported.live),
            _read_only(reported.facts),
            np.where(known > 0, np.maximum(known, output + 1), predicted),
        )

    def _update_blocks(self, reported: ReportedState, slots: np.ndarray) -> None:
        state, contents = self.engine.state, reported.contents
        assert contents is not None
        if not len(contents.content) == len(contents.reuse) == len(state.blocks):
            raise ValueError(f"blocks: {len(contents.content)} are reported of {len(state.blocks)}")
        for slot, row, table in zip(slots.tolist(), contents.hashes, contents.tables, strict=True):
            if len(table) > state.tables.shape[1] or len(row) > state.hashes.shape[1]:
                raise ValueError("tables: are longer than a request can be")
            state.tables[slot, : len(table)] = table
            if self._hashes.get(slot) is not row:
                state.hashes[slot, : len(row)], found = self._numbers_of(row)
                if not found.all():
                    raise ValueError("hashes: must not be 0")
                self._hashes[slot] = row
        lengths = np.fromiter(map(len, contents.tables), np.int64, len(slots))
        num_hashes = np.fromiter(map(len, contents.hashes), np.int64, len(slots))
        free = np.flatnonzero(contents.reuse)
        order = free[np.argsort(contents.reuse[free])]
        if len(order) != reported.num_free_blocks:
            raise ValueError(f"num_free_blocks: {reported.num_free_blocks}, but {len(order)} are reported to be free")
        _require_ok(put_contents(state, slots, lengths, num_hashes, order, self._numbers))

    def _number_contents(self, reported: ReportedState) -> None:
        """Number the contents that are new; this can enlarge the state."""
        contents = reported.contents
        if contents is None or len(contents.content) != len(self._content):
            return
        changed = np.flatnonzero(contents.content != self._content)
        slots = (*reported.running.tolist(), *reported.waiting.tolist(), *reported.held.tolist())
        rows = [row for slot, row in zip(slots, contents.hashes, strict=True) if self._hashes.get(slot) is not row]
        hashes = np.concatenate((contents.content[changed], *rows))
        if not len(hashes):
            return
        _, found = self._numbers_of(hashes)
        new = np.unique(hashes[~found & (hashes != 0)])
        if len(new):
            self.engine.know_contents(new.tolist())
            numbers = np.fromiter(map(self.engine.contents.__getitem__, new.tolist()), np.int64, len(new))
            indexes = np.searchsorted(self._sorted, new)
            self._sorted, self._order = np.insert(self._sorted, indexes, new), np.insert(self._order, indexes, numbers)
        numbers, found = self._numbers_of(contents.content[changed])
        self._numbers[changed] = np.where(found, numbers, NO_CONTENT)
        self._content[changed] = contents.content[changed]

    def _numbers_of(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the engine model's numbers of contents, and which of them it has numbered."""
        if not len(self._sorted):
            return np.zeros(len(hashes), np.int64), np.zeros(len(hashes), np.bool_)
        indexes = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return self._order[indexes], self._sorted[indexes] == hashes


@small_kernel
def error_in(engine: np.record, reported: np.record, fact: np.record, holds: bool, has_ended: bool) -> int:
    """Return what is wrong with one reported request, which may hold blocks, or have ended."""
    if (
        reported.output_tokens < 0 or reported.computed_tokens < 0 or reported.placeholders < 0
        or reported.in_flight_tokens < 0 or reported.stale_tokens < 0 or reported.num_blocks < 0
        or reported.full_blocks < 0 or reported.num_preemptions < 0 or reported.hit_tokens < 0
        or reported.draft_tokens < 0
    ):  # fmt: skip
        return BELOW_ZERO
    prompt = np.int64(fact.prompt_tokens)
    if prompt <= 0 or prompt >= engine.max_model_len:
        return BAD_PROMPT
    max_tokens = min(np.int64(fact.max_tokens), engine.max_model_len - prompt)
    if reported.output_tokens >= max_tokens and not has_ended:
        return TOO_MANY_OUTPUT
    # where a request computes draft tokens, they count as computed until they are rejected
    drafts = min(np.int64(reported.in_flight_tokens), engine.num_speculative_tokens)
    if reported.computed_tokens > prompt + reported.output_tokens + reported.placeholders + drafts:
        return TOO_MANY_COMPUTED
    num_blocks = np.int64(reported.num_blocks) if holds else 0
    if holds and not has_ended and num_blocks * engine.block_size < reported.computed_tokens:
        return TOO_FEW_BLOCKS
    most_tokens = prompt + max_tokens
    if engine.num_speculative_tokens > 0:
        most_tokens += engine.pipeline_depth * (1 + engine.num_speculative_tokens) + engine.num_lookahead_tokens
    if max(num_blocks, np.int64(reported.full_blocks)) * engine.block_size >= most_tokens + engine.block_size:
        return TOO_MANY_BLOCKS
    return OK


@small_kernel
def put_facts(facts: np.record, reported: np.record) -> None:
    """Copy a request's service level, weight, tenant and class; impossible values count as not given."""
    facts.ttft_slo_s = reported.ttft_slo_s if 0 < reported.ttft_slo_s < np.inf else np.nan
    facts.tpot_slo_s = reported.tpot_slo_s if 0 < reported.tpot_slo_s < np.inf else np.nan
    facts.weight = reported.weight if 0 < reported.weight < np.inf else 1.0
    facts.tenant = reported.tenant
    facts.request_class = np.int64(reported.request_class) if 0 <= reported.request_class < NUM_CLASSES else 0
    facts.adapter = reported.adapter
    facts.num_encoder_inputs = 0  # whose outputs an engine does not report: see docs/engines.md


@small_kernel
def put_tokens(engine: np.record, request: np.record, reported: np.record) -> None:
    """Copy a request's prefix hits, and the draft tokens of its next step; expectations of later ones begin again."""
    request.hit_tokens = reported.hit_tokens
    request.draft_tokens = min(np.int64(reported.draft_tokens), engine.num_speculative_tokens)
    request.acceptance_credit = request.proposal_credit = HALF_CREDIT


@kernel
def put_requests(
    state: State, slots: np.ndarray, num_running: int, num_waiting: int, num_slots: int, live: np.ndarray,
    facts: np.ndarray, lengths: np.ndarray,
) -> int:  # fmt: skip
    """Fill the slots and queues with the reported requests; the first `num_running` of them run, the next ones wait."""
    engine = state.engine[0]
    for slot in range(num_slots):
        state.requests[slot].status = PENDING
    for index in range(len(slots)):
        slot = slots[index]
        request, reported, fact = state.requests[slot], live[slot], facts[slot]
        if request.status != PENDING:
            return BAD_SLOT
        runs, has_ended = index < num_running, index >= num_running + num_waiting
        holds = runs or has_ended or engine.fetches
        error = error_in(engine, reported, fact, holds, has_ended)
        if error != OK:
            return error
        prompt = fact.prompt_tokens
        max_tokens = min(np.int64(fact.max_tokens), engine.max_model_len - prompt)
        known = np.int64(prompt) + reported.output_tokens
        request.status = RUNNING if runs else (FINISHED if has_ended else WAITING)
        request.prompt_tokens = prompt
        request.output_tokens = reported.output_tokens
        request.computed_tokens = reported.computed_tokens
        request.placeholders = reported.placeholders
        request.in_flight_tokens = reported.in_flight_tokens
        request.stale_tokens = reported.stale_tokens
        length = lengths[index]
        request.final_tokens = np.int64(length) if length < max_tokens else max_tokens
        request.max_tokens = max_tokens
        request.num_blocks = reported.num_blocks if holds else 0
        request.full_blocks = reported.full_blocks
        request.num_hashes = 0
        request.scheduled_s = reported.scheduled_s if reported.scheduled_s >= 0 else float(NONE)
        request.first_token_s = reported.first_token_s if reported.first_token_s >= 0 else float(NONE)
        request.finished_s = NONE
        request.arrival_s = fact.arrival_s if 0 <= fact.arrival_s < np.inf else 0.0
        request.serial = slot
        request.tie_break = index
        request.priority = min(MAX_PRIORITY, max(-MAX_PRIORITY, fact.priority))
        request.expected_tokens = request.final_tokens
        request.num_preemptions = reported.num_preemptions
        put_tokens(engine, request, reported)
        request.leg = fact.leg if 0 <= fact.leg < NUM_LEGS else 0
        request.stage = NO_TRANSFER
        request.transfer_s = 0.0
        put_facts(state.facts[slot], fact)
        request.tokens_on_time = tokens_on_time(request, state.facts[slot].ttft_slo_s)
        if reported.prefill_tokens >= 0:
            request.prefill_tokens = reported.prefill_tokens
        else:
            decodes = reported.computed_tokens + 1 == known + reported.placeholders
            request.prefill_tokens = 0 if decodes else known
        if runs:
            state.running[index] = slot
        elif not has_ended:
            state.waiting[index - num_running] = slot
    return OK


@small_kernel
def tokens_on_time(request: np.record, ttft_slo_s: float) -> int:
    """Return how many tokens of a reported request came by their deadlines: all, as far as is known."""
    if np.isnan(ttft_slo_s):
        return NONE
    is_first_late = request.first_token_s > request.arrival_s + ttft_slo_s
    return max(0, request.output_tokens - is_first_late)


@kernel
def put_step(
    state: State, slots: np.ndarray, tokens: np.ndarray, sampled: np.ndarray, drafts: np.ndarray, start_s: float
) -> int:
    """Put a reported step in flight, behind the one that may be there already."""
    engine = state.engine[0]
    index = steps.current(state)
    step = state.steps[index]
    num_tokens = 0
    if len(slots) > engine.max_num_seqs:
        return TOO_LARGE_STEP
    for position in range(len(slots)):
        if not 0 <= slots[position] < len(state.requests) or state.requests[slots[position]].status == PENDING:
            return UNKNOWN_REQUEST
        if not 0 < tokens[position] < len(state.costs.by_tokens):
            return NO_TOKENS if tokens[position] <= 0 else TOO_LARGE_STEP
        if not 0 <= drafts[position] < min(tokens[position], state.engine[0].num_speculative_tokens + 1):
            return TOO_MANY_DRAFTS
        num_tokens += tokens[position]
    if num_tokens >= len(state.costs.by_tokens):
        return TOO_LARGE_STEP
    steps.begin(state)
    steps.clear_sums(step)
    for position in range(len(slots)):
        request, entry = state.requests[slots[position]], state.batch[index, position]
        entry.slot, entry.tokens, entry.sampled = slots[position], tokens[position], 1 if sampled[position] else 0
        entry.drafts, entry.accepted, entry.proposed = drafts[position], EXPECTED, EXPECTED
        # tokens in flight that are in no older step were scheduled by this one
        older = request.in_flight_tokens
        if engine.num_in_flight > 0:
            for other in range(state.steps[engine.oldest].num_scheduled):
                if state.batch[engine.oldest, other].slot == slots[position]:
                    older = tokens[position]
        steps.add_to_sums(step, entry, max(0, request.computed_tokens - older))
    step.num_scheduled = len(slots)
    steps.put_in_flight(state, start_s)
    return OK


@kernel
def put_blocks(
    state: State, slots: np.ndarray, lengths: np.ndarray, num_hashes: np.ndarray, order: np.ndarray,
    numbers: np.ndarray,
) -> int:  # fmt: skip
    """Set which requests hold blocks (by their tables), the order of the free ones, and the contents of all."""
    for content in range(len(state.cached)):
        state.cached[content] = NONE
    for index in range(len(state.blocks)):
        block = state.blocks[index]
        block.num_refs = 0
        block.content = block.next_same = NO_CONTENT
        if numbers[index] != NO_CONTENT:
            block.content = numbers[index]
            chain_same(state, index, numbers[index])
    num_held = 0
    for row in range(len(slots)):
        request = state.requests[slots[row]]
        request.num_hashes = num_hashes[row]
        if lengths[row] < max(request.num_blocks, request.full_blocks):
            return SHORT_TABLE
        for position in range(lengths[row]):
            index = state.tables[slots[row], position]
            if not 0 <= index < len(state.blocks):
                return UNKNOWN_BLOCK
            if position < request.num_blocks:
                num_held += state.blocks[index].num_refs == 0
                state.blocks[index].num_refs += 1
    num_known = num_held + len(order)
    # an engine that fetches can hold blocks of requests that have ended until its step ends
    if num_known > len(state.blocks) or (num_known < len(state.blocks) and not state.engine[0].fetches):
        return WRONG_REUSE
    return chain_free(state, order)


@kernel
def chain_free(state: State, order: np.ndarray) -> int:
    """Set the free blocks, in the order of reuse."""
    previous = NONE
    for index in order:
        block = state.blocks[index]
        if block.num_refs > 0:
            return WRONG_REUSE
        block.previous_free, block.next_free = previous, NONE
        if previous != NONE:
            state.blocks[previous].next_free = index
        previous = index
    engine = state.engine[0]
    engine.free_head = order[0] if len(order) > 0 else NONE
    engine.free_tail = previous
    return OK


put, put_in_flight, put_contents = direct(put_requests), direct(put_step), direct(put_blocks)
put_transfers = direct(reported_transfers.put_transfers)


def _require_memory(memory: ReportedMemory) -> None:
    """Refuse what no local scheduler remembers."""
    if not (math.isfinite(memory.correction) and memory.correction > 0):
        raise ValueError(f"memory.correction: must be above 0, not {memory.correction}")
    if not all(map(math.isfinite, memory.numbers.tolist())):
        raise ValueError("memory.numbers: must be finite")
    if len(memory.clients):
        weight, tokens = memory.clients["weight"], memory.clients["tokens"]
        if not (np.isfinite(weight) & (weight > 0)).all():
            raise ValueError("memory.clients.weight: must be above 0")
        if not (np.isfinite(tokens) & (tokens >= 0)).all():
            raise ValueError("memory.clients.tokens: must be at least 0")


def _read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view: compiled code has one type for it, whether the array can be written or not."""
    view = array.view()
    view.flags.writeable = False
    return view


def _require_ok(error: int) -> None:
    if error != OK:
        raise ValueError(ERRORS[error])
