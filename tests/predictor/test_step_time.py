"""The compiled step time equals the formula, and has the properties that fast-forward needs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.profile import load_profile
from predictor.step_time import NO_GRID, UNLIMITED, Curve, Grid, StepTime, least_prefill_per_pair, region_of
from predictor.tabulated_costs import (
    ALONE,
    BESIDE,
    Costs,
    context_line,
    count_measured,
    decode_slope,
    is_measured,
    mean_context_seconds,
    step_seconds,
    steps_in_line,
    tabulate,
)

MAX_TOKENS, MAX_SEQUENCES = 4096, 256
# One with coefficients and one with grids.
LINEAR = StepTime(
    constant_s=8e-4,
    token_s=3e-7,
    prefill_s=4e-3,
    prefill_token_s=1e-7,
    prefill_qq_s=4e-10,
    prefill_qkv_s=9e-10,
    prefill_kv_s=5e-8,
    mixed_grid_s=3e-8,
    by_tokens=Curve(x=(1.0, 128.0, 129.0, 4096.0), y=(9e-3, 1e-2, 1.2e-2, 0.15)),
    by_sequences=Curve(x=(1.0, 256.0), y=(7e-4, 1e-3)),
    decode_base=Curve(x=(1.0, 64.0, 256.0), y=(1e-4, 5e-4, 1e-3)),
    decode_slope=Curve(x=(1.0, 64.0, 256.0), y=(2e-7, 1e-7, 9e-8)),
    decode_longest=Curve(x=(37.0, 38.0, 94.0, 256.0), y=(0.0, 4e-7, 0.0, 0.0)),
    mixed_base=Curve(x=(1.0, 128.0, 256.0), y=(1e-4, 9e-4, 2e-3)),
    mixed_slope=Curve(x=(1.0, 256.0), y=(3e-7, 2e-7)),
    mixed_longest=Curve(x=(64.0, 128.0, 256.0), y=(2e-7, 1e-7, 1e-7)),
)
GRIDS = load_profile("llama-3.1-8b-rtxpro6000").step_time
TABULATED = [(one, tabulate(one, MAX_TOKENS, MAX_SEQUENCES)) for one in (LINEAR, GRIDS)]
COSTS = tabulate(GRIDS, MAX_TOKENS, MAX_SEQUENCES)


def at(curve: Curve, count: float) -> float:
    """Return a curve's value by the definition: linear between knots, and beyond the last ones."""
    return line_through(curve.x, curve.y, count)


def line_through(x: tuple[float, ...], y: tuple[float, ...], count: float, *, before: bool = False) -> float:
    """Return the value of straight lines; a first slope goes on before the first knot, if `before`."""
    points = list(zip(x, y, strict=True))
    if len(points) == 1 or (count <= points[0][0] and not before):
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if count <= right:
            return low + (high - low) * (count - left) / (right - left)
    (left, low), (right, high) = points[-2:]
    slope = (high - low) / (right - left)
    return high + (slope if before else max(0.0, slope)) * (count - right)


def grid_at(grid: Grid, x: float, y: float) -> float:
    """Return a grid's value by the definition."""
    return line_through(grid.x, tuple(line_through(grid.y, row, y) for row in grid.z), x)


def decodes_s(t: StepTime, kind: str, n: int, mean: float, longest: float) -> float:
    """Return the attention of decodes, term by term."""
    base, slope, long, grid, wait = (
        getattr(t, f"{kind}_{name}") for name in ("base", "slope", "longest", "attention", "wait")
    )
    of_mean, of_longest = grid_at(grid, n, mean), grid_at(grid, n, longest)
    known = of_mean + at(wait, n) * (of_longest - of_mean)
    return at(base, n) + at(slope, n) * n * mean + at(long, n) * longest + known


def written_out(t: StepTime, chunks: list[tuple[int, int]], contexts: list[int]) -> float:
    """Return the step time of prefill chunks (new tokens, context before) and decode contexts, term by term."""
    n, new = len(contexts), sum(tokens for tokens, _ in chunks)
    total = t.constant_s + at(t.by_tokens, new + n) + t.token_s * (new + n)
    total += at(t.by_sequences, len(chunks) + n)
    mean, longest = (sum(contexts) / n, max(contexts)) if n else (0.0, 0)
    if not chunks:
        return total + decodes_s(t, "decode", n, mean, longest)
    squares = sum(tokens**2 for tokens, _ in chunks)
    products = sum(tokens * before for tokens, before in chunks)
    total += t.prefill_s + t.prefill_token_s * new + t.prefill_qq_s * squares + t.prefill_qkv_s * products
    total += t.prefill_kv_s * len(chunks) * products / new
    grid, hidden = t.prefill_attention, 0.0
    if grid != NO_GRID:
        before = (products + squares / 2) / new - new / 2  # of one chunk with as many tokens and pairs of token and key
        columns = tuple(line_through(grid.y, row, before, before=True) for row in grid.z)
        least = min(min(row) for row in grid.z)
        hidden = max(least, line_through(grid.x, columns, max(new, grid.x[0]), before=True)) - least
        total += hidden + least
    if n:
        beside = decodes_s(t, "mixed", n, mean, longest)
        total += beside + t.mixed_grid_s * n * squares / new
        if grid != NO_GRID:
            knots = tuple(min(1.0, grid_at(t.mixed_overlap, n, chunk)) for chunk in grid.x)
            total -= min(hidden, beside) * line_through(grid.x, knots, min(new, grid.x[-1]))
    return total


def compiled(costs: Costs, chunks: list[tuple[int, int]], contexts: list[int]) -> float:
    """Return the same from the compiled function."""
    return float(
        step_seconds(
            costs,
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


chunk_lists = st.lists(st.tuples(st.integers(1, 900), st.integers(0, 20_000)), max_size=4)
context_lists = st.lists(st.integers(1, 20_000), max_size=200)


@given(chunks=chunk_lists, contexts=context_lists)
@settings(max_examples=200, deadline=None)
def test_equals_the_formula(chunks: list[tuple[int, int]], contexts: list[int]) -> None:
    """For any batch the compiled function equals the formula, which is written out in plain Python."""
    if chunks or contexts:
        for step_time, costs in TABULATED:
            assert compiled(costs, chunks, contexts) == pytest.approx(
                written_out(step_time, chunks, contexts), rel=1e-9
            )


@given(
    contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=128),
    extra=st.integers(0, 12_000),
    repeats=st.integers(1, 20_000),
)
@settings(max_examples=100, deadline=None)
def test_repeated_decode_steps_are_an_arithmetic_series(contexts: list[int], extra: int, repeats: int) -> None:
    """Up to where the slope changes, the sum over steps in which every context grows follows from the first."""
    n = len(contexts)
    contexts = [*contexts[:-1], contexts[-1] + extra]
    for _, costs in TABULATED:
        sums = float(sum(contexts)), float(max(contexts))
        count = min(repeats, int(steps_in_line(costs, n, *sums)))
        last = compiled(costs, [], [context + count - 1 for context in contexts])
        slope = decode_slope(costs, n, *sums)
        first = compiled(costs, [], contexts)
        assert first + slope * n * (count - 1) == pytest.approx(last, rel=1e-9)
        middle = (count - 1) // 2
        between = compiled(costs, [], [context + middle for context in contexts])
        assert first + slope * n * middle == pytest.approx(between, rel=1e-9)


def test_the_slope_changes_at_the_knots() -> None:
    """A line ends where the mean or the longest context crosses the next knot, not earlier."""
    knots = GRIDS.knots
    for n in (1, 50, 120):
        for left, right in pairwise(knots[1:]):
            assert steps_in_line(COSTS, n, n * left, left) == int(right - left) + 1
    waits = 50  # of these, the longest counts as well
    assert steps_in_line(COSTS, waits, waits * (knots[2] + 1), knots[5] - 3) == 4
    assert steps_in_line(TABULATED[0][1], 8, 8e3, 1e3) > 1 << 39


def test_slope_holds_without_the_longest_too() -> None:
    """Where only the sum of contexts is known, the slope is that of the sum."""
    for n in (1, 20, 50, 120, 256):
        for _, costs in TABULATED:
            more = step_seconds(costs, n, n, n, 1001.0 * n, 0, 0.0, 0.0)
            less = step_seconds(costs, n, n, n, 1000.0 * n, 0, 0.0, 0.0)
            assert more - less == pytest.approx(n * decode_slope(costs, n, 1000.0 * n, 1000.0), rel=1e-6)


def test_unknown_longest_is_the_mean() -> None:
    """Without the longest context, decodes count as equal."""
    assert step_seconds(COSTS, 50, 50, 50, 50_000.0, 0, 0.0, 0.0) == compiled(COSTS, [], [1000] * 50)
    equal = step_seconds(COSTS, 150, 51, 50, 50_000.0, 1, 10_000.0, 0.0)
    assert equal == compiled(COSTS, [(100, 0)], [1000] * 50)


def test_several_chunks_cost_as_much_as_one_with_the_same_pairs() -> None:
    """Two halves of a prompt in one step are no more work than the whole, and the second half costs more."""
    whole = compiled(COSTS, [(1024, 0)], [])
    halves = compiled(COSTS, [(512, 0), (512, 512)], [])
    assert halves - COSTS.by_count[2, 0] == pytest.approx(whole - COSTS.by_count[1, 0], rel=1e-12)
    assert compiled(COSTS, [(512, 0), (512, 0)], []) < halves


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
    costs = tabulate(GRIDS, 100, 10)
    assert len(costs.by_tokens) == 101
    assert len(costs.by_count) == 11
    for table in costs:
        assert table.dtype == np.float64
        assert table.flags.c_contiguous


def test_batches_outside_of_what_was_measured() -> None:
    """A batch is outside when its tokens, its sequences, all its context or one of its contexts is."""
    costs = tabulate(replace(LINEAR, limits=(100, 8, 5000, 2000)), 200, 16)
    assert is_measured(costs, 100, 8, 5000.0, 2000.0)
    for outside in (
        (101, 8, 5000.0, 2000.0),
        (100, 9, 5000.0, 2000.0),
        (100, 8, 5001.0, 2000.0),
        (100, 8, 5000.0, 2001.0),
    ):
        assert not is_measured(costs, *outside)
    assert [
        count_measured(costs, 8, context, longest, 30) for context, longest in ((4900.0, 100.0), (100.0, 1995.0))
    ] == [12, 5]
    assert [count_measured(costs, n, 100.0, 100.0, 30) for n in (8, 9)] == [30, 0]
    assert LINEAR.limits == UNLIMITED
    assert is_measured(TABULATED[0][1], MAX_TOKENS, MAX_SEQUENCES, 1e9, 1e9)


def test_regions() -> None:
    """Batches are decodes, chunks that are most of the tokens, or both."""
    assert [region_of(*batch) for batch in ((8, 8, 0), (16, 8, 1), (71, 8, 1), (72, 8, 1), (9, 0, 2))] == [
        0,
        1,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize("first", [ALONE, BESIDE])
def test_lines_under_attention(first: int) -> None:
    """The line under attention touches it, and is never above; without grids it is attention itself."""
    contexts = (0.0, 100.0, 900.0, 5000.0, 40_000.0)
    counts = np.arange(MAX_SEQUENCES + 1)
    for step_time, costs in TABULATED:
        start, slope = context_line(costs, first)
        for context in contexts:
            line, real = start + slope * counts * context, mean_context_seconds(costs, context, first)
            assert np.all(line <= real * (1 + 1e-9))
            if step_time is LINEAR:
                assert line == pytest.approx(real, rel=1e-9)


def test_least_prefill() -> None:
    """No chunk, and no step of several ones, costs less than the least per pair of token and key."""
    pair_s = least_prefill_per_pair(GRIDS, 2048)
    assert pair_s > 0 == least_prefill_per_pair(LINEAR, 2048)
    only = tabulate(StepTime(prefill_attention=GRIDS.prefill_attention), 2048, 8)
    for chunks in ([(16, 0)], [(300, 5000)], [(2048, 9000)], [(500, 0), (500, 0), (500, 100)]):
        pairs = sum(tokens * (before + tokens / 2) for tokens, before in chunks)
        assert compiled(only, chunks, []) >= pair_s * pairs


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_wait": Curve(y=(1.5,))}, r"^decode_wait.y: must be at most 1"),
        (
            {"decode_attention": Grid(y=(1.0, 2.0), z=((2.0, 1.0),))},
            r"^decode_attention.z\[0\]: must not decrease with the context",
        ),
        ({"mixed_overlap": Grid(z=((2.0,),))}, r"^mixed_overlap.z\[0\]: must be at most 1"),
        (
            {"decode_wait": Curve(y=(0.5,)), "decode_longest": Curve(y=(1.0,))},
            r"^decode_wait: must not be given with decode_longest",
        ),
        ({"prefill_attention": Grid(x=(1.0, 2.0), y=(0.0,), z=((1.0,), (1.0,)))}, "^prefill_attention: must have 2 to"),
        (
            {"decode_attention": Grid(y=tuple(map(float, range(40))), z=((0.0,) * 40,))},
            r"^decode_attention.y: 40 knots are too many",
        ),
    ],
)
def test_bad_grids(changes: dict[str, object], message: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=message):
        replace(StepTime(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": ()}, "^x: must have at least one knot"),
        ({"z": ((0.0,), (1.0,))}, "^z: must have 1 rows"),
        ({"z": ((0.0, 1.0),)}, r"^z\[0\]: must have 1 numbers"),
        ({"z": ((-1.0,),)}, r"^z\[0\]: must be at least 0"),
        ({"y": (4.0, 2.0), "z": ((1.0, 1.0),)}, "^y: knots are counts"),
    ],
)
def test_bad_values_of_a_grid(given: dict[str, object], message: str) -> None:
    """A grid names the part that is no function."""
    with pytest.raises(ValueError, match=message):
        Grid(**given)  # type: ignore[arg-type]
