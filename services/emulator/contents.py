"""What KV blocks hold, as a state file names it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor.engine import Engine
from predictor.state import NOBODY

ROOM = 1 << 16  # contents that are remembered beyond four for each block


class Names:
    """The hash behind each number that the engine gave a shared content."""

    def __init__(self, engine: Engine) -> None:
        """Start with an engine that has seen no content yet."""
        self._engine = engine
        self._most = 4 * engine.num_blocks + ROOM
        self.hash_of = np.zeros(1024, np.uint64)

    def learn(self, hashes: Sequence[int]) -> None:
        """Have the engine number these contents, ahead of the request that brings them."""
        engine = self._engine
        if len(engine.contents) + len(hashes) > self._most:
            forget_contents(engine)
            self.hash_of[: len(engine.contents)] = np.fromiter(engine.contents, np.uint64)
        engine.know_contents(hashes)
        if len(engine.contents) > len(self.hash_of):
            self.hash_of = np.concatenate((self.hash_of, np.zeros(len(engine.contents), np.uint64)))
        self.hash_of[[engine.contents[value] for value in hashes]] = hashes


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
