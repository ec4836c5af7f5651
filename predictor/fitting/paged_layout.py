"""Places the pages of a batch's sequences at random in a pool, as in an engine that has run for a while."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.fitting.kernel_plan import AttentionBatch

Counts = NDArray[np.int32]

CACHE_BYTES = 2**28  # larger than any cache of a device: memory is read as with many layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """The arguments of paged kernels for a batch."""

    first_queries: Counts  # the start of each sequence's new tokens, and the end of the last one's
    first_keys: Counts  # the same for all tokens, as if they were contiguous
    num_keys: Counts  # tokens of each sequence
    most_queries: int
    most_keys: int
    tables: list[Counts]  # each has a row of pages per sequence; no two tables share a page


def pool_size(largest: int, bytes_each: int, num_layers: int) -> int:
    """Return a size that fits the largest batch, and for smaller batches exceeds every cache, as all layers would."""
    return min(max(largest, -(-CACHE_BYTES // bytes_each)), num_layers * largest)


def num_pages(batch: AttentionBatch, page_tokens: int) -> int:
    """Return the number of pages of a batch's sequences."""
    return sum(-(-length // page_tokens) for _, length in batch.lengths)


def paged_layout(
    batch: AttentionBatch, *, page_tokens: int, pool_pages: int, most_tables: int, generator: np.random.Generator
) -> PagedLayout:
    """Assign pages to as many tables as the pool allows: used in turn, they find no page in the GPU's cache."""
    queries, keys = np.array(batch.lengths, dtype=np.int32).T
    pages = -(-keys // page_tokens)
    needed = int(pages.sum())
    assert needed <= pool_pages, (needed, pool_pages)
    num_tables = max(1, min(most_tables, pool_pages // needed))
    shuffled = generator.permutation(pool_pages)[: num_tables * needed].reshape(num_tables, needed)
    ends = np.cumsum(pages)
    tables = []
    for mine in shuffled:
        table = np.zeros((len(keys), int(pages.max())), dtype=np.int32)  # unused entries are not read
        for row, end, count in zip(table, ends, pages, strict=True):
            row[:count] = mine[end - count : end]
        tables.append(table)
    return PagedLayout(
        first_queries=np.concatenate(([0], np.cumsum(queries))).astype(np.int32),
        first_keys=np.concatenate(([0], np.cumsum(keys))).astype(np.int32),
        num_keys=keys.astype(np.int32),
        most_queries=int(queries.max()),
        most_keys=int(keys.max()),
        tables=tables,
    )
