"""KV events for tests: an engine's cache of random sequences, as a list of copies, and the batches that describe it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from predictor.kv_events.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch
from predictor.kv_events.index import KvEventIndex
from scheduler.prefix.kv_block_hash import kv_block_hashes, next_block_hash
from services.engine_state.identity import short_hash

SIZE = 4
OTHER_SEED = "another seed than that of the index"


def new_index(**settings: int) -> KvEventIndex:
    """Return an empty index."""
    return KvEventIndex(partial(next_block_hash, seed="names"), short_hash, **settings)


def names_of(tokens: tuple[int, ...]) -> list[int]:
    """Name the full blocks of a prompt as the index does."""
    return [short_hash(one) for one in kv_block_hashes(tokens, SIZE, "names")]


@dataclass(slots=True)
class CacheOracle:
    """The cache of one engine process: a plain list of copies, each with its tokens from the start of the sequence."""

    draw: random.Random
    as_ints: bool = False
    clears: bool = True
    copies: list[tuple[int, ...]] = field(default_factory=list)
    offloaded: list[tuple[int, ...]] = field(default_factory=list)
    batches: list[KvEventBatch] = field(default_factory=list)
    started_s: float = 0.0

    def hash_of(self, tokens: tuple[int, ...]) -> bytes | int:
        """Hash a block as the engine does, by a seed that the index does not know."""
        name = kv_block_hashes(tokens, SIZE, OTHER_SEED)[-1]
        return int.from_bytes(name, "big") & (2**64 - 1) if self.as_ints else name

    def hits(self, tokens: tuple[int, ...]) -> int:
        """Count the leading blocks of a prompt that have a copy."""
        num_hits = 0
        while (num_hits + 1) * SIZE <= len(tokens) and tokens[: (num_hits + 1) * SIZE] in self.copies:
            num_hits += 1
        return num_hits

    def prompt(self) -> tuple[int, ...]:
        """Draw a prompt of a few blocks, which often begins as others do."""
        return tuple(self.draw.randint(1, 2) for _ in range(self.draw.randint(1, 5 * SIZE)))

    def step(self) -> KvEventBatch:
        """Store and remove some blocks at random, and return the batch."""
        events: list[KvEvent] = []
        for _ in range(self.draw.randint(1, 3)):
            events += self._events()
        batch = KvEventBatch(
            published_s=self.started_s + len(self.batches),
            events=tuple(events),
            digest=f"{self.started_s} {len(self.batches)}".encode(),
        )
        self.batches.append(batch)
        return batch

    def _events(self) -> list[KvEvent]:
        kind = self.draw.choices(("store", "remove", "clear", "offload"), (6, 5, 0.3 * self.clears, 1))[0]
        if kind == "store":
            tokens = self.prompt()
            first, last = self.hits(tokens), len(tokens) // SIZE
            if self.draw.random() < 0.2:
                first = max(0, first - 1)  # the last block of a prompt is computed again
            if first == last:
                return []
            ends = [tokens[: (number + 1) * SIZE] for number in range(first, last)]
            self.copies += ends
            return [
                BlocksStored(
                    hashes=tuple(map(self.hash_of, ends)),
                    parent=self.hash_of(tokens[: first * SIZE]) if first else None,
                    token_ids=tokens[first * SIZE : last * SIZE],
                    block_size=SIZE,
                )
            ]
        if kind == "remove" and self.copies:
            tokens = self.copies.pop(self.draw.randrange(len(self.copies)))
            return [BlocksRemoved(hashes=(self.hash_of(tokens),))]
        if kind == "offload" and self.copies:
            tokens = self.draw.choice(self.copies)
            self.offloaded.append(tokens)
            hashes = (self.hash_of(tokens),)
            return [BlocksStored(hashes=hashes, parent=None, token_ids=(), block_size=0, medium="CPU")]
        if kind == "clear":
            self.copies.clear()
            return [CacheCleared()]
        return []


def require_equal(index: KvEventIndex, oracle: CacheOracle, num_prompts: int = 20) -> None:
    """Compare an index with the oracle: all copies, and the hits of random prompts."""
    expected = Counter(names_of(tokens)[-1] for tokens in oracle.copies)
    assert Counter(index.contents[index.contents != 0].tolist()) == expected
    for _ in range(num_prompts):
        tokens = oracle.prompt()
        assert index.hits(names_of(tokens)) == oracle.hits(tokens), tokens


def require_below(index: KvEventIndex, oracle: CacheOracle, num_prompts: int = 20) -> None:
    """Check that an index which knows a part of the cache promises no hit that the oracle does not have."""
    for _ in range(num_prompts):
        tokens = oracle.prompt()
        assert index.hits(names_of(tokens)) <= oracle.hits(tokens), tokens
