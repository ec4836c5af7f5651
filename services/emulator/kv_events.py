"""The KV events of an emulated engine, from what its blocks hold after each step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictor.engine import Engine
from predictor.kv_events.events import BlocksRemoved, BlocksStored, KvEvent
from scheduler.prefix.kv_block_hash import kv_block_hashes
from services.emulator.content_hashes import ContentHashes
from services.engine_state.identity import short_hash
from services.kv_events.publisher import KvEventPublisher

SPARE_CONTENTS = 1 << 16  # remembered beyond four for each block


@dataclass(frozen=True, slots=True)
class HashedBlock:
    """A full block of some prompt or response, with the block before it."""

    name: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    position: int


class EmulatedKvEvents:
    """Finds the KV events between two looks at an engine's blocks, and publishes them."""

    def __init__(self, engine: Engine, contents: ContentHashes, publisher: KvEventPublisher) -> None:
        """Start with an engine whose cache is empty."""
        self._publisher = publisher
        self._engine = engine
        self._contents = contents
        self._blocks: dict[int, HashedBlock] = {}  # by short hash
        self._max_blocks = 4 * engine.num_blocks + SPARE_CONTENTS
        self._held = np.zeros(engine.num_blocks, np.uint64)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Take the tokens of a request, so that its blocks can be described."""
        size = self._engine.config.block_size
        parent = None
        for position, name in enumerate(kv_block_hashes(token_ids, size)):
            tokens = tuple(token_ids[position * size : (position + 1) * size])
            self._blocks.setdefault(short_hash(name), HashedBlock(name, parent, tokens, position))
            parent = name
        if len(self._blocks) > self._max_blocks:
            known = set(self._engine.contents)
            self._blocks = {short: block for short, block in self._blocks.items() if short in known}

    def publish(self) -> None:
        """Publish what has changed since the last call."""
        if events := self.take():
            self._publisher.publish(time.time(), events)

    def take(self) -> list[KvEvent]:
        """Return the events since the last call: first the removed blocks, then the stored ones in their order."""
        content = self._engine.state.blocks.view(np.ndarray)["content"]
        held = np.zeros(len(content), np.uint64)
        shared = content >= 0
        held[shared] = self._contents.hash_of[content[shared]]
        changed = np.flatnonzero(held != self._held)
        before, now = self._held[changed], held[changed]
        self._held = held
        events: list[KvEvent] = [
            BlocksRemoved(hashes=(self._blocks[one].name,)) for one in before[before != 0].tolist()
        ]
        return events + self._stored([self._blocks[one] for one in now[now != 0].tolist()])

    def _stored(self, blocks: list[HashedBlock]) -> list[KvEvent]:
        """Join blocks that follow each other into one event."""
        size = self._engine.config.block_size
        runs: list[list[HashedBlock]] = []
        run_after: dict[bytes, list[HashedBlock]] = {}  # by the last block of a run
        for block in sorted(blocks, key=lambda one: one.position):
            run = None if block.parent is None else run_after.pop(block.parent, None)
            if run is None:
                run = []
                runs.append(run)
            run.append(block)
            run_after[block.name] = run
        return [
            BlocksStored(
                hashes=tuple(block.name for block in run),
                parent=run[0].parent,
                token_ids=tuple(token for block in run for token in block.token_ids),
                block_size=size,
            )
            for run in runs
        ]
