"""What every instance is likely to have cached: the blocks of the prompts that were sent there, the latest of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.indicators import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """How many leading blocks of a prompt each instance holds; `deepest` names the last block that anybody holds.

    Prompts whose `deepest` is the same share all that is cached of them: they are of one class.
    """

    num_blocks: Column
    deepest: Hashable = None


class PrefixIndex:
    """Remembers for each instance the blocks of what was sent there, as many as its cache has room for.

    Each name stands for all content up to the end of its block, so a block is held only together with those before
    it: of a prompt the last blocks are forgotten first, as engines do. A look-up takes steps in the number of
    different answers and the logarithm of the prompt's blocks, not in the number of instances: who holds a block is
    one whole number, a bit for each instance.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        """Know of some instances, and how many blocks each has room for."""
        self._holders: dict[Hashable, int] = {}
        self._caches: dict[str, OrderedDict[Hashable, float]] = {}  # by instance, least recently used first; its blocks
        self._held: dict[str, float] = {}  # their sum
        self._sizes: dict[str, int] = {}
        self._bits: dict[str, int] = {}
        self._free_bits: list[int] = []
        self._seats_of: tuple[str, ...] | None = None
        self._seats: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self.follow(sizes or {})

    def follow(self, sizes: Mapping[str, int]) -> None:
        """Take a new list of instances and their sizes in blocks; who goes is forgotten."""
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
        self._seats_of = None

    def forget(self, instance_id: str) -> None:
        """Take an instance's cache for empty, as after a restart."""
        bit = 1 << self._bits[instance_id]
        cache = self._caches[instance_id]
        for name in cache:
            self._drop(name, bit)
        cache.clear()
        self._held[instance_id] = 0.0

    def sent(self, instance_id: str, names: Sequence[Hashable], blocks_each: float = 1.0) -> None:
        """Note that a prompt goes to an instance; each of its names stands for so many of the instance's blocks."""
        cache, holders, bit = self._caches[instance_id], self._holders, 1 << self._bits[instance_id]
        held = self._held[instance_id]
        for name in reversed(names):  # so that each block is younger than those behind it
            if name in cache:
                cache.move_to_end(name)
            else:
                cache[name] = blocks_each
                held += blocks_each
                holders[name] = holders.get(name, 0) | bit
        self._held[instance_id] = held
        self._shrink(instance_id)

    def look_up(self, names: Sequence[Hashable], instance_ids: tuple[str, ...]) -> Hits:
        """Tell how much of a prompt each of these instances holds, in their order."""
        held = np.zeros(len(instance_ids))
        deepest, so_far = None, 0
        for num_blocks, holders in self._levels(names):
            held += float(num_blocks - so_far) * self._unpacked(holders, instance_ids)
            deepest, so_far = names[num_blocks - 1], num_blocks
        return Hits(num_blocks=held, deepest=deepest)

    def num_held(self, instance_id: str) -> float:
        """Count the blocks that an instance is thought to hold."""
        return self._held[instance_id]

    def _levels(self, names: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Give numbers of leading blocks at which somebody holds no more, and who holds so many or more."""
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
        if instance_ids is not self._seats_of:
            nobody = len(self._bits) + len(self._free_bits)
            self._seats = np.array([self._bits.get(name, nobody) for name in instance_ids], np.intp)
            self._seats_of = instance_ids
        num_bytes = (len(self._bits) + len(self._free_bits)) // 8 + 1
        packed = np.frombuffer(holders.to_bytes(num_bytes, "little"), np.uint8)
        return np.unpackbits(packed, bitorder="little")[self._seats]

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
