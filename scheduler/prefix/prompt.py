"""Which instances are likely to have a prompt's beginning cached, from where earlier prompts were sent."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from predictor.kv_events.stream import COMPLETE, UNSURE, KvEventStream
from scheduler.candidates import Candidates
from scheduler.indicators import INDEX_OF
from scheduler.instance_table import InstanceTable
from scheduler.prefix.index import PrefixIndex
from scheduler.prefix.text import BLOCK_BYTES, text_blocks

DEFAULT_BLOCK_TOKENS = 16
DEFAULT_CACHE_BLOCKS = 4096  # of an instance that has not reported its size
MAX_NAMES = 128  # of one prompt; of a longer one every second, fourth, ... block is kept
PROMPT_END_BYTES = 64 * 1024  # of a longer prompt, schedulers and taggers get head and tail
BYTES_PER_TOKEN = 4  # of English text, about


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlocks:
    """A prompt as the names of its blocks, each of `block_tokens` tokens and `num_blocks` KV blocks.

    Where they are named `by_tokens`, the names are those of engines' KV blocks.
    """

    names: Sequence[Hashable] = ()
    block_tokens: float = DEFAULT_BLOCK_TOKENS
    num_blocks: float = 1.0
    by_tokens: bool = False

    def __post_init__(self) -> None:
        """Keep few enough names; each stands for all content up to the end of its block."""
        step = 1
        while len(self.names) > MAX_NAMES * step:
            step *= 2
        if step > 1:
            object.__setattr__(self, "names", self.names[step - 1 :: step])
            object.__setattr__(self, "block_tokens", self.block_tokens * step)
            object.__setattr__(self, "num_blocks", self.num_blocks * step)


NO_BLOCKS = PromptBlocks()


def blocks_of_text(text: bytes, prompt_tokens: int, adapter: str = "") -> PromptBlocks:
    """Name a prompt's blocks by its text and its LoRA adapter; of a long prompt only the head is complete."""
    if len(text) < 2 * PROMPT_END_BYTES:
        names, block_tokens = (
            text_blocks(text, adapter=adapter),
            prompt_tokens * min(1.0, BLOCK_BYTES / max(1, len(text))),
        )
    else:
        names, block_tokens = text_blocks(text[:PROMPT_END_BYTES], adapter=adapter), BLOCK_BYTES / BYTES_PER_TOKEN
    return PromptBlocks(
        names=names, block_tokens=block_tokens, num_blocks=max(1.0, block_tokens / DEFAULT_BLOCK_TOKENS)
    )


class PromptPrefixes:
    """Looks prompts up in the prefix cache index, and records which instance each was sent to.

    Where the KV events of an instance are followed, they say what it has cached.
    """

    def __init__(self, table: InstanceTable, sizes: Mapping[str, int] | None = None) -> None:
        """Follow the instances of a table; their cache sizes in blocks are as given, or else as reported."""
        self._table = table
        self._index = PrefixIndex(sizes)
        self._fixed_sizes = sizes is not None
        self._following: tuple[str, ...] = ()
        self._sizes = np.zeros(0)
        self._streams: Mapping[str, KvEventStream] = {}

    def follow_events(self, streams: Mapping[str, KvEventStream]) -> None:
        """Use the KV events of these instances, as long as they are known."""
        self._streams = streams

    def look_up(self, prompt: PromptBlocks, known: Candidates) -> None:
        """Add to candidates how much of a prompt they hold, and to the request which class it belongs to."""
        if not self._fixed_sizes:
            self._follow()
        hits = self._index.look_up(prompt.names, known.instance_ids)
        known.columns["prefix_hit_tokens"] = hits.num_blocks * prompt.block_tokens
        if self._streams and prompt.by_tokens:
            self._add_known(prompt, known)
        known.request.prefix_class = hits.deepest

    def _add_known(self, prompt: PromptBlocks, known: Candidates) -> None:
        """Replace estimates by what KV events say: all that is cached, or a part of it, which is a lower bound."""
        column = known.columns["prefix_hit_tokens"]
        for row, instance_id in enumerate(known.instance_ids):
            stream = self._streams.get(instance_id)
            if stream is None or stream.certainty == UNSURE:
                continue
            index = stream.index
            if index.block_size and index.block_size * prompt.num_blocks != prompt.block_tokens:
                continue  # the prompt's blocks are not the engine's
            num_tokens = (
                index.hits([index.short_name(cast("bytes", name)) for name in prompt.names]) * prompt.block_tokens
            )
            column[row] = num_tokens if stream.certainty == COMPLETE else max(num_tokens, column[row])

    def sent(self, instance_id: str, prompt: PromptBlocks) -> None:
        """Record that a prompt goes to an instance."""
        if prompt.names and instance_id in self._table.row_of:
            if not self._fixed_sizes:
                self._follow()
            self._index.sent(instance_id, prompt.names, prompt.num_blocks)

    def _follow(self) -> None:
        """Update the index when instances came, went, or reported another size."""
        known = self._table.known
        sizes = known.reported[INDEX_OF["num_total_blocks"]]
        if known.instance_ids is self._following and np.array_equal(sizes, self._sizes, equal_nan=True):
            return
        self._index.follow(
            {
                name: int(size) if size == size else DEFAULT_CACHE_BLOCKS  # noqa: PLR0124 - NaN: not reported
                for name, size in zip(known.instance_ids, sizes.tolist(), strict=True)
            }
        )
        self._following, self._sizes = known.instance_ids, sizes.copy()
