"""The duration of one engine step: a function of its batch, affine in the contexts that are decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.compiled import small_kernel

Array = NDArray[np.float64]

# The indexes of `Costs.coefficients`.
EMPTY = 0
CONSTANT = 1
PREFILL = 2
PREFILL_TOKEN = 3
PREFILL_QQ = 4
PREFILL_QKV = 5
PREFILL_KV = 6
MIXED_GRID = 7
NUM_COEFFICIENTS = 8

# The columns of `Costs.by_count`.
SAMPLED, DECODE_BASE, DECODE_SLOPE, DECODE_LONGEST, MIXED_BASE, MIXED_SLOPE, MIXED_LONGEST = range(7)
NUM_COLUMNS = 8  # one cache line a row

# The upper limit of all counts and times; it keeps sums finite.
LARGEST = 1e10


def require_seconds(name: str, value: object) -> None:
    """Refuse values other than a finite number of at least zero; the error names the field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: must be a number, not {value!r}")
    if not 0 <= value <= LARGEST:
        raise ValueError(f"{name}: must be at least 0 and at most {LARGEST:.0e}, not {str(value)[:24]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A piecewise linear function from counts to seconds: constant before the first knot, extrapolated at the end."""

    x: tuple[float, ...] = (0.0,)
    y: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        """Refuse knots that do not define a function."""
        if not self.x:
            raise ValueError("x: must have at least one knot")
        if len(self.y) != len(self.x):
            raise ValueError(f"y: must have {len(self.x)} numbers, one for each of x, not {len(self.y)}")
        for name, values in (("x", self.x), ("y", self.y)):
            for value in values:
                require_seconds(name, value)
        if any(later - earlier < 1 for earlier, later in zip(self.x, self.x[1:], strict=False)):
            raise ValueError("x: knots are counts and must increase by at least 1")

    def table(self, largest: int) -> Array:
        """Evaluate at 0, 1, …, largest; a decreasing last slope is not extrapolated."""
        counts = np.arange(largest + 1, dtype=np.float64)
        values = np.interp(counts, self.x, self.y)
        if len(self.x) > 1:
            slope = max(0.0, (self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2]))
            values += slope * np.maximum(0.0, counts - self.x[-1])
        return np.ascontiguousarray(values)


ZERO = Curve()


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

    def __post_init__(self) -> None:
        """Refuse coefficients with which a step could take a negative time."""
        for name in NUMBERS:
            require_seconds(name, getattr(self, name))


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


class Costs(NamedTuple):
    """A step time tabulated for one engine's limits, for the compiled loop."""

    coefficients: Array
    by_tokens: Array
    by_count: Array  # a row for each number of sequences, a column for each curve


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
    by_count = np.zeros((max_num_seqs + 1, NUM_COLUMNS))
    by_count[:, SAMPLED] = step_time.by_sequences.table(max_num_seqs)
    by_count[:, DECODE_BASE] = step_time.decode_base.table(max_num_seqs)
    by_count[:, DECODE_SLOPE] = step_time.decode_slope.table(max_num_seqs)
    by_count[:, DECODE_LONGEST] = step_time.decode_longest.table(max_num_seqs)
    by_count[:, MIXED_BASE] = step_time.mixed_base.table(max_num_seqs)
    by_count[:, MIXED_SLOPE] = step_time.mixed_slope.table(max_num_seqs)
    by_count[:, MIXED_LONGEST] = step_time.mixed_longest.table(max_num_seqs)
    tokens = np.arange(max_num_batched_tokens + 1, dtype=np.float64)
    return Costs(
        coefficients=coefficients,
        by_tokens=step_time.by_tokens.table(max_num_batched_tokens) + step_time.token_s * tokens,
        by_count=by_count,
    )


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
    if num_decodes > 0 and decode_longest == 0.0:
        decode_longest = decode_context / num_decodes
    if num_prefills == 0:
        seconds += costs.by_count[num_decodes, DECODE_BASE] + costs.by_count[num_decodes, DECODE_SLOPE] * decode_context
        return seconds + costs.by_count[num_decodes, DECODE_LONGEST] * decode_longest
    prefill_tokens = num_tokens - num_decodes
    # Only sums are known: this chunk length is the mean over tokens, which is exact for chunks of equal length.
    chunk = prefill_qq / prefill_tokens
    seconds += coefficients[PREFILL] + coefficients[PREFILL_TOKEN] * prefill_tokens
    seconds += coefficients[PREFILL_QQ] * prefill_qq + coefficients[PREFILL_QKV] * prefill_qkv
    seconds += coefficients[PREFILL_KV] * prefill_qkv * num_prefills / prefill_tokens
    if num_decodes > 0:
        seconds += costs.by_count[num_decodes, MIXED_BASE] + costs.by_count[num_decodes, MIXED_SLOPE] * decode_context
        seconds += costs.by_count[num_decodes, MIXED_LONGEST] * decode_longest
        seconds += coefficients[MIXED_GRID] * chunk * num_decodes
    return seconds


@small_kernel
def decode_slope(costs: Costs, num_decodes: int) -> float:
    """Return the seconds that each token of context adds to a step of decodes whose contexts all grow by one."""
    return costs.by_count[num_decodes, DECODE_SLOPE] + costs.by_count[num_decodes, DECODE_LONGEST] / num_decodes
