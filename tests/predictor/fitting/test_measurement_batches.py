"""Plans of measurement batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.config import EngineConfig
from predictor.fitting.measurement_batches import BatchLimits, doubled, extremes_first, mixed, of_leg, structured

ROOMS = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 300),
    max_num_batched_tokens=st.integers(16, 20_000),
    block_size=st.sampled_from([1, 16, 128]),
    num_gpu_blocks=st.integers(2, 5_000),
    max_model_len=st.integers(4, 40_000),
).map(BatchLimits.of)


@given(ROOMS)
@settings(max_examples=100, deadline=None)
def test_every_planned_batch_fits_without_preemptions(room: BatchLimits) -> None:
    """Each request has room for its response, and all of a batch fit together."""
    for batch in structured(room):
        assert room.holds(batch)
        assert all(item.prompt_tokens >= 1 and item.output_tokens >= 1 for item in batch.items)


@given(ROOMS, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_mixes_fit_too(room: BatchLimits, seed: int) -> None:
    """A mix can be drawn for any engine that fits a request of two tokens, and most mixes fit."""
    if room.longest_of(1) < 2:
        return
    generator = np.random.default_rng(seed)
    batches = [mixed(room, generator) for _ in range(20)]
    assert all(item.prompt_tokens >= 1 and item.output_tokens >= 1 for batch in batches for item in batch.items)
    assert all(room.holds(batch) for batch in batches)


def test_the_plan_contains_the_extremes() -> None:
    """One and all sequences decode, with the shortest and longest contexts, and some prompts exceed a step."""
    room = BatchLimits.of(
        EngineConfig(max_num_seqs=48, max_num_batched_tokens=512, num_gpu_blocks=1057, max_model_len=4096)
    )
    plan = structured(room)
    together = {(len(batch.streams), batch.streams[0][0].prompt_tokens) for batch in plan if batch.kind == "together"}
    numbers = {num for num, _ in together}
    assert {1, 2, 4, 8, 16, 32, 48} <= numbers
    for num in numbers:
        contexts = [context for other, context in together if other == num]
        assert min(contexts) == 8
        assert max(contexts) > 0.8 * room.longest_of(num)
    alone = {batch.streams[0][0].prompt_tokens for batch in plan if batch.kind == "alone"}
    assert min(alone) == 16
    assert 512 in alone
    assert max(alone) == 4 * 512


def test_a_plan_that_is_cut_short_covers_the_range() -> None:
    """Both ends come first, and every item comes once."""
    assert extremes_first([1, 2, 4, 8, 16, 32]) == [1, 32, 4, 2, 8, 16]
    assert extremes_first([3]) == [3]


@pytest.mark.parametrize(("least", "most", "counts"), [(1, 1, [1]), (1, 48, [1, 2, 4, 8, 16, 32, 48]), (5, 3, [5])])
def test_counts_double(least: int, most: int, counts: list[int]) -> None:
    """From the smallest to the largest, both included."""
    assert doubled(least, most) == counts


def test_plans_of_one_leg() -> None:
    """To prefill is to compute all prompts for one token; to decode, to compute none alone."""
    room = BatchLimits.of(EngineConfig(max_num_seqs=8, num_gpu_blocks=300))
    batches = [*structured(room), mixed(room, np.random.default_rng(1))]
    assert of_leg(batches, "serve") == batches
    prefilled = of_leg(batches, "prefill")
    assert {item.output_tokens for batch in prefilled for item in batch.items} == {1}
    assert [[item.prompt_tokens for item in batch.items] for batch in prefilled] == [
        [item.prompt_tokens for item in batch.items] for batch in batches
    ]
    assert {batch.kind for batch in batches} == {"alone", "together", "mixed"}
    assert {batch.kind for batch in of_leg(batches, "decode")} == {"together", "mixed"}
