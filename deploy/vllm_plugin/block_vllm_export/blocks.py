"""What KV blocks hold and in which order free ones are reused, kept up with vLLM's block pool change by change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def short_hash(digest: bytes) -> int:
    """Name a block's content as state files do: by the first eight bytes of its hash, and never 0."""
    return int.from_bytes(digest[:8], "little") or 1


class BlockContents:
    """Notes in an array of `layout.BLOCK` what happens to the blocks of a pool.

    Block 0, vLLM's null block, is left out. It listens to the pool's own free queue and hash table. Nothing in here
    fails towards them: what goes wrong is kept as `failure`.
    """

    def __init__(self, pool: Any, blocks: np.ndarray) -> None:
        """Take down how the pool stands, and listen to it."""
        self.failure: Exception | None = None
        self.changed: set[int] | None = None  # since it was last emptied; None if any may have
        self._pool = pool
        self._content, self._reuse = blocks["content"], blocks["reuse"]
        queue = pool.free_block_queue
        self._listen(queue, "popleft", lambda block: self._held((block,)))
        self._listen(queue, "popleft_n", lambda some, _: self._held(some))
        self._listen(queue, "remove", lambda _, block: self._held((block,)))
        self._listen(queue, "append", lambda _, block: self._freed((block,)))
        self._listen(queue, "append_n", lambda _, some: self._freed(some))
        self._listen(queue, "prepend_n", lambda _, some: self._freed_first(some))
        self._reuse[:] = 0
        self._first, self._last = 0, 0  # the places in the order of reuse that were given last, at either end
        self._freed(queue.get_all_free_blocks())
        self._follow_table()

    def refresh(self) -> None:
        """Begin with a new hash table, if the pool has: so it forgets everything at once."""
        if self._pool.cached_block_hash_to_block is not self._table:
            self._follow_table()

    def _follow_table(self) -> None:
        self._table = table = self._pool.cached_block_hash_to_block
        self._listen(table, "insert", lambda _, key, block: self._filled(key, block.block_id))
        self._listen(table, "pop", lambda _, _key, block_id: self._emptied(block_id))
        self._content[:] = 0
        self.changed = None
        for block in self._pool.blocks[1:]:
            if block.block_hash is not None:
                self._filled(block.block_hash, block.block_id)

    def _listen(self, subject: Any, name: str, note: Callable[..., None]) -> None:
        """Have `note` be told of each call's answer and arguments; the answer itself stays as it is."""
        method = getattr(subject, name)

        def heard(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            try:
                note(answer, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - it is the export that ends, not the engine
                self.failure = self.failure or error
            return answer

        setattr(subject, name, heard)

    def taken(self) -> set[int] | None:
        """Give what has changed since this was last asked."""
        changed, self.changed = self.changed, set()
        return changed

    def _note(self, block_id: int) -> None:
        if self.changed is not None:
            self.changed.add(block_id - 1)

    def _held(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            self._reuse[block.block_id - 1] = 0
            self._note(block.block_id)

    def _freed(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            self._last += 1
            self._reuse[block.block_id - 1] = self._last
            self._note(block.block_id)

    def _freed_first(self, blocks: list[Any]) -> None:
        self._first -= len(blocks)
        for place, block in enumerate(blocks):
            self._reuse[block.block_id - 1] = self._first + place
            self._note(block.block_id)

    def _filled(self, key: bytes, block_id: int) -> None:
        if block_id:
            self._content[block_id - 1] = short_hash(key)
            self._note(block_id)

    def _emptied(self, block_id: int) -> None:
        if block_id:
            self._content[block_id - 1] = 0
            self._note(block_id)
