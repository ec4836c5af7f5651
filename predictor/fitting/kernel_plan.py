"""Plans which kernels are timed at which sizes; randomness comes from a generator that is passed in.

Each list starts with the cheapest sizes: the expensive ones are left out where the time budget ends, and their cost is
predicted from the sizes before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from predictor.config import require_count
from predictor.fitting.measurement_batches import doubled

SHORTEST = 16  # tokens of a context or prefill chunk: one block
GROWTH = 4  # the factor from one context length to the next
NUM_MIXES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The largest batches that the profile has to predict."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens of one sequence
    kv_tokens: int  # of all sequences

    def __post_init__(self) -> None:
        """Refuse limits that no engine can run with."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_tokens"):
            require_count(name, getattr(self, name))
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len: must be at least 2, for a prompt and a token, not {self.max_model_len}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """A prefill chunk with the context before it, and decodes with contexts of equal length; either can be missing."""

    chunk: int = 0
    before: int = 0
    num_decodes: int = 0
    context: int = 0  # of each decode, the new token included

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step computes."""
        return self.chunk + self.num_decodes

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The new tokens and all tokens of each sequence: the decodes, then the chunk."""
        decodes = [(1, self.context)] * self.num_decodes
        return [*decodes, (self.chunk, self.before + self.chunk)] if self.chunk else decodes

    @property
    def kv_tokens(self) -> int:
        """The number of tokens whose keys and values are read."""
        return sum(length for _, length in self.lengths)

    @property
    def work(self) -> float:
        """An upper bound of what its time grows with: pairs of a query and a key, and a constant per sequence."""
        return SHORTEST + self.num_decodes * self.context + self.chunk * (self.before + self.chunk / 2)


def token_counts(reach: Reach) -> list[int]:
    """Return the counts of tokens at which dense kernels are timed: powers of two, then those between."""
    coarse = doubled(1, max(reach.max_num_batched_tokens, reach.max_num_seqs))
    between = [(low + high) // 2 for low, high in pairwise(coarse)]
    return [*coarse, *(count for count in between if count not in coarse)]


def sequence_counts(reach: Reach) -> list[int]:
    """Return the counts of sequences at which the head is timed."""
    return doubled(1, reach.max_num_seqs)


def decodes(reach: Reach) -> list[AttentionBatch]:
    """Return batches of decodes: their number doubles and their context quadruples, within the memory."""
    batches = [
        AttentionBatch(num_decodes=num, context=context)
        for num in doubled(1, reach.max_num_seqs)
        for context in _lengths(min(reach.max_model_len, reach.kv_tokens // num))
    ]
    return sorted(batches, key=lambda batch: (batch.work, batch.num_decodes))


def chunks(reach: Reach) -> list[AttentionBatch]:
    """Return single prefill chunks: from the first one of a prompt to the last one of the longest prompt."""
    longest = min(reach.max_model_len, reach.kv_tokens)
    batches = [
        AttentionBatch(chunk=chunk, before=before)
        for chunk in _lengths(min(reach.max_num_batched_tokens, longest), growth=2)
        for before in (0, *_lengths(longest - chunk))
    ]
    return sorted(batches, key=lambda batch: (batch.work, batch.chunk))


def mixes(
    alone: Iterable[AttentionBatch], together: Iterable[AttentionBatch], reach: Reach, generator: np.random.Generator
) -> list[AttentionBatch]:
    """Draw steps of a chunk beside decodes, from the chunks and decodes that are timed separately."""
    pairs = [
        replace(chunk, num_decodes=batch.num_decodes, context=batch.context)
        for chunk in alone
        for batch in together
        if chunk.num_tokens + batch.num_tokens <= reach.max_num_batched_tokens
        and batch.num_decodes < reach.max_num_seqs
        and chunk.kv_tokens + batch.kv_tokens <= reach.kv_tokens
    ]
    drawn = generator.permutation(len(pairs))[:NUM_MIXES]
    return sorted((pairs[index] for index in drawn), key=lambda batch: batch.work)


def parts_of(mixed: AttentionBatch) -> tuple[AttentionBatch, AttentionBatch]:
    """Return the chunk alone, and the decodes alone."""
    return replace(mixed, num_decodes=0, context=0), replace(mixed, chunk=0, before=0)


def _lengths(longest: int, *, growth: int = GROWTH) -> Sequence[int]:
    """Return lengths from the shortest to the longest."""
    if longest < 1:
        return ()
    lengths = [min(SHORTEST, longest)]
    while lengths[-1] * growth < longest:
        lengths.append(lengths[-1] * growth)
    return lengths if lengths[-1] == longest else [*lengths, longest]
