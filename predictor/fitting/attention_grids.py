"""Makes the grids of a step time from measured attention: times are interpolated, not fitted.

The batches are those of a kernel table: at most one prefill chunk, and decodes with equal contexts. Decodes alone and
chunks alone are taken as they are. Of a chunk beside decodes, what the decodes add is read where the chunk is smallest;
a fit then finds how much of the shorter one of both is hidden behind the other, and what a wide launch grid costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from predictor.fitting.regression import Array, Steps, hat, predict, rounded
from predictor.step_time import MAX_CHUNKS, MAX_KNOTS, NO_GRID, ZERO, Curve, Grid, StepTime

TOLERANCE = 0.001  # of a whole step, when knots are left out
MOST_CONTEXTS = MAX_KNOTS - 1  # 0 is a knot as well
# The share that is hidden is fitted at about one number of tokens in so many measured ones.
OVERLAP_EVERY = 2.0
MIN_ROWS = 3
ROUNDS = 2  # what is hidden depends on the time beside chunks, which is fitted together with it


def attention_grids(steps: Steps, *, scale: Array, serving: NDArray[np.bool_] | None = None) -> StepTime:
    """Return the attention of equal decodes and of chunks; `scale` has the seconds of whole steps.

    Only the `serving` rows are used where something is fitted.
    """
    decodes, chunks = steps.num_decodes > 0, steps.num_prefills > 0
    alone, prefill, mixed = decodes & ~chunks, chunks & ~decodes, decodes & chunks
    step_time = StepTime(
        decode_attention=_grid(steps, scale, alone, steps.num_decodes, steps.decode_longest, MOST_CONTEXTS),
        prefill_attention=_grid(steps, scale, prefill, steps.prefill_tokens, _before(steps), MAX_KNOTS),
    )
    if not np.any(mixed):
        return replace(step_time, mixed_attention=step_time.decode_attention)
    if step_time.prefill_attention == NO_GRID:
        raise ValueError("prefill_chunk: there are chunks beside decodes, but none alone (n_decode 0)")
    return _with_mixed(step_time, steps, scale, mixed, mixed if serving is None else mixed & serving)


def with_waiting(step_time: StepTime, skewed: Steps, *, scale: Array, unsplit: tuple[int, int]) -> StepTime:
    """Add what decodes wait for the longest of them, from batches with few long contexts among short ones.

    From the first number of decodes in `unsplit` on, kernels do not split contexts, so decodes alone wait more; at the
    second one there are so many that others are computed meanwhile.
    """
    mixed = skewed.num_prefills > 0
    return replace(
        step_time,
        decode_wait=_waits(step_time, skewed.where(~mixed), scale[~mixed], unsplit),
        mixed_wait=_waits(step_time, skewed.where(mixed), scale[mixed], None),
    )


def _before(steps: Steps) -> Array:
    return np.asarray(steps.prefill_qkv / np.maximum(1.0, steps.prefill_tokens))


def _grid(
    steps: Steps, scale: Array, chosen: NDArray[np.bool_], x: Array, y: Array, most: int, *, values: Array | None = None
) -> Grid:
    """Return measured rows as a grid; a row of it that ends early goes on with its last slope."""
    if not np.any(chosen):
        return NO_GRID
    seconds = steps.seconds if values is None else values
    rows = {}
    for count in np.unique(x[chosen]):
        of_row = np.flatnonzero(chosen & (x == count))
        at = np.unique(y[of_row])
        of_knot = [of_row[y[of_row] == knot] for knot in at]
        rows[float(count)] = (
            at,
            np.array([np.median(seconds[each]) for each in of_knot]),
            np.array([np.median(scale[each]) for each in of_knot]),
        )
    counts = _kept_rows(rows)
    knots = _kept_knots([rows[count] for count in counts], most)
    table = [[rounded(value) for value in np.maximum.accumulate(_line(knots, *rows[count][:2]))] for count in counts]
    if len(counts) == 1 or len(knots) == 1:
        return NO_GRID
    return Grid(x=tuple(counts), y=tuple(knots.tolist()), z=tuple(tuple(row) for row in table))


def _line(x: Array, knots: Array, values: Array) -> Array:
    """Interpolate; beyond the last knot with the last slope, if it is positive."""
    found = np.interp(x, knots, values)
    if len(knots) > 1:
        slope = max(0.0, float(values[-1] - values[-2]) / float(knots[-1] - knots[-2]))
        found = found + slope * np.maximum(0.0, x - knots[-1])
    return np.asarray(found)


def _kept_rows(rows: dict[float, tuple[Array, Array, Array]]) -> list[float]:
    """Choose the rows of a grid: those with more than one value, evenly if they are too many."""
    counts = [count for count, (at, _, _) in rows.items() if len(at) > 1]
    if len(counts) <= MAX_CHUNKS:
        return counts
    return [counts[index] for index in np.unique(np.linspace(0, len(counts) - 1, MAX_CHUNKS).astype(int))]


def _kept_knots(rows: Sequence[tuple[Array, Array, Array]], most: int) -> Array:
    """Choose the fewest knots that keep all rows within the tolerance, and at most so many."""
    candidates = np.unique(np.concatenate([at for at, _, _ in rows])) if rows else np.zeros(1)
    kept = np.unique(candidates[[0, -1]])
    while len(kept) < min(most, len(candidates)):
        errors = np.zeros(len(candidates))
        for at, values, scale in rows:
            through = _line(kept, at, values)
            error = np.abs(np.interp(at, kept, through) - values) / scale
            np.maximum.at(errors, np.searchsorted(candidates, at), error)
        errors[np.isin(candidates, kept)] = 0.0
        if errors.max() <= TOLERANCE:
            break
        kept = np.sort(np.append(kept, candidates[np.argmax(errors)]))
    return kept


def _with_mixed(
    step_time: StepTime, steps: Steps, scale: Array, mixed: NDArray[np.bool_], serving: NDArray[np.bool_]
) -> StepTime:
    """Add the attention of decodes beside chunks."""
    prefill_s = _prefill_s(step_time, steps)
    more_s = np.maximum(0.0, steps.seconds - prefill_s)
    # what decodes add is seen best beside the smallest chunks
    smallest = mixed & (steps.prefill_tokens <= 2 * steps.prefill_tokens[mixed].min())
    smallest &= _before(steps) == _before(steps)[smallest].min()
    grid = _grid(steps, scale, smallest, steps.num_decodes, steps.decode_longest, MOST_CONTEXTS, values=more_s)
    knots = set(grid.y) | set(step_time.decode_attention.y)
    if len(knots) > MOST_CONTEXTS:  # both kinds of attention share the knots
        grid = replace(grid, y=(y := step_time.decode_attention.y), z=_read_at(grid, y))
    step_time = replace(step_time, mixed_attention=grid)
    rows = steps.where(serving)
    least_s = min(min(row) for row in step_time.prefill_attention.z)
    tokens = np.array(step_time.prefill_attention.x)
    tokens = tokens[np.unique(np.linspace(0, len(tokens) - 1, max(2, int(len(tokens) / OVERLAP_EVERY))).astype(int))]
    by_count = hat(rows.num_decodes, grid.x)
    cells = (by_count[:, :, None] * hat(rows.prefill_tokens, tokens.tolist())[:, None, :]).reshape(len(rows), -1)
    wide = rows.prefill_tokens * rows.num_decodes
    for _ in range(ROUNDS):
        decode_s = _mixed_decode_s(step_time, rows)
        shorter_s = np.minimum(prefill_s[serving] - least_s, decode_s)
        matrix = np.column_stack([by_count * decode_s[:, None], -cells * shorter_s[:, None], wide])
        found = _least_squares(matrix, rows.seconds - prefill_s[serving], scale[serving])
        scales = found[: len(grid.x)]
        grid = replace(
            grid, z=tuple(tuple(rounded(y * by) for y in row) for row, by in zip(grid.z, scales, strict=True))
        )
        step_time = replace(step_time, mixed_attention=grid)
    shares = np.minimum(1.0, found[len(grid.x) : -1]).reshape(len(grid.x), len(tokens))
    return replace(
        step_time,
        mixed_grid_s=rounded(found[-1]),
        mixed_overlap=Grid(
            x=grid.x, y=tuple(tokens.tolist()), z=tuple(tuple(rounded(share) for share in row) for row in shares)
        ),
    )


def _read_at(grid: Grid, y: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(rounded(v) for v in _line(np.array(y), np.array(grid.y), np.array(row))) for row in grid.z)


def _least_squares(matrix: Array, target: Array, scale: Array) -> Array:
    """Return the non-negative coefficients with the least squared error relative to `scale`."""
    from scipy.optimize import nnls  # takes a while to import

    norms = np.linalg.norm(matrix / scale[:, None], axis=0)
    used = norms > 0
    scaled = matrix[:, used] / scale[:, None] / norms[used]
    # the triangle has the same solutions, and few rows
    triangle = np.asarray(np.linalg.qr(np.column_stack([scaled, target / scale]), mode="r"))
    found = np.zeros(matrix.shape[1])
    found[used] = nnls(triangle[:, :-1], triangle[:, -1])[0] / norms[used]
    return found


def _prefill_s(step_time: StepTime, steps: Steps) -> Array:
    """Interpolate the attention of the chunks alone."""
    only = StepTime(prefill_attention=step_time.prefill_attention)
    seconds = np.zeros(len(steps))
    chosen = steps.num_prefills > 0
    zeros = np.zeros(int(chosen.sum()))
    alone = replace(
        steps.where(chosen),
        num_tokens=steps.prefill_tokens[chosen],
        num_decodes=zeros,
        decode_context=zeros,
        decode_longest=zeros,
    )
    seconds[chosen] = predict(only, alone)
    return seconds


def _mixed_decode_s(step_time: StepTime, steps: Steps) -> Array:
    """Interpolate what the decodes beside chunks add, as if nothing of it were hidden."""
    ones = np.zeros(len(steps))
    alone = replace(steps, num_tokens=steps.num_decodes, num_prefills=ones, prefill_qq=ones, prefill_qkv=ones)
    return predict(StepTime(decode_attention=step_time.mixed_attention), alone)


def _waits(step_time: StepTime, skewed: Steps, scale: Array, unsplit: tuple[int, int] | None) -> Curve:
    """Return the share of the longest context's time that is waited for, by the number of decodes."""
    if len(skewed) == 0:
        return ZERO
    mean = replace(skewed, decode_longest=skewed.decode_context / skewed.num_decodes)
    every = replace(skewed, decode_context=skewed.decode_longest * skewed.num_decodes)
    mean_s, longest_s = predict(step_time, mean), predict(step_time, every)
    measured, possible = (skewed.seconds - mean_s) / scale, (longest_s - mean_s) / scale
    shares: dict[float, float] = {}
    for count in np.unique(skewed.num_decodes):
        rows = skewed.num_decodes == count
        if rows.sum() >= MIN_ROWS:
            share = float(measured[rows] @ possible[rows]) / max(1e-12, float(possible[rows] @ possible[rows]))
            shares[float(count)] = rounded(min(1.0, max(0.0, share)))
    if unsplit is not None:
        first, end = unsplit
        below = [share for count, share in shares.items() if count < first]
        above = [share for count, share in shares.items() if first <= count < end]
        shares = {count: share for count, share in shares.items() if count < end}
        shares[float(end)] = 0.0
        if below and above:  # kernels change there, not gradually
            shares[float(first - 1)], shares[float(first)] = below[-1], above[0]
    counts = sorted(shares)
    return Curve(x=tuple(counts), y=tuple(shares[count] for count in counts)) if counts else ZERO
