"""Plans of kernel timings, and the layout of their pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.fitting.kernel_plan import (
    NUM_MIXES,
    AttentionBatch,
    Reach,
    chunks,
    decodes,
    mixes,
    parts_of,
    sequence_counts,
    token_counts,
)
from predictor.fitting.paged_layout import num_pages, paged_layout

REACHES = st.builds(
    Reach,
    max_num_seqs=st.integers(1, 1024),
    max_num_batched_tokens=st.integers(1, 20_000),
    max_model_len=st.integers(2, 40_000),
    kv_tokens=st.integers(1, 500_000),
)
BATCHES = st.builds(
    AttentionBatch,
    chunk=st.integers(1, 2000),
    before=st.integers(0, 3000),
    num_decodes=st.integers(0, 40),
    context=st.integers(1, 3000),
)


@given(REACHES)
@settings(max_examples=150, deadline=None)
def test_the_engine_can_run_every_planned_batch(reach: Reach) -> None:
    """No sequence, memory or step limit is exceeded."""
    for batch in [*decodes(reach), *chunks(reach)]:
        assert batch.num_tokens >= 1
        assert batch.kv_tokens <= reach.kv_tokens
        assert all(1 <= new <= length <= reach.max_model_len for new, length in batch.lengths)
        assert batch.num_decodes <= reach.max_num_seqs
        assert batch.chunk <= reach.max_num_batched_tokens


@given(REACHES)
@settings(max_examples=150, deadline=None)
def test_plans_reach_the_extremes_cheapest_first_without_duplicates(reach: Reach) -> None:
    """They contain the smallest and largest counts of tokens and sequences, and the shortest and longest contexts."""
    for plan in (token_counts(reach), sequence_counts(reach), decodes(reach), chunks(reach)):
        assert len(set(plan)) == len(plan)
    assert token_counts(reach)[0] == 1
    assert max(token_counts(reach)) == max(reach.max_num_batched_tokens, reach.max_num_seqs)
    together = decodes(reach)
    assert [batch.work for batch in together] == sorted(batch.work for batch in together)
    longest = min(reach.max_model_len, reach.kv_tokens)
    assert max(batch.context for batch in together) == longest
    assert max(batch.before + batch.chunk for batch in chunks(reach)) == longest
    if reach.kv_tokens >= reach.max_num_seqs:
        assert max(batch.num_decodes for batch in together) == reach.max_num_seqs


@given(REACHES, st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_mixes_combine_batches_that_are_timed_separately(reach: Reach, seed: int) -> None:
    """A chunk and decodes that fit into one step and into memory together; the same seed draws the same."""
    alone, together = chunks(reach), decodes(reach)
    mixed = mixes(alone, together, reach, np.random.default_rng(seed))
    assert mixed == mixes(alone, together, reach, np.random.default_rng(seed))
    assert len(mixed) <= NUM_MIXES
    for batch in mixed:
        chunk, rest = parts_of(batch)
        assert chunk in alone
        assert rest in together
        assert batch.num_tokens <= reach.max_num_batched_tokens
        assert batch.kv_tokens <= reach.kv_tokens
        assert len(batch.lengths) <= reach.max_num_seqs


@given(BATCHES, st.integers(1, 512), st.integers(1, 8), st.floats(1.0, 5.0), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_each_sequence_has_pages_of_its_own(
    batch: AttentionBatch, page_tokens: int, most_tables: int, spare: float, seed: int
) -> None:
    """They hold exactly its tokens, and no other sequence of any table has one of them."""
    pool_pages = int(spare * num_pages(batch, page_tokens))
    layout = paged_layout(
        batch,
        page_tokens=page_tokens,
        pool_pages=pool_pages,
        most_tables=most_tables,
        generator=np.random.default_rng(seed),
    )
    owned = [
        page
        for table in layout.tables
        for row, (_, length) in zip(table, batch.lengths, strict=True)
        for page in row[: -(-length // page_tokens)]
    ]
    assert len(owned) == len(set(owned)) == len(layout.tables) * num_pages(batch, page_tokens)
    assert 0 <= min(owned) <= max(owned) < pool_pages
    assert 1 <= len(layout.tables) <= most_tables
    assert np.diff(layout.first_queries).tolist() == [new for new, _ in batch.lengths]
    assert np.diff(layout.first_keys).tolist() == layout.num_keys.tolist() == [length for _, length in batch.lengths]
    assert (layout.most_queries, layout.most_keys) == tuple(np.max(batch.lengths, axis=0))
    assert layout.first_queries[0] == layout.first_keys[0] == 0


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_tokens"])
def test_impossible_limits_are_refused(field: str) -> None:
    """The error names the field."""
    sound = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "kv_tokens": 1024}
    with pytest.raises(ValueError, match=field):
        Reach(**{**sound, field: 0})
