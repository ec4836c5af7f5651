"""An engine model that is set, again and again, to the state which a real engine reports.

`engine_from_snapshot.engine_from` builds a model from the values of a snapshot; this does the same from arrays, in a
tenth of the time, because an engine reports its state with every step.
"""

from __future__ import annotations

import math

import numpy as np

from predictor import reported_transfers
from predictor.compiled import direct
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.lengths import DEFAULT_RESIDUAL, expected_lengths
from predictor.replica_kernels import BAD_SLOT, ERRORS, OK, put_blocks, put_requests, put_step, require_ok
from predictor.reported_state import ReportedMemory, ReportedState, read_only, require_memory
from predictor.state import NO_CONTENT
from predictor.step_time import StepTime
from predictor.tabulated_costs import step_seconds


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
        self._max_contents = 4 * self.engine.num_blocks + (1 << 13)
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
        require_ok(put(state, slots, *counts, self.num_slots, *self._columns(reported, slots)))
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
                require_ok(error)
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
            self.engine.state, slots, len(reported.running), len(reported.waiting), read_only(reported.live),
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
        require_memory(memory)
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
            read_only(reported.live),
            read_only(reported.facts),
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
        require_ok(put_contents(state, slots, lengths, num_hashes, order, self._numbers))

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


put, put_in_flight, put_contents = direct(put_requests), direct(put_step), direct(put_blocks)
put_transfers = direct(reported_transfers.put_transfers)
