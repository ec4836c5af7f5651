"""The duration of one engine step: a function of its batch, piecewise linear in the contexts that are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.compiled import kernel, small_kernel

Array = NDArray[np.float64]

# The indexes of `Costs.coefficients`.
(
    EMPTY, CONSTANT, PREFILL, PREFILL_TOKEN, PREFILL_QQ, PREFILL_QKV, PREFILL_KV, MIXED_GRID,
    MOST_TOKENS, MOST_SEQUENCES, MOST_CONTEXT, LONGEST_CONTEXT, NUM_KNOTS, NUM_CHUNKS, NUM_BEFORE, LEAST_PREFILL,
) = range(16)  # fmt: skip
MAX_KNOTS, MAX_CHUNKS = 16, 24
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

# The regions of batches, about which a profile can be wrong in different ways: decodes alone, decodes beside chunks,
# and mostly chunks, with so many times as many tokens as decodes.
REGIONS = ("decode", "mixed", "prefill")
NUM_REGIONS = len(REGIONS)
DECODE_REGION, MIXED_REGION, PREFILL_REGION = range(NUM_REGIONS)
PREFILL_SHARE = 8

# The upper limit of all counts and times; it keeps sums finite.
LARGEST = 1e10


def require_seconds(name: str, value: object) -> None:
    """Refuse values other than a finite number of at least zero; the error names the field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: must be a number, not {value!r}")
    if not 0 <= value <= LARGEST:
        raise ValueError(f"{name}: must be at least 0 and at most {LARGEST:.0e}, not {str(value)[:24]}")


def _require_knots(name: str, knots: Sequence[float]) -> None:
    if not knots:
        raise ValueError(f"{name}: must have at least one knot")
    for knot in knots:
        require_seconds(name, knot)
    if any(later - earlier < 1 for earlier, later in pairwise(knots)):
        raise ValueError(f"{name}: knots are counts and must increase by at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A piecewise linear function from counts to seconds: constant before the first knot, extrapolated at the end."""

    x: tuple[float, ...] = (0.0,)
    y: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        """Refuse knots that do not define a function."""
        _require_knots("x", self.x)
        if len(self.y) != len(self.x):
            raise ValueError(f"y: must have {len(self.x)} numbers, one for each of x, not {len(self.y)}")
        for value in self.y:
            require_seconds("y", value)

    def table(self, largest: int) -> Array:
        """Evaluate at 0, 1, …, largest; a decreasing last slope is not extrapolated."""
        return np.ascontiguousarray(_straight(np.arange(largest + 1, dtype=np.float64), self.x, self.y))


def _straight(counts: Array, x: Sequence[float], y: Sequence[float]) -> Array:
    values: Array = np.interp(counts, x, y)
    if len(x) > 1:
        slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        values += slope * np.maximum(0.0, counts - x[-1])
    return values


ZERO = Curve()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A bilinear function of two counts, from a row of values for each knot of x; beyond its knots as a curve."""

    x: tuple[float, ...] = (0.0,)
    y: tuple[float, ...] = (0.0,)
    z: tuple[tuple[float, ...], ...] = ((0.0,),)

    def __post_init__(self) -> None:
        """Refuse knots and values that do not define a function."""
        _require_knots("x", self.x)
        _require_knots("y", self.y)
        if len(self.z) != len(self.x):
            raise ValueError(f"z: must have {len(self.x)} rows, one for each of x, not {len(self.z)}")
        for number, row in enumerate(self.z):
            if len(row) != len(self.y):
                raise ValueError(f"z[{number}]: must have {len(self.y)} numbers, one for each of y, not {len(row)}")
            for value in row:
                require_seconds(f"z[{number}]", value)

    def table(self, largest: int, y: Array) -> Array:
        """Evaluate at 0, 1, …, largest, a row each, and at counts y, a column each."""
        columns = np.array([_straight(y, self.y, row) for row in self.z]).T
        counts = np.arange(largest + 1, dtype=np.float64)
        return np.column_stack([_straight(counts, self.x, column.tolist()) for column in columns])


NO_GRID = Grid()


UNLIMITED = (np.inf, np.inf, np.inf, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The coefficients of one engine's step time, in seconds per unit of the name.

    A step costs `constant_s`, plus a part by its number of tokens (`by_tokens`, `token_s`), plus a part by the number
    of sequences that sample (`by_sequences`), plus attention. Attention of prefill chunks of l_q new tokens
    behind l_kv old ones is `prefill_s` once, and `prefill_token_s`·l_q + `prefill_qq_s`·l_q² + `prefill_qkv_s`·l_q·l_kv
    + `prefill_kv_s`·l_kv for each. Attention of n decodes is `decode_base[n]` + `decode_slope[n]`·Σ context +
    `decode_longest[n]`·longest context, because a kernel waits for its longest sequence. Beside prefill chunks
    engines run another kernel, whose coefficients are `mixed_base`, `mixed_slope`, `mixed_longest` and `mixed_grid_s`,
    the cost of a decode in a launch grid as wide as the longest chunk, per token of that width.

    Where attention was measured on a grid, it is interpolated: `decode_attention` and `mixed_attention` by the number
    of decodes and their mean context, `prefill_attention` by the tokens of a chunk and the context before it. Several
    chunks cost as much as one with as many tokens and the same mean number of keys. Of the difference between a batch
    of the mean and one of the longest context, a share is waited for (`decode_wait`, `mixed_wait`, by the number of
    decodes). Of the shorter one of prefill and decode attention in a step, a share is hidden behind the other
    (`mixed_overlap`, by the number of decodes and of prefill tokens).

    `limits` are the most tokens, sequences, context of all and context of one sequence in any batch that was measured.
    """

    constant_s: float = 0.0
    empty_s: float = 0.0
    token_s: float = 0.0
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_qq_s: float = 0.0
    prefill_qkv_s: float = 0.0
    prefill_kv_s: float = 0.0
    mixed_grid_s: float = 0.0
    by_tokens: Curve = ZERO
    by_sequences: Curve = ZERO
    decode_base: Curve = ZERO
    decode_slope: Curve = ZERO
    decode_longest: Curve = ZERO
    mixed_base: Curve = ZERO
    mixed_slope: Curve = ZERO
    mixed_longest: Curve = ZERO
    decode_wait: Curve = ZERO
    mixed_wait: Curve = ZERO
    decode_attention: Grid = NO_GRID
    mixed_attention: Grid = NO_GRID
    prefill_attention: Grid = NO_GRID
    mixed_overlap: Grid = NO_GRID
    limits: tuple[float, float, float, float] = UNLIMITED

    def __post_init__(self) -> None:
        """Refuse coefficients with which a step could take a negative time."""
        for name in NUMBERS:
            require_seconds(name, getattr(self, name))
        for name, shares in (("decode_wait", self.decode_wait.y), ("mixed_wait", self.mixed_wait.y)):
            _require_shares(f"{name}.y", shares)
        for number, row in enumerate(self.mixed_overlap.z):
            _require_shares(f"mixed_overlap.z[{number}]", row)
        for name in ("decode", "mixed"):
            if getattr(self, f"{name}_wait") != ZERO and getattr(self, f"{name}_longest") != ZERO:
                raise ValueError(f"{name}_wait: must not be given with {name}_longest, which says the same")
        for name in ("decode_attention", "mixed_attention"):
            for number, row in enumerate(getattr(self, name).z):
                if any(later < earlier for earlier, later in pairwise(row)):
                    raise ValueError(f"{name}.z[{number}]: must not decrease with the context")
        if len(self.knots) > MAX_KNOTS:
            raise ValueError(f"decode_attention.y: {len(self.knots)} knots are too many, at most {MAX_KNOTS}")
        chunks, before = self.prefill_attention.x, self.prefill_attention.y
        if self.prefill_attention != NO_GRID and not (2 <= len(chunks) <= MAX_CHUNKS and 2 <= len(before) <= MAX_KNOTS):
            raise ValueError(
                f"prefill_attention: must have 2 to {MAX_CHUNKS} knots of x and 2 to {MAX_KNOTS} of y, not"
                f" {len(chunks)} and {len(before)}"
            )

    @property
    def knots(self) -> tuple[float, ...]:
        """The mean contexts at which the slope of attention changes; the first is 0."""
        return tuple(sorted({0.0, *self.decode_attention.y, *self.mixed_attention.y}))


def _require_shares(name: str, values: Sequence[float]) -> None:
    for value in values:
        require_seconds(name, value)
        if value > 1:
            raise ValueError(f"{name}: must be at most 1, not {value}")


NUMBERS = (
    "constant_s",
    "empty_s",
    "token_s",
    "prefill_s",
    "prefill_token_s",
    "prefill_qq_s",
    "prefill_qkv_s",
    "prefill_kv_s",
    "mixed_grid_s",
)
CURVES = (
    "by_tokens",
    "by_sequences",
    "decode_base",
    "decode_slope",
    "decode_longest",
    "mixed_base",
    "mixed_slope",
    "mixed_longest",
)
SHARES = ("decode_wait", "mixed_wait")
GRIDS = ("decode_attention", "mixed_attention", "prefill_attention", "mixed_overlap")


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
def region_of(num_tokens: int, num_decodes: int, num_prefills: int) -> int:
    """Return the region of a batch."""
    if num_prefills == 0:
        return DECODE_REGION
    return PREFILL_REGION if num_tokens - num_decodes >= PREFILL_SHARE * num_decodes else MIXED_REGION


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


def least_prefill_per_pair(step_time: StepTime, most_tokens: int) -> float:
    """Return the least seconds of interpolated attention for a token and a key of it, in chunks of up to so many."""
    grid = step_time.prefill_attention
    if grid == NO_GRID:
        return 0.0
    before = np.array(grid.y)
    rows = grid.table(max(most_tokens, int(grid.x[-1])), before)
    counts = [int(chunk) for chunk in grid.x] + [most_tokens]
    pairs = [count * (before + count / 2) for count in counts]
    return float(min((rows[count] / pair).min() for count, pair in zip(counts, pairs, strict=True)))
