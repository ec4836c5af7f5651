"""KV blocks of vLLM 0.32 in plain Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any


class BlockPool:
    """KV blocks: a free list in order of reuse, reference counts, and the cache of full blocks (BlockPool)."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self.free = deque(range(1, num_gpu_blocks))  # vLLM reserves block 0
        self.refs = [0] * num_gpu_blocks
        self.keys: list[Hashable] = [None] * num_gpu_blocks
        self.cached: dict[Hashable, list[int]] = {}  # blocks of equal content, in the order they were cached

    def take(self, count: int) -> list[int]:
        """Reuse blocks from the head of the free list; their cached content is dropped."""
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            key, self.keys[block] = self.keys[block], None
            if key is not None:
                self.cached[key].remove(block)
            self.refs[block] += 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Share blocks of a prefix hit."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def cache(self, block: int, key: Hashable) -> None:
        """Register a full block for hits."""
        self.keys[block] = key
        self.cached.setdefault(key, []).append(block)

    def release(self, blocks: list[int]) -> None:
        """Free blocks, the last one first: uncached ones are reused next, cached ones last."""
        unheld = []
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                unheld.append(block)
        self.free.extendleft(reversed([block for block in unheld if self.keys[block] is None]))
        self.free.extend(block for block in unheld if self.keys[block] is not None)

    def hits(self, request: Any, block_size: int) -> list[int]:
        """Return the longest cached prefix; the last token is always computed again (get_computed_blocks)."""
        blocks = []
        for index in range((request.num_tokens - 1) // block_size):
            same = self.cached.get(request.block_key(index))
            if not same:
                break
            blocks.append(same[0])
        return blocks
