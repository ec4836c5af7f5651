"""The blocks in an engine's prefix cache, by its KV events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from predictor.kv_events.events import GPU, BlocksRemoved, BlocksStored, CacheCleared, EngineHash, KvEventBatch

MAX_BLOCKS = 1 << 20
MAX_MEDIA = 16  # off-loading tiers
ROOM = 1024  # blocks for which arrays are made at first

# Names a block from the name of the block before it (None for the first one), its tokens, and its extra keys.
BlockNaming = Callable[[bytes | None, Sequence[int], object], bytes]
ShortNaming = Callable[[bytes], int]


@dataclass(slots=True, kw_only=True)
class CachedBlock:
    """A block by the engine's hash: its own names, and its copies on each medium.

    `places` are those of its copies on the GPU, in the order in which they were stored; the first one is hit.
    """

    name: bytes
    short_name: int
    parent: EngineHash | None
    places: list[int] = field(default_factory=list)
    offloaded: Counter[str] = field(default_factory=Counter)


class KvEventIndex:
    """Knows which blocks an engine has cached, by names that follow from their tokens.

    Engines name blocks by hashes of several kinds, which only they can compute. A block is named here by its tokens
    and all tokens before it, as requests are. Blocks of another size or KV cache group than the first one are ignored,
    and so are those that follow a block which is not known: no prefix that contains them is hit.

    Each copy on the GPU has a place, as the engine's blocks have, with the name of its content (0 for none) in
    `contents` and the moment of its last use in `last_uses`.
    """

    def __init__(self, name_block: BlockNaming, short_name: ShortNaming, *, max_blocks: int = MAX_BLOCKS) -> None:
        """Start with an empty cache."""
        self._name_block = name_block
        self.short_name = short_name  # of the name of a block
        self._max_blocks = max_blocks
        self.block_size = 0  # until it is known
        self.serial = 0  # changes with every change
        self.num_ignored = 0  # blocks in events that are not indexed
        self.is_full = False
        self.contents = np.zeros(ROOM, np.uint64)
        self.last_uses = np.zeros(ROOM)
        self._stored_at = np.zeros(ROOM, np.int64)
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks: dict[EngineHash, CachedBlock] = {}
        self._by_name: dict[int, EngineHash] = {}
        self._children: dict[EngineHash, dict[EngineHash, None]] = {}
        self._num_offloaded: Counter[str] = Counter()
        self._free_places = list(range(len(self.contents) - 1, -1, -1))
        self._clock = 0
        self.contents[:] = 0
        self.last_uses[:] = 0
        self.is_full = False
        self.serial += 1

    def apply(self, batch: KvEventBatch) -> None:
        """Apply the events of a batch."""
        self.serial += 1
        for event in batch.events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved():
                    self._remove(event)
                case CacheCleared():
                    self._clear_gpu()

    def names_of(self, token_ids: Sequence[int], block_size: int, extra_keys: object = None) -> list[int]:
        """Name the full blocks of a prompt."""
        before, names = None, []
        for end in range(block_size, len(token_ids) + 1, block_size):
            before = self._name_block(before, token_ids[end - block_size : end], extra_keys)
            names.append(self.short_name(before))
        return names

    # What is cached.

    @property
    def num_blocks(self) -> int:
        """Number of blocks on the GPU whose contents are known, copies included."""
        return len(self.contents) - len(self._free_places)

    def num_offloaded(self) -> dict[str, int]:
        """Return the number of blocks on each off-loading tier."""
        return dict(self._num_offloaded)

    def hits(self, names: Sequence[int]) -> int:
        """Return how many leading blocks are on the GPU."""
        return next((position for position, name in enumerate(names) if self.place_of(name) is None), len(names))

    def offloaded_hits(self, names: Sequence[int]) -> int:
        """Return how many further blocks, behind those on the GPU, are there or on an off-loading tier."""
        on_gpu = self.hits(names)
        for position in range(on_gpu, len(names)):
            block = self._block_named(names[position])
            if block is None or not (block.places or block.offloaded.total()):
                return position - on_gpu
        return len(names) - on_gpu

    def place_of(self, name: int) -> int | None:
        """Return the place of the copy of a block on the GPU that is hit; None without one."""
        block = self._block_named(name)
        return block.places[0] if block is not None and block.places else None

    def followers_of(self, name: int, *, stored_from: int) -> list[int]:
        """Return the names of the blocks on the GPU that follow a block and were stored since a moment."""
        engine_hash = self._by_name.get(name)
        if engine_hash is None:
            return []
        found = [self._blocks[one] for one in self._children.get(engine_hash, ())]
        return [one.short_name for one in found if one.places and self._stored_at[one.places[-1]] >= stored_from]

    def moment(self) -> int:
        """Return the present moment, for comparisons with when blocks were stored."""
        return self._clock

    def has(self, name: int, *, stored_before: float = math.inf) -> bool:
        """Return whether a block is on the GPU, and was before a moment that `moment` returned."""
        place = self.place_of(name)
        return place is not None and self._stored_at[place] < stored_before

    def use(self, names: Sequence[int]) -> None:
        """Take that a request returns these blocks now: the last ones will be reused first."""
        for name in reversed(names):
            if (place := self.place_of(name)) is not None:
                self._clock += 1
                self.last_uses[place] = self._clock

    # Events.

    def _store(self, event: BlocksStored) -> None:
        if not self._is_indexed(event):
            self.num_ignored += len(event.hashes)
            return
        parent = event.parent
        extra = event.extra_keys or (None,) * len(event.hashes)
        for number, engine_hash in enumerate(event.hashes):
            block = self._blocks.get(engine_hash)
            if block is None:
                tokens = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
                block = self._named(engine_hash, parent, tokens, extra[number])
            if block is None:
                self.num_ignored += len(event.hashes) - number
                return
            self._add_copy(block, event.medium)
            parent = engine_hash

    def _is_indexed(self, event: BlocksStored) -> bool:
        if event.group != 0 or not event.hashes:
            return False
        if not event.token_ids:
            return True  # an off-loading tier names blocks by their hashes alone
        if not self.block_size:
            self.block_size = event.block_size
        is_whole = len(event.token_ids) == len(event.hashes) * event.block_size
        has_all_keys = event.extra_keys is None or len(event.extra_keys) == len(event.hashes)
        return event.block_size == self.block_size and is_whole and has_all_keys

    def _named(
        self, engine_hash: EngineHash, parent: EngineHash | None, tokens: Sequence[int], extra_keys: object
    ) -> CachedBlock | None:
        """Return a new block; None where its name cannot be known, or there is no room."""
        before = None if parent is None else self._blocks.get(parent)
        if not tokens or (parent is not None and before is None):
            return None
        if len(self._blocks) >= self._max_blocks:
            self.is_full = True
            return None
        name = self._name_block(None if before is None else before.name, tokens, extra_keys)
        block = CachedBlock(name=name, short_name=self.short_name(name), parent=parent)
        self._blocks[engine_hash] = block
        self._by_name[block.short_name] = engine_hash
        if parent is not None:
            self._children.setdefault(parent, {})[engine_hash] = None
        return block

    def _add_copy(self, block: CachedBlock, medium: str) -> None:
        if medium != GPU:
            if medium not in self._num_offloaded and len(self._num_offloaded) >= MAX_MEDIA:
                self.num_ignored += 1
                return
            block.offloaded[medium] += 1
            self._num_offloaded[medium] += 1
            return
        if self.num_blocks >= self._max_blocks:
            self.is_full = True
            return
        place = self._take_place()
        self.contents[place] = block.short_name
        self._stored_at[place] = self._clock
        # a request returns its last blocks first
        before = None if block.parent is None else self._blocks.get(block.parent)
        if before is not None and before.places:
            self.last_uses[place] = math.nextafter(float(self.last_uses[before.places[0]]), -math.inf)
        else:
            self.last_uses[place] = self._clock
        block.places.append(place)
        self._clock += 1

    def _remove(self, event: BlocksRemoved) -> None:
        if event.group != 0:
            return
        for engine_hash in event.hashes:
            block = self._blocks.get(engine_hash)
            if block is None:
                continue
            if event.medium != GPU:
                if event.medium in block.offloaded:
                    _count_down(block.offloaded, event.medium)
                    _count_down(self._num_offloaded, event.medium)
            elif block.places:
                self._free_place(block.places.pop(0))
            self._drop_unused(engine_hash, block)

    def _clear_gpu(self) -> None:
        for engine_hash, block in list(self._blocks.items()):
            for place in block.places:
                self._free_place(place)
            block.places.clear()
            self._drop_unused(engine_hash, block)

    def _drop_unused(self, engine_hash: EngineHash, block: CachedBlock) -> None:
        if block.places or block.offloaded.total():
            return
        del self._blocks[engine_hash]
        if self._by_name.get(block.short_name) == engine_hash:
            del self._by_name[block.short_name]
        if block.parent is not None and (siblings := self._children.get(block.parent)) is not None:
            siblings.pop(engine_hash, None)
            if not siblings:
                del self._children[block.parent]

    def _block_named(self, name: int) -> CachedBlock | None:
        engine_hash = self._by_name.get(name)
        return None if engine_hash is None else self._blocks[engine_hash]

    # Places.

    def _take_place(self) -> int:
        if not self._free_places:
            size = len(self.contents)
            self.contents = np.concatenate((self.contents, np.zeros_like(self.contents)))
            self.last_uses = np.concatenate((self.last_uses, np.zeros_like(self.last_uses)))
            self._stored_at = np.concatenate((self._stored_at, np.zeros_like(self._stored_at)))
            self._free_places = list(range(2 * size - 1, size - 1, -1))
        return self._free_places.pop()

    def _free_place(self, place: int) -> None:
        self.contents[place] = 0
        self._free_places.append(place)


def _count_down(counts: Counter[str], medium: str) -> None:
    """Count one block less; a medium without blocks is forgotten."""
    counts[medium] -= 1
    if not counts[medium]:
        del counts[medium]
