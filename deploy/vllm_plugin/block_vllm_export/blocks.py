"""The contents of KV blocks and the order of reuse of the free ones, updated with each change of vLLM's block pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .identity import short_hash


class BlockContents:
    """Keeps an array of `layout.BLOCK` up to date with the blocks of a pool.

    Block 0, vLLM's null block, is left out. It wraps methods of the pool's free queue and hash table; an exception in
    here does not reach them, but is kept as `failure`.
    """

    def __init__(self, pool: Any, blocks: np.ndarray) -> None:
        """Read the state of the pool, and wrap its methods."""
        self.failure: Exception | None = None
        self.changed: set[int] | None = None  # blocks that have changed since `take_changed`; None: possibly all
        self._pool = pool
        self._content, self._reuse = blocks["content"], blocks["reuse"]
        queue = pool.free_block_queue
        self._wrap(queue, "popleft", lambda block: self._note_held((block,)))
        self._wrap(queue, "popleft_n", lambda some, _: self._note_held(some))
        self._wrap(queue, "remove", lambda _, block: self._note_held((block,)))
        self._wrap(queue, "append", lambda _, block: self._note_freed((block,)))
        self._wrap(queue, "append_n", lambda _, some: self._note_freed(some))
        self._wrap(queue, "prepend_n", lambda _, some: self._note_freed_first(some))
        self._reuse[:] = 0
        self._first, self._last = 0, 0  # the last numbers given in the order of reuse, at its two ends
        self._note_freed(queue.get_all_free_blocks())
        self._read_table()

    def refresh(self) -> None:
        """Follow the pool to a new hash table, which it creates to reset the prefix cache."""
        if self._pool.cached_block_hash_to_block is not self._table:
            self._read_table()

    def _read_table(self) -> None:
        self._table = table = self._pool.cached_block_hash_to_block
        self._wrap(table, "insert", lambda _, key, block: self._note_filled(key, block.block_id))
        self._wrap(table, "pop", lambda _, _key, block_id: self._note_emptied(block_id))
        self._content[:] = 0
        self.changed = None
        for block in self._pool.blocks[1:]:
            if block.block_hash is not None:
                self._note_filled(block.block_hash, block.block_id)

    def _wrap(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        """Wrap a method, so that `note` is called with its result and arguments; the result is unchanged."""
        method = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            try:
                note(result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the export ends, not the engine
                self.failure = self.failure or error
            return result

        setattr(owner, name, wrapper)

    def take_changed(self) -> set[int] | None:
        """Return the blocks that have changed since the last call; None: possibly all."""
        changed, self.changed = self.changed, set()
        return changed

    def _note(self, block_id: int) -> None:
        if self.changed is not None:
            self.changed.add(block_id - 1)

    def _note_held(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            self._reuse[block.block_id - 1] = 0
            self._note(block.block_id)

    def _note_freed(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            self._last += 1
            self._reuse[block.block_id - 1] = self._last
            self._note(block.block_id)

    def _note_freed_first(self, blocks: list[Any]) -> None:
        self._first -= len(blocks)
        for position, block in enumerate(blocks):
            self._reuse[block.block_id - 1] = self._first + position
            self._note(block.block_id)

    def _note_filled(self, key: bytes, block_id: int) -> None:
        if block_id:
            self._content[block_id - 1] = short_hash(key)
            self._note(block_id)

    def _note_emptied(self, block_id: int) -> None:
        if block_id:
            self._content[block_id - 1] = 0
            self._note(block_id)
