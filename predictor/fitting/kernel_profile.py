"""From the times of kernels to those of whole steps, and to a latency profile.

Batches lie on a grid that was chosen here, so the fit of attention has a knot at every number of decodes, and the other
kernels enter as the curves that they are. On published tables of a GPU's kernels that leaves a third of the error that
the fit to a running engine's steps (`fitted.py`) leaves, which has to take steps as they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from predictor.fitting.kernel_plan import AttentionBatch
from predictor.fitting.model_shard import BYTES_OF, Share
from predictor.fitting.regression import (
    Array,
    Steps,
    StepShape,
    equal_decodes,
    error_of,
    fit,
    held_out,
    predict,
    rounded,
    thin_curve,
)
from predictor.profile import HeldOutError, ValidRange
from predictor.step_time import StepTime, require_seconds

TOLERANCE = 0.004  # of curves
FEWEST_BATCHES = 10  # of attention
ALL_REDUCES_A_LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of each kernel: dense ones by name and tokens, the head by sequences, a layer's attention by batch."""

    dense: Mapping[str, Mapping[int, float]]
    head: Mapping[int, float]
    attention: Mapping[AttentionBatch, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What no kernel tells: a step's time on the processor, one all-reduce's latency, and the link's bytes a second."""

    cpu_s: float = 0.0
    all_reduce_s: float = 0.0
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no time and no speed."""
        require_seconds("cpu_overhead_ms", self.cpu_s)
        require_seconds("all_reduce_us", self.all_reduce_s)
        if self.link_bytes_per_s is not None and not self.link_bytes_per_s > 0:
            raise ValueError(f"link_gb_per_s: must be above 0, not {self.link_bytes_per_s / 1e9:g}")


def times_a_step(share: Share) -> dict[str, int]:
    """Tell how often each dense kernel runs in a step; the last norm is before the head."""
    layers = share.model.num_layers
    once_a_layer = ["qkv", "rotary", "kv_write", "o", "gate_up", "activation", "down"]
    if share.has_qk_norm:
        once_a_layer.append("qk_norm")
    return {"embedding": 1, "norm": 2 * layers + 1, **dict.fromkeys(once_a_layer, layers)}


def dense_seconds(timings: Timings, share: Share) -> tuple[Array, Array]:
    """Sum up the dense kernels of a step, by the counts of tokens that all of them were timed at."""
    times = times_a_step(share)
    counts = sorted(set.intersection(*(set(timings.dense[name]) for name in times)))
    seconds = [sum(often * timings.dense[name][count] for name, often in times.items()) for count in counts]
    return np.array(counts, dtype=float), np.array(seconds)


def composed(timings: Timings, share: Share) -> Steps:
    """Make a whole step of each batch whose attention was timed, where the other kernels were timed that far too."""
    tokens, dense = dense_seconds(timings, share)
    sequences, head = _curve_of(timings.head)
    batches = [
        batch for batch in timings.attention if batch.num_tokens <= tokens[-1] and len(batch.lengths) <= sequences[-1]
    ]
    steps = _steps_of(batches)
    seconds = share.model.num_layers * np.array([timings.attention[batch] for batch in batches])
    seconds += np.interp(steps.num_tokens, tokens, dense) + np.interp(steps.num_sampled, sequences, head)
    return replace(steps, seconds=seconds)


def fit_kernels(timings: Timings, share: Share, told: Told) -> tuple[StepTime, HeldOutError, ValidRange]:
    """Fit a step time to all that was timed; its error is that of the same fit to four fifths, on the other fifth."""
    whole = composed(timings, share)
    tokens, _ = dense_seconds(timings, share)
    if len(whole) < FEWEST_BATCHES or len(tokens) < 2:
        raise ValueError(
            f"budget: {len(whole)} batches and {len(tokens)} counts of tokens are too few to fit, {FEWEST_BATCHES} and"
            " 2 are needed; give it more time"
        )
    unseen, unseen_tokens = held_out(len(whole)), held_out(len(tokens))
    unseen_tokens[[0, -1]] = False
    test = whole.where(unseen)
    seen = _fit(timings, share, whole.where(~unseen), ~unseen_tokens)
    error = error_of(predict(seen, test), test.seconds)
    every = _fit(timings, share, whole, np.ones(len(tokens), np.bool_))
    valid = ValidRange(
        max_tokens=int(tokens[-1]),
        max_sequences=max(1, int(whole.num_decodes.max())),
        max_context_tokens=max(1, int(whole.decode_context.max())),
    )
    return with_told(every, share, told), error, valid


def with_told(step_time: StepTime, share: Share, told: Told) -> StepTime:
    """Add what was told: the processor's time to each step, and all-reduces to each layer's two halves."""
    devices, layers = share.tensor_parallel, share.model.num_layers
    if devices == 1:
        return replace(step_time, constant_s=rounded(step_time.constant_s + told.cpu_s))
    constant_s = told.cpu_s + ALL_REDUCES_A_LAYER * layers * told.all_reduce_s
    token_s = 0.0
    if told.link_bytes_per_s is not None:  # a ring passes each hidden state on so often
        passed = 2 * (devices - 1) / devices * share.model.hidden_size * BYTES_OF[share.dtype]
        token_s = ALL_REDUCES_A_LAYER * layers * passed / told.link_bytes_per_s
    return replace(
        step_time,
        constant_s=rounded(step_time.constant_s + constant_s),
        token_s=rounded(step_time.token_s + token_s),
    )


def _fit(timings: Timings, share: Share, whole: Steps, chosen: np.ndarray) -> StepTime:
    """Fit attention as what is left of whole steps beside the curves of the rest."""
    tokens, dense = (column[chosen] for column in dense_seconds(timings, share))
    sequences, head = _curve_of(timings.head)
    rest = np.interp(whole.num_tokens, *dense_seconds(timings, share)) + np.interp(whole.num_sampled, sequences, head)
    attention = replace(whole, seconds=whole.seconds - rest)
    return replace(
        fit(attention, _shape_for(whole), scale=whole.seconds),
        by_tokens=thin_curve(tokens, dense, tolerance=TOLERANCE),
        by_sequences=thin_curve(sequences, head, tolerance=TOLERANCE),
    )


def _shape_for(steps: Steps) -> StepShape:
    """Give each number of decodes that is there its knot, and every other one where chunks come beside them."""
    mixed = (steps.num_prefills > 0) & (steps.num_decodes > 0)
    alone = _knots(steps.num_decodes[steps.num_prefills == 0])
    beside = _knots(steps.num_decodes[mixed])
    numbers = ("prefill_s", "prefill_token_s", "prefill_qq_s", "prefill_qkv_s", "prefill_kv_s")
    return StepShape(
        numbers=numbers if np.any(steps.num_prefills > 0) else (),
        decode_base=alone,
        decode_slope=alone,
        mixed_base=beside,
        mixed_slope=beside,
    )


def _knots(counts: Array) -> tuple[float, ...]:
    return tuple(float(count) for count in np.unique(counts) if count > 0)


def _steps_of(batches: Sequence[AttentionBatch]) -> Steps:
    """Arrange batches as steps that took no time; the chunk is its prompt's last, so it gets a token too."""
    chunk, before, decodes, context = (
        np.array([getattr(batch, name) for batch in batches], dtype=float)
        for name in ("chunk", "before", "num_decodes", "context")
    )
    return equal_decodes(chunk, before, decodes, context, np.zeros(len(batches)))


def _curve_of(timed: Mapping[int, float]) -> tuple[Array, Array]:
    counts = sorted(timed)
    return np.array(counts, dtype=float), np.array([timed[count] for count in counts])
