"""The hashes of the emulated engine's block contents, which have numbers in the engine model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor.engine import Engine
from predictor.state import NONE

SPARE_CONTENTS = 1 << 16  # remembered beyond four for each block


class ContentHashes:
    """The hash of each block content, by the number that the engine gave it."""

    def __init__(self, engine: Engine) -> None:
        """Start with an engine that knows no content yet."""
        self._engine = engine
        self._max_contents = 4 * engine.num_blocks + SPARE_CONTENTS
        self.hash_of = np.zeros(1024, np.uint64)

    def learn(self, hashes: Sequence[int]) -> None:
        """Have the engine number contents before the request that has them arrives."""
        engine = self._engine
        if len(engine.contents) + len(hashes) > self._max_contents:
            forget_contents(engine)
            self.hash_of[: len(engine.contents)] = np.fromiter(engine.contents, np.uint64)
        engine.know_contents(hashes)
        if len(engine.contents) > len(self.hash_of):
            self.hash_of = np.concatenate((self.hash_of, np.zeros(len(engine.contents), np.uint64)))
        self.hash_of[[engine.contents[value] for value in hashes]] = hashes


def forget_contents(engine: Engine) -> None:
    """Renumber the contents, and keep only those of blocks and of present requests."""
    state = engine.state
    rows = [state.hashes[slot, : state.requests[slot].num_hashes] for slot in engine.slots.values()]
    content = state.blocks["content"]
    shared = content >= 0
    kept = np.unique(np.concatenate((content[shared], *rows)))
    numbers = np.full(len(engine.contents), NONE)
    numbers[kept] = np.arange(len(kept))
    content[shared] = numbers[content[shared]]
    for row in rows:
        row[:] = numbers[row]
    state.cached[: len(kept)] = state.cached[kept]
    state.cached[len(kept) :] = NONE
    values = list(engine.contents)
    engine.contents = {values[old]: new for new, old in enumerate(kept.tolist())}
