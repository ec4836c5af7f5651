"""The sequence of an engine's event batches: applied in order, with gaps, repetitions and restarts noticed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from predictor.kv_events.events import CacheCleared, KvEventBatch
from predictor.kv_events.index import KvEventIndex

MAX_BUFFERED = 10_000  # batches beyond a gap; as many as vLLM keeps for replays
COMPLETE, PARTIAL, UNSURE = "complete", "partial", "unsure"


@dataclass(slots=True)
class StreamCounts:
    """How many batches came, and what happened to them."""

    applied: int = 0
    duplicates: int = 0
    replays: int = 0  # complete ones: all that was published before is known
    replayed: int = 0  # batches that only a replay brought
    gaps: int = 0  # sequence numbers that did not follow each other
    lost: int = 0  # gaps that could not be repaired
    restarts: int = 0


class KvEventStream:
    """Brings the batches of one engine in order and applies them to an index.

    A batch beyond a gap is buffered until the missing ones come: late, or from the engine's replay. `replay_from` says
    which to ask for; the replay starts with the last batch that was applied, because another batch with that number
    shows that the engine has restarted. Where a gap cannot be repaired, the index is cleared: it then knows a part of
    the engine's cache, until the engine clears its cache or restarts.
    """

    def __init__(self, index: KvEventIndex, *, can_replay: bool) -> None:
        """Start before the first batch; with `can_replay` all earlier batches are asked for."""
        self.index = index
        self.counts = StreamCounts()
        self._can_replay = can_replay
        self._next = 0  # sequence number
        self._is_complete = False  # nothing is cached that the index does not know
        self._has_started = False
        self._is_connected = True
        self._last_s = -math.inf  # publication of the last applied batch
        self._former_s = -math.inf  # that of the engine before a restart
        self._last_digest = b""
        self._buffer: dict[int, KvEventBatch] = {}
        self._replay_start: int | None = None  # of the replay under way
        self._replay_digest = b""  # of the batch that it starts with, if that was applied
        self._replayed: dict[int, KvEventBatch] = {}

    @property
    def certainty(self) -> str:
        """What the index is worth: `complete`, `partial` (hits are at least these) or `unsure` (being repaired)."""
        if not self._has_started or not self._is_connected or self._buffer:
            return UNSURE
        return COMPLETE if self._is_complete and not self.index.is_full else PARTIAL

    @property
    def has_gap(self) -> bool:
        """Whether batches are missing; call `replay_from` or `give_up`."""
        return bool(self._buffer)

    @property
    def needs_replay(self) -> bool:
        """Whether a replay would show something that is not known."""
        return self._can_replay and (self.has_gap or not self._has_started or not self._is_connected)

    # Live batches.

    def receive(self, sequence: int, batch: KvEventBatch) -> None:
        """Take a batch as it is published."""
        if batch.published_s <= self._former_s:
            self.counts.duplicates += 1
            return
        if not self._has_started:
            if sequence > 0 and self._can_replay:
                self._keep(sequence, batch)
                return
            self._start_at(sequence)
        if sequence < self._next:
            if batch.published_s <= self._last_s:
                self.counts.duplicates += 1
                return
            self._restart()
            self._start_at(0)
        if not self._can_replay:
            self._is_connected = True  # the sequence continues, or shows what is missing
        if sequence == self._next:
            self._apply(batch)
            self._drain()
        elif sequence in self._buffer or batch.published_s < self._last_s:  # the latter: from before a restart
            self.counts.duplicates += 1
        else:
            self.counts.gaps += not self._buffer
            self._keep(sequence, batch)

    def disconnect(self) -> None:
        """Take that the connection was lost: batches may be missing, and the engine may have restarted."""
        self._is_connected = False

    def give_up(self) -> None:
        """Continue beyond a gap that cannot be repaired."""
        if self._buffer:
            self._lose()

    # Replays.

    def replay_from(self) -> int:
        """Start a replay; return the first sequence number to ask for."""
        self._replay_start = max(0, self._next - 1)
        self._replay_digest = self._last_digest
        self._replayed.clear()
        return self._replay_start

    def replay(self, sequence: int, batch: KvEventBatch) -> None:
        """Take a batch of the replay."""
        if self._replay_start is not None and sequence >= self._replay_start:
            self._replayed[sequence] = batch

    def cancel_replay(self) -> None:
        """Drop a replay that did not end."""
        self._replay_start = None
        self._replayed.clear()

    def end_replay(self) -> bool:
        """Apply what the replay brought; return whether another replay is needed at once, as the engine restarted."""
        start, replayed, self._replay_start, self._replayed = self._replay_start, self._replayed, None, {}
        if start is None:
            return False
        self.counts.replays += 1
        if self._shows_restart(start, replayed):
            self._restart()
            return True
        self._is_connected = True
        self.counts.replayed += sum(number >= self._next for number in replayed)
        later = {number: batch for number, batch in replayed.items() if number >= self._next}
        if not self._has_started:
            self._start_at(min([*later, *self._buffer], default=0))
        self._buffer |= later
        self._drain()
        while self._buffer:  # batches that the engine has forgotten
            self._lose()
        return False

    def _shows_restart(self, start: int, replayed: dict[int, KvEventBatch]) -> bool:
        """Return whether the engine has other batches than those that were applied, or fewer."""
        if not self._replay_digest:
            return False  # nothing had been applied
        return not replayed or (start in replayed and replayed[start].digest != self._replay_digest)

    # Order.

    def _start_at(self, sequence: int) -> None:
        """Begin with a batch; only the first one of an engine finds an empty cache."""
        self._has_started, self._next, self._is_complete = True, sequence, sequence == 0

    def _apply(self, batch: KvEventBatch) -> None:
        self.index.apply(batch)
        self._next += 1
        self._last_s = max(self._last_s, batch.published_s)
        self._last_digest = batch.digest
        self.counts.applied += 1
        if any(isinstance(event, CacheCleared) for event in batch.events):
            self._is_complete = True

    def _drain(self) -> None:
        while (batch := self._buffer.pop(self._next, None)) is not None:
            self._apply(batch)
        # what was published before is of the engine before a restart
        for number in [
            one for one, kept in self._buffer.items() if one < self._next or kept.published_s < self._last_s
        ]:
            del self._buffer[number]

    def _keep(self, sequence: int, batch: KvEventBatch) -> None:
        self._buffer[sequence] = batch
        if len(self._buffer) > MAX_BUFFERED:
            if not self._has_started:
                self._start_at(min(self._buffer))
                self._drain()
            while len(self._buffer) > MAX_BUFFERED:
                self._lose()

    def _lose(self) -> None:
        self.counts.lost += 1
        self.index.clear()
        self._start_at(min(self._buffer))
        self._is_complete = False
        self._drain()

    def _restart(self) -> None:
        self.counts.restarts += 1
        self.index.clear()
        self._buffer.clear()
        self.cancel_replay()
        self._has_started, self._is_complete, self._next = False, False, 0
        self._former_s, self._last_s, self._last_digest = self._last_s, -math.inf, b""
