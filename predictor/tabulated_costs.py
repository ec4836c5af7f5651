"""A step time as tables for one engine's limits, and what a step costs by them, for the compiled loop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from predictor.compiled import kernel, small_kernel
from predictor.step_time import MAX_CHUNKS, MAX_KNOTS, NO_GRID, Array, Curve, Grid, StepTime

# The indexes of `Costs.coefficients`.
(
    EMPTY, CONSTANT, PREFILL, PREFILL_TOKEN, PREFILL_QQ, PREFILL_QKV, PREFILL_KV, MIXED_GRID,
    MOST_TOKENS, MOST_SEQUENCES, MOST_CONTEXT, LONGEST_CONTEXT, NUM_KNOTS, NUM_CHUNKS, NUM_BEFORE, LEAST_PREFILL,
) = range(16)  # fmt: skip
KNOTS = 16  # the knots of contexts, and infinity behind the last
CHUNKS = KNOTS + MAX_KNOTS + 1  # the knots of `prefill_attention`: tokens of a chunk,
BEFORE = CHUNKS + MAX_CHUNKS  # context before it,
PREFILL_GRID = BEFORE + MAX_KNOTS  # and its seconds, a row for each number of tokens
NUM_COEFFICIENTS = PREFILL_GRID + MAX_CHUNKS * MAX_KNOTS

# The columns of `Costs.by_count`: these; then for each knot of contexts the seconds of attention, and their slope per
# token of all contexts, of decodes alone and beside prefill chunks; then for each knot of chunks the share that is
# hidden behind them.
SAMPLED, DECODE_WAIT, MIXED_WAIT, FIRST_KNOT = 0, 1, 2, 4
COLUMNS_PER_KNOT = 4
ALONE, BESIDE = FIRST_KNOT, FIRST_KNOT + 2


class Costs(NamedTuple):
    """A step time tabulated for one engine's limits, for the compiled loop."""

    coefficients: Array
    by_tokens: Array
    by_count: Array  # a row for each number of sequences


def tabulate(step_time: StepTime, max_num_batched_tokens: int, max_num_seqs: int) -> Costs:
    """Evaluate all curves at all counts that an engine with these limits can reach."""
    coefficients = np.zeros(NUM_COEFFICIENTS)
    coefficients[EMPTY] = step_time.empty_s
    coefficients[CONSTANT] = step_time.constant_s
    coefficients[PREFILL] = step_time.prefill_s
    coefficients[PREFILL_TOKEN] = step_time.prefill_token_s
    coefficients[PREFILL_QQ] = step_time.prefill_qq_s
    coefficients[PREFILL_QKV] = step_time.prefill_qkv_s
    coefficients[PREFILL_KV] = step_time.prefill_kv_s
    coefficients[MIXED_GRID] = step_time.mixed_grid_s
    coefficients[MOST_TOKENS : LONGEST_CONTEXT + 1] = step_time.limits
    knots = np.array(step_time.knots)
    coefficients[NUM_KNOTS] = len(knots)
    coefficients[KNOTS : KNOTS + MAX_KNOTS + 1] = np.inf
    coefficients[KNOTS : KNOTS + len(knots)] = knots
    chunks = _set_prefill_grid(coefficients, step_time.prefill_attention)
    by_count = np.zeros((max_num_seqs + 1, FIRST_KNOT + COLUMNS_PER_KNOT * len(knots) + len(chunks)))
    by_count[:, SAMPLED] = step_time.by_sequences.table(max_num_seqs)
    _set_attention(
        by_count, ALONE, DECODE_WAIT, knots, step_time.decode_base, step_time.decode_slope, step_time.decode_longest,
        step_time.decode_attention, step_time.decode_wait,
    )  # fmt: skip
    _set_attention(
        by_count, BESIDE, MIXED_WAIT, knots, step_time.mixed_base, step_time.mixed_slope, step_time.mixed_longest,
        step_time.mixed_attention, step_time.mixed_wait,
    )  # fmt: skip
    if len(chunks):
        overlap = step_time.mixed_overlap.table(max_num_seqs, chunks)
        by_count[:, FIRST_KNOT + COLUMNS_PER_KNOT * len(knots) :] = np.minimum(1.0, overlap)
    tokens = np.arange(max_num_batched_tokens + 1, dtype=np.float64)
    return Costs(
        coefficients=coefficients,
        by_tokens=step_time.by_tokens.table(max_num_batched_tokens) + step_time.token_s * tokens,
        by_count=by_count,
    )


def _set_prefill_grid(coefficients: Array, grid: Grid) -> Array:
    """Tabulate the attention of chunks; return the knots of their tokens."""
    if grid == NO_GRID:
        return np.empty(0)
    chunks, before, values = np.array(grid.x), np.array(grid.y), np.array(grid.z)
    coefficients[NUM_CHUNKS], coefficients[NUM_BEFORE] = len(chunks), len(before)
    coefficients[LEAST_PREFILL] = values.min()
    coefficients[CHUNKS : CHUNKS + len(chunks)] = chunks
    coefficients[BEFORE : BEFORE + len(before)] = before
    rows = coefficients[PREFILL_GRID:].reshape(MAX_CHUNKS, MAX_KNOTS)
    rows[: len(chunks), : len(before)] = values
    return chunks


def _set_attention(
    by_count: Array, first: int, wait: int, knots: Array, base: Curve, slope: Curve, longest: Curve, grid: Grid,
    share: Curve,
) -> None:  # fmt: skip
    """Tabulate the attention of decodes at the knots, its slopes, and the share of waiting."""
    most = len(by_count) - 1
    counts = np.maximum(1.0, np.arange(most + 1))
    waits = longest.table(most) / counts
    per_token = slope.table(most) + waits
    measured = grid.table(most, knots)
    last = first + COLUMNS_PER_KNOT * len(knots)
    by_count[:, first:last:COLUMNS_PER_KNOT] = (
        base.table(most)[:, None] + np.outer(per_token * counts, knots) + measured
    )
    slopes = np.zeros_like(measured)
    if len(knots) > 1:
        slopes[:, :-1] = np.diff(measured, axis=1) / np.diff(knots) / counts[:, None]
        slopes[:, -1] = slopes[:, -2]
    by_count[:, first + 1 : last : COLUMNS_PER_KNOT] = per_token[:, None] + slopes
    by_count[:, wait] = np.minimum(1.0, share.table(most) + waits / np.where(per_token > 0, per_token, 1.0))


@small_kernel
def step_seconds(
    costs: Costs,
    num_tokens: int,
    num_sampled: int,
    num_decodes: int,
    decode_context: float,
    num_prefills: int,
    prefill_qq: float,
    prefill_qkv: float,
    decode_longest: float = 0.0,
) -> float:
    """Return the seconds of one step.

    `num_tokens` counts all tokens of the batch, `num_sampled` the sequences that produce one; `decode_context` sums
    the context lengths of the decodes, the new token included, and `decode_longest` is the largest of them, or 0
    where only the mean is known; `prefill_qq` and `prefill_qkv` sum l_q² and l_q·l_kv over the prefill chunks, l_kv
    being the context before the chunk. Counts must lie within the limits that the costs were tabulated for.
    """
    coefficients = costs.coefficients
    if num_tokens == 0:
        return coefficients[EMPTY]
    seconds = coefficients[CONSTANT] + costs.by_tokens[num_tokens] + costs.by_count[num_sampled, SAMPLED]
    if num_prefills == 0:
        if num_decodes > 0:
            seconds += context_seconds(costs, num_decodes, decode_context, decode_longest, ALONE, DECODE_WAIT)
        return seconds
    prefill_tokens = num_tokens - num_decodes
    interpolated_s = interpolated_prefill_s(costs, prefill_tokens, prefill_qq, prefill_qkv)
    seconds += coefficients[PREFILL] + coefficients[PREFILL_TOKEN] * prefill_tokens + interpolated_s
    seconds += coefficients[PREFILL_QQ] * prefill_qq + coefficients[PREFILL_QKV] * prefill_qkv
    seconds += coefficients[PREFILL_KV] * prefill_qkv * num_prefills / prefill_tokens
    if num_decodes > 0:
        decodes_s = context_seconds(costs, num_decodes, decode_context, decode_longest, BESIDE, MIXED_WAIT)
        # Only sums are known: this chunk length is the mean over tokens, which is exact for chunks of equal length.
        chunk = prefill_qq / prefill_tokens
        seconds += decodes_s + coefficients[MIXED_GRID] * chunk * num_decodes
        if coefficients[NUM_CHUNKS] > 0:
            seconds -= _hidden_s(costs, num_decodes, prefill_tokens, interpolated_s, decodes_s)
    return seconds


@small_kernel
def context_seconds(costs: Costs, num_decodes: int, context: float, longest: float, first: int, wait: int) -> float:
    """Return the attention of decodes, alone or beside prefill chunks."""
    coefficients = costs.coefficients
    knot = 0
    while context >= num_decodes * coefficients[KNOTS + knot + 1]:
        knot += 1
    column = first + COLUMNS_PER_KNOT * knot
    more = context - num_decodes * coefficients[KNOTS + knot]
    seconds = costs.by_count[num_decodes, column] + costs.by_count[num_decodes, column + 1] * more
    share = costs.by_count[num_decodes, wait]
    if share > 0 and longest > 0:
        while longest >= coefficients[KNOTS + knot + 1]:
            knot += 1
        column = first + COLUMNS_PER_KNOT * knot
        more = num_decodes * (longest - coefficients[KNOTS + knot])
        all_s = costs.by_count[num_decodes, column] + costs.by_count[num_decodes, column + 1] * more
        seconds += share * (all_s - seconds)
    return seconds


@small_kernel
def interpolated_prefill_s(costs: Costs, num_tokens: float, qq: float, qkv: float) -> float:
    """Return what `prefill_attention` says about prefill chunks; 0 without it."""
    return _grid_prefill_s(costs, num_tokens, qq, qkv) if costs.coefficients[NUM_CHUNKS] > 0 else 0.0


@kernel
def _grid_prefill_s(costs: Costs, num_tokens: float, qq: float, qkv: float) -> float:
    """Interpolate the attention of one chunk that has the tokens of all, and the mean keys of their tokens."""
    coefficients = costs.coefficients
    row = _chunk_knot(costs, num_tokens)
    before = (qkv + 0.5 * qq) / num_tokens - 0.5 * num_tokens  # below 0 for several chunks
    column = 0
    while column < coefficients[NUM_BEFORE] - 2 and before >= coefficients[BEFORE + column + 1]:
        column += 1
    start, end = coefficients[BEFORE + column], coefficients[BEFORE + column + 1]
    weight = (before - start) / (end - start)
    at = PREFILL_GRID + MAX_KNOTS * row + column
    less = coefficients[at] + weight * (coefficients[at + 1] - coefficients[at])
    at += MAX_KNOTS
    more = coefficients[at] + weight * (coefficients[at + 1] - coefficients[at])
    seconds = less + _chunk_weight(costs, row, num_tokens) * (more - less)
    return max(seconds, coefficients[LEAST_PREFILL])


@kernel
def _hidden_s(costs: Costs, num_decodes: int, num_tokens: float, prefill_s: float, decodes_s: float) -> float:
    """Return the seconds of attention during which chunks and decodes run at the same time."""
    coefficients = costs.coefficients
    row = _chunk_knot(costs, num_tokens)
    weight = min(1.0, _chunk_weight(costs, row, num_tokens))
    column = FIRST_KNOT + COLUMNS_PER_KNOT * int(coefficients[NUM_KNOTS]) + row
    shares = costs.by_count[num_decodes]
    share = shares[column] + weight * (shares[column + 1] - shares[column])
    return share * min(prefill_s - coefficients[LEAST_PREFILL], decodes_s)


@small_kernel
def _chunk_knot(costs: Costs, num_tokens: float) -> int:
    """Return the knot of chunks at or before a number of tokens, but not the last one."""
    knot = 0
    while knot < costs.coefficients[NUM_CHUNKS] - 2 and num_tokens >= costs.coefficients[CHUNKS + knot + 1]:
        knot += 1
    return knot


@small_kernel
def _chunk_weight(costs: Costs, knot: int, num_tokens: float) -> float:
    """Return how far a number of tokens is from a knot to the next one; more than 1 beyond the last."""
    start, end = costs.coefficients[CHUNKS + knot], costs.coefficients[CHUNKS + knot + 1]
    return max(0.0, (num_tokens - start) / (end - start))


@small_kernel
def decode_slope(costs: Costs, num_decodes: int, context: float, longest: float) -> float:
    """Return the seconds that each token of context adds to a step of decodes whose contexts all grow by one."""
    coefficients = costs.coefficients
    knot = 0
    while context >= num_decodes * coefficients[KNOTS + knot + 1]:
        knot += 1
    slope = costs.by_count[num_decodes, ALONE + COLUMNS_PER_KNOT * knot + 1]
    share = costs.by_count[num_decodes, DECODE_WAIT]
    if share > 0:
        while longest >= coefficients[KNOTS + knot + 1]:
            knot += 1
        slope += share * (costs.by_count[num_decodes, ALONE + COLUMNS_PER_KNOT * knot + 1] - slope)
    return slope


@small_kernel
def steps_in_line(costs: Costs, num_decodes: int, context: float, longest: float) -> int:
    """Return the number of decode steps, from one with these contexts on, that `decode_slope` holds for."""
    coefficients = costs.coefficients
    count, knot = float(1 << 40), 1
    while context >= num_decodes * coefficients[KNOTS + knot]:
        knot += 1
    if coefficients[KNOTS + knot] < np.inf:
        count = coefficients[KNOTS + knot] - context / num_decodes
    if costs.by_count[num_decodes, DECODE_WAIT] > 0:
        while longest >= coefficients[KNOTS + knot]:
            knot += 1
        count = min(count, coefficients[KNOTS + knot] - longest)
    return int(min(count, float(1 << 40))) + 1


@small_kernel
def mean_context_line(costs: Costs, num_decodes: int) -> tuple[float, float]:
    """Return the attention of decodes without context, and its mean slope per token of context."""
    row = costs.by_count[num_decodes]
    num_knots = int(costs.coefficients[NUM_KNOTS])
    base, slope = row[ALONE], row[ALONE + 1]
    if num_knots > 1:
        largest = costs.coefficients[KNOTS + num_knots - 1]
        slope = (row[ALONE + COLUMNS_PER_KNOT * (num_knots - 1)] - base) / (num_decodes * largest)
    return base, slope


@small_kernel
def is_measured(costs: Costs, num_tokens: int, num_sequences: int, context: float, longest: float) -> bool:
    """Return whether a batch lies within the range that was measured."""
    coefficients = costs.coefficients
    return bool(
        num_tokens <= coefficients[MOST_TOKENS]
        and num_sequences <= coefficients[MOST_SEQUENCES]
        and context <= coefficients[MOST_CONTEXT]
        and longest <= coefficients[LONGEST_CONTEXT]
    )


@small_kernel
def count_measured(costs: Costs, num_decodes: int, context: float, longest: float, num_steps: int) -> int:
    """Return how many of the decode steps that follow on these contexts lie within the range that was measured."""
    coefficients = costs.coefficients
    if num_decodes > coefficients[MOST_TOKENS] or num_decodes > coefficients[MOST_SEQUENCES]:
        return 0
    count = min((coefficients[MOST_CONTEXT] - context) / num_decodes, coefficients[LONGEST_CONTEXT] - longest)
    return int(max(0.0, min(count, float(num_steps))))


def context_line(costs: Costs, first: int) -> tuple[Array, Array]:
    """Return, by the number of decodes, the largest line that attention never falls below: its start, and its slope.

    The slope is per token of all contexts. Beside prefill chunks (`first` is BESIDE), what they can hide is left out.
    """
    num_knots = int(costs.coefficients[NUM_KNOTS])
    last = first + COLUMNS_PER_KNOT * num_knots
    values = costs.by_count[:, first:last:COLUMNS_PER_KNOT]
    start, slope = values[:, 0].copy(), costs.by_count[:, last - COLUMNS_PER_KNOT + 1].copy()
    if num_knots > 1:
        knots = costs.coefficients[KNOTS + 1 : KNOTS + num_knots]
        counts = np.maximum(1.0, np.arange(len(values)))[:, None]
        slope = np.minimum(slope, ((values[:, 1:] - values[:, :1]) / knots / counts).min(axis=1))
    hidden = costs.by_count[:, FIRST_KNOT + COLUMNS_PER_KNOT * num_knots :]
    if first == BESIDE and hidden.shape[1]:
        visible = 1.0 - hidden.max(axis=1)
        return visible * start, visible * slope
    return start, slope


def mean_context_seconds(costs: Costs, context: float, first: int) -> Array:
    """Return, by the number of decodes, their attention where all have the same context."""
    num_knots = int(costs.coefficients[NUM_KNOTS])
    knots = costs.coefficients[KNOTS : KNOTS + num_knots]
    knot = int(np.searchsorted(knots, context, side="right")) - 1
    column = first + COLUMNS_PER_KNOT * knot
    more = np.arange(len(costs.by_count)) * (context - knots[knot])
    seconds: Array = costs.by_count[:, column] + costs.by_count[:, column + 1] * more
    return seconds
