"""Which instances have a prompt's beginning cached already, as far as a scheduler can tell."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import ROW_OF
from scheduler.instance_table import InstanceTable
from scheduler.prefix import PrefixIndex, text_blocks
from scheduler.prefix.text import BLOCK_BYTES
from services.http.openai_body import PROMPT_END_BYTES
from services.scheduler_server.instance_handle import USUAL_BLOCK_TOKENS
from services.scheduler_server.length_resolution import BYTES_PER_TOKEN
from services.scheduler_server.placement_request import PlacementRequest

USUAL_BLOCKS = 4096  # of a cache whose size nobody has told
MOST_NAMES = 128  # of one prompt; of a longer one, every second, fourth, ... block is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt by the names of its blocks, each of so many tokens and engine's blocks; none where nothing is known."""

    names: tuple[Hashable, ...] = ()
    block_tokens: float = USUAL_BLOCK_TOKENS
    num_blocks: float = 1.0


class PromptPrefixes:
    """Names prompts' blocks, by tokens where the caller has done so and else by text; remembers who got which."""

    def __init__(self, table: InstanceTable) -> None:
        """Follow the instances of a table."""
        self._table = table
        self._index = PrefixIndex()
        self._following: tuple[str, ...] = ()
        self._sizes = np.zeros(0)

    def of(self, wish: PlacementRequest) -> Prompt:
        """Name a request's blocks."""
        request = wish.request
        if request.prefix_hashes and request.prefix_block_tokens:
            names: tuple[Hashable, ...] = tuple(request.prefix_hashes)
            block_tokens: float = request.prefix_block_tokens
            num_blocks = 1.0  # they are the engine's own
        else:
            names, block_tokens = _text_blocks(wish)
            num_blocks = max(1.0, block_tokens / USUAL_BLOCK_TOKENS)
        step = 1
        while len(names) > MOST_NAMES * step:
            step *= 2
        return Prompt(names=names[step - 1 :: step], block_tokens=block_tokens * step, num_blocks=num_blocks * step)

    def look_up(self, prompt: Prompt, known: Candidates) -> None:
        """Add to candidates how much of a prompt they hold, and to the request to which class it belongs."""
        self._follow()
        hits = self._index.look_up(prompt.names, known.instance_ids)
        known.add({"prefix_hit_tokens": hits.num_blocks * prompt.block_tokens})
        known.facts = replace(known.facts, prefix_class=hits.deepest)

    def sent(self, instance_id: str, prompt: Prompt) -> None:
        """Note where a prompt goes."""
        if prompt.names and instance_id in self._table.place_of:
            self._follow()
            self._index.sent(instance_id, prompt.names, prompt.num_blocks)

    def _follow(self) -> None:
        """Take instances' sizes over when instances have come or gone, or told theirs."""
        known = self._table.known
        sizes = known.told[ROW_OF["num_total_blocks"]]
        if known.instance_ids is self._following and np.array_equal(sizes, self._sizes, equal_nan=True):
            return
        self._index.follow(
            {
                name: int(number) if number == number else USUAL_BLOCKS  # noqa: PLR0124 - NaN: not told
                for name, number in zip(known.instance_ids, sizes.tolist(), strict=True)
            }
        )
        self._following, self._sizes = known.instance_ids, sizes.copy()


def _text_blocks(wish: PlacementRequest) -> tuple[tuple[Hashable, ...], float]:
    """Name blocks of a prompt's text, and tell how many tokens each has; of a long prompt only the head is whole."""
    text = wish.prompt
    if len(text) < 2 * PROMPT_END_BYTES:
        return text_blocks(text), wish.request.prompt_tokens * min(1.0, BLOCK_BYTES / max(1, len(text)))
    return text_blocks(text[:PROMPT_END_BYTES]), BLOCK_BYTES / BYTES_PER_TOKEN
