"""An index of the prefix caches of all instances, estimated from the prompts that were sent to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.columns import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """The number of leading blocks of a prompt that each instance has cached.

    `deepest` is the name of the last block that any instance has. Prompts with the same `deepest` share their whole
    cached prefix, and belong to one prefix class.
    """

    num_blocks: Column
    deepest: Hashable = None


class PrefixIndex:
    """Keeps for each instance the most recently used blocks of the prompts sent there, up to the size of its cache.

    A name identifies all content up to the end of its block, so that a block is cached only together with all blocks
    before it: the last blocks of a prompt are evicted first, as in engines. The instances that have a block are the
    bits of one integer, so that the cost of a look-up depends on the number of different results and the logarithm of
    the number of blocks, not on the number of instances.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        """Start with these instances and the sizes of their caches in blocks."""
        self._holders: dict[Hashable, int] = {}
        self._caches: dict[str, OrderedDict[Hashable, float]] = {}  # KV blocks by instance and name, oldest use first
        self._held: dict[str, float] = {}  # KV blocks by instance
        self._sizes: dict[str, int] = {}
        self._bits: dict[str, int] = {}
        self._free_bits: list[int] = []
        self._columns_of: tuple[str, ...] | None = None
        self._columns: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self.follow(sizes or {})

    def follow(self, sizes: Mapping[str, int]) -> None:
        """Replace the list of instances and the sizes of their caches; removed instances are dropped."""
        for instance_id in self._caches.keys() - sizes.keys():
            self.forget(instance_id)
            del self._caches[instance_id], self._held[instance_id]
            self._free_bits.append(self._bits.pop(instance_id))
        for instance_id, size in sizes.items():
            if instance_id not in self._caches:
                self._caches[instance_id], self._held[instance_id] = OrderedDict(), 0.0
                self._bits[instance_id] = self._free_bits.pop() if self._free_bits else len(self._bits)
            self._sizes[instance_id] = size
            self._shrink(instance_id)
        self._sizes = dict(sizes)
        self._columns_of = None

    def forget(self, instance_id: str) -> None:
        """Empty the cache of an instance, as after a restart."""
        bit = 1 << self._bits[instance_id]
        cache = self._caches[instance_id]
        for name in cache:
            self._drop(name, bit)
        cache.clear()
        self._held[instance_id] = 0.0

    def sent(self, instance_id: str, names: Sequence[Hashable], blocks_each: float = 1.0) -> None:
        """Record that a prompt goes to an instance; each name takes `blocks_each` KV blocks there."""
        cache, holders, bit = self._caches[instance_id], self._holders, 1 << self._bits[instance_id]
        held = self._held[instance_id]
        for name in reversed(names):  # so that the last blocks are evicted first
            if name in cache:
                cache.move_to_end(name)
            else:
                cache[name] = blocks_each
                held += blocks_each
                holders[name] = holders.get(name, 0) | bit
        self._held[instance_id] = held
        self._shrink(instance_id)

    def look_up(self, names: Sequence[Hashable], instance_ids: tuple[str, ...]) -> Hits:
        """Return how much of a prompt each of these instances has cached, in their order."""
        held = np.zeros(len(instance_ids))
        deepest, so_far = None, 0
        for num_blocks, holders in self._levels(names):
            held += float(num_blocks - so_far) * self._unpacked(holders, instance_ids)
            deepest, so_far = names[num_blocks - 1], num_blocks
        return Hits(num_blocks=held, deepest=deepest)

    def num_held(self, instance_id: str) -> float:
        """Return the estimated number of KV blocks in the cache of an instance."""
        return self._held[instance_id]

    def _levels(self, names: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Return the different numbers of cached leading blocks, each with the instances that have at least as many."""
        levels: list[tuple[int, int]] = []
        start, last = 0, len(names) - 1
        holders = self._holders.get(names[0], 0) if names else 0
        while holders:
            low, high = start, last
            while low < high:
                middle = (low + high + 1) // 2
                if self._holders.get(names[middle], 0) & holders == holders:
                    low = middle
                else:
                    high = middle - 1
            levels.append((low + 1, holders))
            if low == last:
                break
            start = low + 1
            holders &= self._holders.get(names[start], 0)
        return levels

    def _unpacked(self, holders: int, instance_ids: tuple[str, ...]) -> npt.NDArray[np.uint8]:
        if instance_ids is not self._columns_of:
            unused_bit = len(self._bits) + len(self._free_bits)
            self._columns = np.array([self._bits.get(name, unused_bit) for name in instance_ids], np.intp)
            self._columns_of = instance_ids
        num_bytes = (len(self._bits) + len(self._free_bits)) // 8 + 1
        packed = np.frombuffer(holders.to_bytes(num_bytes, "little"), np.uint8)
        return np.unpackbits(packed, bitorder="little")[self._columns]

    def _shrink(self, instance_id: str) -> None:
        cache, size, held = self._caches[instance_id], self._sizes[instance_id], self._held[instance_id]
        if held > size:
            others, holders = ~(1 << self._bits[instance_id]), self._holders
            while held > size and cache:
                name, num_blocks = cache.popitem(last=False)
                held -= num_blocks
                left = holders[name] & others
                if left:
                    holders[name] = left
                else:
                    del holders[name]
            self._held[instance_id] = held if cache else 0.0

    def _drop(self, name: Hashable, bit: int) -> None:
        left = self._holders[name] & ~bit
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]
