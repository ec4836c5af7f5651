"""The contents of a mirrored engine's KV blocks, by its KV events and by the prompts of its requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from predictor.approximations import OFFLOADED_PREFIXES, PARTLY_KNOWN_PREFIXES, UNKNOWN_PREFIXES
from predictor.editable_engine import EditableEngine
from predictor.kv_events.stream import PARTIAL, UNSURE, KvEventStream
from predictor.reported_state import ReportedContents, ReportedState

MAX_LATE = 4096  # blocks of ended requests whose events have not come yet
LATE_STORES = 256  # stores of other blocks after which such an event is no longer waited for
NO_NAMES = np.empty(0, np.uint64)


@dataclass(slots=True, kw_only=True)
class NamedPrompt:
    """The names of a request's full blocks, those of its response included as soon as their events have come.

    `arrived_at` is the moment of the index at which the request arrived: blocks stored before it can be hit.
    """

    arrived_at: int
    names: list[int] = field(default_factory=list)
    column: np.ndarray = field(default_factory=lambda: NO_NAMES)  # the names, as engine replicas take them

    def append(self, names: Sequence[int]) -> None:
        """Add the names of further blocks."""
        self.names.extend(names)
        self.column = np.array(self.names, np.uint64)


class KnownBlocks:
    """Gives each request of a mirror its prefix hits, and an engine replica the contents of all blocks.

    The engine's own numbers of blocks are not in its events, so blocks are numbered here: those with contents by their
    places in the index, and the others that requests hold by any free number.
    """

    def __init__(self, stream: KvEventStream) -> None:
        """Follow the events of a stream."""
        self._stream = stream
        self._index = stream.index
        self._prompts: dict[str, NamedPrompt] = {}
        self._holders: dict[int, set[str]] = {}  # running requests by the names of their blocks
        self._late: OrderedDict[int, int] = OrderedDict()  # when requests with these blocks have ended

    @property
    def is_usable(self) -> bool:
        """Whether the contents are known at all."""
        return self._stream.certainty != UNSURE

    @property
    def approximations(self) -> tuple[str, ...]:
        """What forecasts do not know of the engine's cache."""
        if not self.is_usable:
            return (UNKNOWN_PREFIXES,)
        in_part = (PARTLY_KNOWN_PREFIXES,) if self._stream.certainty == PARTIAL else ()
        return (*in_part, OFFLOADED_PREFIXES) if self._index.num_offloaded() else in_part

    def moment(self) -> int:
        """Return the present moment of the index."""
        return self._index.moment()

    @property
    def num_offloaded(self) -> int:
        """Number of blocks on off-loading tiers."""
        return sum(self._index.num_offloaded().values())

    @property
    def offloaded_hits(self) -> Callable[[Sequence[int]], int] | None:
        """How many leading blocks of a prompt are on off-loading tiers; None without such blocks."""
        return self._index.offloaded_hits if self.num_offloaded and self.is_usable else None

    # Requests.

    def arrive(self, name: str, arrived_at: int) -> None:
        """Add a request whose prompt is not known yet."""
        self._prompts[name] = NamedPrompt(arrived_at=arrived_at)

    def read_prompt(self, name: str, token_ids: Sequence[int], block_size: int) -> None:
        """Take the tokens of a request's prompt."""
        prompt = self._prompts.get(name)
        if prompt is not None and not prompt.names:
            prompt.append(self._index.names_of(token_ids, block_size))

    def names_of(self, name: str) -> list[int]:
        """Return the names of a request's full blocks, as far as they are known."""
        prompt = self._prompts.get(name)
        return [] if prompt is None else prompt.names

    def hit_tokens(self, name: str, engine: EditableEngine) -> int:
        """Return how many tokens of a prompt the engine finds cached as the request is admitted."""
        prompt, size = self._prompts.get(name), engine.config.block_size
        if prompt is None or not prompt.names or not self.is_usable:
            return 0
        num_hits = 0
        for position, block in enumerate(prompt.names[: (engine.num_known_tokens(name) - 1) // size]):
            if not self._is_hit(block, position, name, prompt.arrived_at, engine):
                break
            num_hits += 1
        for block in prompt.names:
            self._holders.setdefault(block, set()).add(name)
        return num_hits * size

    def _is_hit(self, block: int, position: int, name: str, arrived_at: int, engine: EditableEngine) -> bool:
        """Return whether a block was cached before a request arrived, or was computed by another one before it.

        A preempted request can hit all blocks that are left of its own.
        """
        if self._index.has(block, stored_before=math.inf if engine.was_preempted(name) else arrived_at):
            return True
        for holder in self._holders.get(block, ()):
            if holder != name and holder in engine.slots and _num_full(engine, holder) > position:
                return True
        ended_at = self._late.get(block)
        return ended_at is not None and (self._index.has(block) or self.moment() - ended_at < LATE_STORES)

    def end(self, name: str, num_full_blocks: int) -> None:
        """Take that a request has returned its blocks."""
        prompt = self._prompts.pop(name, None)
        if prompt is None:
            return
        for block in prompt.names:
            if (holders := self._holders.get(block)) is not None:
                holders.discard(name)
                if not holders:
                    del self._holders[block]
        names = prompt.names[:num_full_blocks]
        self._index.use(names)
        for block in names:
            if not self._index.has(block):
                self._late[block] = self.moment()
        while len(self._late) > MAX_LATE:
            self._late.popitem(last=False)

    # Contents.

    def complete(
        self, shown: ReportedState, requests: Sequence[str], num_blocks: int, block_size: int
    ) -> ReportedState:
        """Add the contents of blocks to a shown state, whose running requests come before the waiting ones."""
        live, num_running = shown.live, len(shown.running)
        contents, last_uses = np.zeros(num_blocks, np.uint64), np.zeros(num_blocks)
        if self.is_usable:
            num_known = min(num_blocks, len(self._index.contents))
            contents[:num_known] = self._index.contents[:num_known]
            last_uses[:num_known] = self._index.last_uses[:num_known]
        num_tokens = shown.facts["prompt_tokens"] + live["output_tokens"]
        known = np.minimum(live["computed_tokens"], num_tokens) // block_size
        live["full_blocks"] = np.where(np.arange(len(live)) < num_running, np.minimum(known, live["num_blocks"]), 0)
        tables, missing = self._tables(live[:num_running], requests, num_blocks)
        held = np.zeros(num_blocks, np.bool_)
        for table in tables:
            held[table[table >= 0]] = True
        spare = _spare_blocks(contents, last_uses, held)
        given: dict[int, int] = {}
        for row, position, name in missing:
            block = given.get(name)
            if block is None and (block := next(spare, None)) is not None:
                contents[block], held[block] = name, True
                if name:
                    given[name] = block
            tables[row][position] = position % num_blocks if block is None else block  # more are held than there are
        order = _order_of_reuse(contents, last_uses, held)
        reuse = np.zeros(num_blocks, np.int64)
        reuse[order] = np.arange(1, len(order) + 1)
        return shown._replace(
            num_free_blocks=len(order),
            contents=ReportedContents(
                content=contents,
                reuse=reuse,
                tables=(*tables, *(np.empty(0, np.int64) for _ in range(len(live) - num_running))),
                hashes=tuple(self._column_of(name) for name in requests) + (NO_NAMES,) * (len(live) - len(requests)),
            ),
        )

    def _tables(
        self, live: np.ndarray, requests: Sequence[str], num_blocks: int
    ) -> tuple[list[np.ndarray], list[tuple[int, int, int]]]:
        """Return the blocks of running requests, -1 for those without a place; and these, with their contents."""
        tables: list[np.ndarray] = []
        missing: list[tuple[int, int, int]] = []
        claimed: set[int] = set()
        rows = zip(live["num_blocks"].tolist(), live["full_blocks"].tolist(), strict=True)
        for row, (num_held, num_full) in enumerate(rows):
            names = self._names_until(requests[row], num_full, claimed)
            table = np.full(num_held, -1)
            for position in range(num_held):
                name = names[position] if position < min(num_full, len(names)) else 0
                place = self._index.place_of(name) if name and self.is_usable else None
                if place is None or place >= num_blocks:
                    missing.append((row, position, name))
                else:
                    table[position] = place
            tables.append(table)
        return tables, missing

    def _names_until(self, request: str, num_full: int, claimed: set[int]) -> list[int]:
        """Return the names of a running request's blocks; those of its response are found by their order."""
        prompt = self._prompts.get(request)
        if prompt is None:
            return []
        while prompt.names and len(prompt.names) < num_full:
            followers = self._index.followers_of(prompt.names[-1], stored_from=prompt.arrived_at)
            name = next((one for one in followers if one not in claimed and one not in self._holders), None)
            if name is None:
                break
            prompt.append([name])
            self._holders.setdefault(name, set()).add(request)
        claimed.update(prompt.names[:num_full])
        return prompt.names

    def _column_of(self, request: str) -> np.ndarray:
        prompt = self._prompts.get(request)
        return NO_NAMES if prompt is None else prompt.column


def _num_full(engine: EditableEngine, name: str) -> int:
    return engine.num_computed_tokens(name) // engine.config.block_size


def _spare_blocks(contents: np.ndarray, last_uses: np.ndarray, held: np.ndarray) -> Iterator[int]:
    """Yield free blocks: those without contents, then those whose last use is the longest ago."""
    yield from np.flatnonzero(~held & (contents == 0)).tolist()
    cached = np.flatnonzero(~held & (contents != 0))
    yield from cached[np.argsort(last_uses[cached], kind="stable")].tolist()


def _order_of_reuse(contents: np.ndarray, last_uses: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return the free blocks in the order of reuse: those without contents first."""
    free = np.flatnonzero(~held)
    return free[np.lexsort((last_uses[free], contents[free] != 0))]
