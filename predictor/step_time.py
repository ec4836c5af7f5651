"""The duration of one engine step: a function of its batch, piecewise linear in the contexts that are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from predictor.compiled import small_kernel

Array = NDArray[np.float64]

MAX_KNOTS, MAX_CHUNKS = 16, 24  # of a grid

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


@small_kernel
def region_of(num_tokens: int, num_decodes: int, num_prefills: int) -> int:
    """Return the region of a batch."""
    if num_prefills == 0:
        return DECODE_REGION
    return PREFILL_REGION if num_tokens - num_decodes >= PREFILL_SHARE * num_decodes else MIXED_REGION


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
