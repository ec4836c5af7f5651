"""What KV blocks hold and in which order they will be reused, as a state file tells it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor.compiled import kernel
from predictor.engine import Engine
from predictor.state import NOBODY

ROOM = 1 << 16  # contents that are remembered beyond four for each block


class Names:
    """The hash behind each number that the engine gave a shared content."""

    def __init__(self, engine: Engine) -> None:
        """Start with an engine that has seen no content yet."""
        self._engine = engine
        self._most = 4 * engine.num_blocks + ROOM
        self._hashes = np.zeros(1024, np.uint64)
        self._ranks = np.zeros(engine.num_blocks, np.int64)

    def learn(self, hashes: Sequence[int]) -> None:
        """Have the engine number these contents, ahead of the request that brings them."""
        engine = self._engine
        if len(engine.contents) + len(hashes) > self._most:
            forget_contents(engine)
            self._hashes[: len(engine.contents)] = np.fromiter(engine.contents, np.uint64)
        engine.know_contents(hashes)
        if len(engine.contents) > len(self._hashes):
            self._hashes = np.concatenate((self._hashes, np.zeros(len(engine.contents), np.uint64)))
        self._hashes[[engine.contents[value] for value in hashes]] = hashes

    def of_blocks(self) -> np.ndarray:
        """The hash of what each block holds, 0 for nothing that anyone could hit."""
        numbers = self._engine.state.blocks["content"]
        return np.where(numbers >= 0, self._hashes[np.maximum(numbers, 0)], np.uint64(0))

    def reuse_of_blocks(self) -> np.ndarray:
        """The place of each block in the order of reuse, from 1 up; 0 for those that somebody holds."""
        state = self._engine.state
        rank_free(state.blocks, int(state.engine[0].free_head), self._ranks)
        return self._ranks


@kernel
def rank_free(blocks: np.ndarray, head: int, ranks: np.ndarray) -> None:
    """Number the free blocks from 1 up in the order of reuse; those that are held get 0."""
    for block in range(len(ranks)):
        ranks[block] = 0
    rank, block = 0, head
    while block != NOBODY:
        rank += 1
        ranks[block] = rank
        block = blocks[block].next_free


def forget_contents(engine: Engine) -> None:
    """Number the contents anew: those in blocks and of requests that are there, and no others."""
    state = engine.state
    rows = [state.hashes[slot, : state.requests[slot].num_hashes] for slot in engine.slots.values()]
    content = state.blocks["content"]
    shared = content >= 0
    kept = np.unique(np.concatenate((content[shared], *rows)))
    numbers = np.full(len(engine.contents), NOBODY)
    numbers[kept] = np.arange(len(kept))
    content[shared] = numbers[content[shared]]
    for row in rows:
        row[:] = numbers[row]
    state.cached[: len(kept)] = state.cached[kept]
    state.cached[len(kept) :] = NOBODY
    values = list(engine.contents)
    engine.contents = {values[old]: new for new, old in enumerate(kept.tolist())}
