"""The compiled step time equals the formula, and has the properties that fast-forward needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.profile import load_profile
from predictor.step_time import Curve, StepTime, decode_slope, step_seconds, tabulate

MAX_TOKENS, MAX_SEQUENCES = 4096, 256
STEP_TIME = load_profile("llama-3.1-8b-rtxpro6000").step_time
COSTS = tabulate(STEP_TIME, MAX_TOKENS, MAX_SEQUENCES)


def at(curve: Curve, count: float) -> float:
    """Return a curve's value by the definition, up to its last knot."""
    assert count <= curve.x[-1]
    return float(np.interp(count, curve.x, curve.y))


def written_out(chunks: list[tuple[int, int]], contexts: list[int]) -> float:
    """Return the step time of prefill chunks (new tokens, context before) and decode contexts, term by term."""
    t, n = STEP_TIME, len(contexts)
    new = sum(tokens for tokens, _ in chunks)
    total = t.constant_s + at(t.by_tokens, new + n) + t.token_s * (new + n)
    total += at(t.by_sequences, len(chunks) + n)
    if not chunks:
        longest = at(t.decode_longest, min(n, t.decode_longest.x[-1])) * max(contexts)
        return total + at(t.decode_base, n) + at(t.decode_slope, n) * sum(contexts) + longest
    squares = sum(tokens**2 for tokens, _ in chunks)
    products = sum(tokens * before for tokens, before in chunks)
    total += t.prefill_s + t.prefill_token_s * new + t.prefill_qq_s * squares + t.prefill_qkv_s * products
    total += t.prefill_kv_s * len(chunks) * products / new
    if n:
        m = min(n, 128)
        total += at(t.mixed_base, m) + at(t.mixed_slope, m) * sum(contexts) + at(t.mixed_longest, m) * max(contexts)
        total += t.mixed_grid_s * n * squares / new
    return total


def compiled(chunks: list[tuple[int, int]], contexts: list[int]) -> float:
    """Return the same from the compiled function."""
    return float(
        step_seconds(
            COSTS,
            sum(tokens for tokens, _ in chunks) + len(contexts),
            len(chunks) + len(contexts),
            len(contexts),
            float(sum(contexts)),
            len(chunks),
            float(sum(tokens**2 for tokens, _ in chunks)),
            float(sum(tokens * before for tokens, before in chunks)),
            float(max(contexts, default=0)),
        )
    )


chunk_lists = st.lists(st.tuples(st.integers(1, 512), st.integers(0, 9000)), max_size=4)
context_lists = st.lists(st.integers(1, 9000), max_size=128)


@given(chunks=chunk_lists, contexts=context_lists)
@settings(max_examples=300, deadline=None)
def test_equals_the_formula(chunks: list[tuple[int, int]], contexts: list[int]) -> None:
    """For any batch the compiled function equals the formula."""
    if chunks or contexts:
        assert compiled(chunks, contexts) == pytest.approx(written_out(chunks, contexts), rel=1e-12)


@given(
    decodes=st.integers(1, MAX_SEQUENCES),
    context=st.integers(1, 10**6),
    growth=st.integers(1, 10**6),
    prefill=st.integers(0, 2000),
    longest=st.integers(0, 10**4),
)
@settings(max_examples=300, deadline=None)
def test_affine_in_the_context(decodes: int, context: int, growth: int, prefill: int, longest: int) -> None:
    """Otherwise equal, twice the growth in context adds twice as much."""

    def seconds(context: int) -> float:
        prefills = 1 if prefill else 0
        qq = float(prefill**2)
        tokens = decodes + prefill
        return float(
            step_seconds(COSTS, tokens, decodes + prefills, decodes, float(context), prefills, qq, 0.0, float(longest))
        )

    once = seconds(context + growth) - seconds(context)
    twice = seconds(context + 2 * growth) - seconds(context)
    assert twice == pytest.approx(2 * once, rel=1e-6, abs=1e-12)


@given(contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=128), repeats=st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_repeated_decode_steps_are_an_arithmetic_series(contexts: list[int], repeats: int) -> None:
    """The sum over steps in which every context grows by one follows from the first step and the slope."""
    n = len(contexts)
    one_by_one = sum(compiled([], [context + step for context in contexts]) for step in range(repeats))
    slope = decode_slope(COSTS, n)
    at_once = repeats * (compiled([], contexts) + slope * n * (repeats - 1) / 2)
    assert at_once == pytest.approx(one_by_one, rel=1e-9)


def test_slope_holds_without_the_longest_too() -> None:
    """Where only the sum of contexts is known, the slope is that of the sum."""
    for n in (1, 20, 50, 120, 256):
        more = step_seconds(COSTS, n, n, n, 1000.0 * n + n, 0, 0.0, 0.0)
        less = step_seconds(COSTS, n, n, n, 1000.0 * n, 0, 0.0, 0.0)
        assert more - less == pytest.approx(n * decode_slope(COSTS, n), rel=1e-6)


def test_unknown_longest_is_the_mean() -> None:
    """Without the longest context, decodes count as equal."""
    assert step_seconds(COSTS, 50, 50, 50, 50_000.0, 0, 0.0, 0.0) == compiled([], [1000] * 50)
    equal = step_seconds(COSTS, 150, 51, 50, 50_000.0, 1, 10_000.0, 0.0)
    assert equal == compiled([(100, 0)], [1000] * 50)


def test_an_empty_batch_costs_empty_s() -> None:
    """A step without tokens takes `empty_s`, which is 0 for fitted profiles."""
    assert step_seconds(COSTS, 0, 0, 0, 0.0, 0, 0.0, 0.0) == 0.0
    costs = tabulate(StepTime(constant_s=2.0, empty_s=0.5), 8, 8)
    assert step_seconds(costs, 0, 0, 0, 0.0, 0, 0.0, 0.0) == 0.5
    assert step_seconds(costs, 1, 1, 1, 1.0, 0, 0.0, 0.0) == 2.0


def test_decodes_beside_prefill_use_the_other_kernel() -> None:
    """The curves of mixed batches apply only to them."""
    step_time = StepTime(decode_base=Curve(y=(1.0,)), mixed_base=Curve(y=(10.0,)), prefill_s=100.0)
    costs = tabulate(step_time, 64, 8)
    assert step_seconds(costs, 2, 2, 2, 10.0, 0, 0.0, 0.0) == 1.0
    assert step_seconds(costs, 5, 1, 0, 0.0, 1, 25.0, 0.0) == 100.0
    assert step_seconds(costs, 7, 3, 2, 10.0, 1, 25.0, 0.0) == 110.0


def test_tables_have_an_entry_for_every_count() -> None:
    """Tables cover zero to the engine's limits, as contiguous floats for the compiled loop."""
    costs = tabulate(STEP_TIME, 100, 10)
    assert len(costs.by_tokens) == 101
    for table in costs[2:]:
        assert len(table) == 11
    for table in costs:
        assert table.dtype == np.float64
        assert table.flags["C_CONTIGUOUS"]
        assert np.all(np.isfinite(table))
        assert np.all(table >= 0)


def test_a_curve_is_constant_before_and_linear_beyond() -> None:
    """Before its first knot a curve is constant; beyond its last it is extrapolated, unless it decreases."""
    assert Curve(x=(2.0, 4.0), y=(1.0, 3.0)).table(6).tolist() == [1, 1, 1, 2, 3, 4, 5]
    assert Curve(x=(2.0, 4.0), y=(3.0, 1.0)).table(6).tolist() == [3, 3, 3, 2, 1, 1, 1]
    assert Curve(x=(3.0,), y=(7.0,)).table(4).tolist() == [7, 7, 7, 7, 7]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
def test_coefficients_must_be_times(value: float) -> None:
    """A coefficient that is no time is refused, and the error names it."""
    with pytest.raises(ValueError, match=r"^prefill_qq_s: "):
        StepTime(prefill_qq_s=value)
    with pytest.raises(ValueError, match=r"^y: "):
        Curve(y=(value,))
