"""Composes the times of kernels to those of whole steps, and fits a latency profile to them.

Batches are on the grid of `kernel_plan`, so the fit of attention has a knot at every number of decodes, and the other
kernels are used as measured curves. On published tables of a GPU's kernels this has a third of the error of a fit to
the steps of a running engine (`measured_steps.py`), whose batches cannot be chosen.
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
MIN_BATCHES = 10  # of attention
ALL_REDUCES_A_LAYER = 2
ATTENTION_KERNELS = ("qkv", "rotary", "kv_write", "o")
LATENT_KERNELS = ("qkv_a", "latent_norm", "q_b", "rotary", "kv_write", "o")
MLP_KERNELS = ("gate_up", "activation", "down")
EXPERT_KERNELS = ("router", "experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of each kernel: dense ones by name and tokens, the head by sequences, a layer's attention by batch."""

    dense: Mapping[str, Mapping[int, float]]
    head: Mapping[int, float]
    attention: Mapping[AttentionBatch, float]  # the mean of the layers, of which some may have a sliding window


@dataclass(frozen=True, slots=True, kw_only=True)
class UntimedCosts:
    """Costs that no kernel's time contains: CPU time per step, latency of an all-reduce, and the link's bandwidth."""

    cpu_s: float = 0.0
    all_reduce_s: float = 0.0
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that are no spans of time or no bandwidth."""
        require_seconds("cpu_overhead_ms", self.cpu_s)
        require_seconds("all_reduce_us", self.all_reduce_s)
        if self.link_bytes_per_s is not None and not self.link_bytes_per_s > 0:
            raise ValueError(f"link_gb_per_s: must be above 0, not {self.link_bytes_per_s / 1e9:g}")


def times_a_step(share: Share) -> dict[str, int]:
    """Return how often each dense kernel runs in a step; the last norm is before the head."""
    model, layers = share.model, share.model.num_layers
    projections = LATENT_KERNELS if model.latent else ATTENTION_KERNELS
    times = {"embedding": 1, "norm": 2 * layers + 1, **dict.fromkeys(projections, layers)}
    if share.has_qk_norm:
        times["qk_norm"] = layers
    if model.num_dense_layers:
        times |= dict.fromkeys(MLP_KERNELS, model.num_dense_layers)
    if model.experts:
        times |= dict.fromkeys(EXPERT_KERNELS, model.experts.num_layers)
        if share.shared_size:
            times |= {f"shared_{name}": model.experts.num_layers for name in MLP_KERNELS}
    return times


def dense_seconds(timings: Timings, share: Share) -> tuple[Array, Array]:
    """Sum up the dense kernels of a step, at the counts of tokens at which all of them were timed."""
    times = times_a_step(share)
    counts = sorted(set.intersection(*(set(timings.dense[name]) for name in times)))
    seconds = [sum(often * timings.dense[name][count] for name, often in times.items()) for count in counts]
    return np.array(counts, dtype=float), np.array(seconds)


def composed(timings: Timings, share: Share) -> Steps:
    """Return a whole step for each batch whose attention was timed, within the range of the other kernels."""
    tokens, dense = dense_seconds(timings, share)
    sequences, head = _curve_of(timings.head)
    batches = [
        batch for batch in timings.attention if batch.num_tokens <= tokens[-1] and len(batch.lengths) <= sequences[-1]
    ]
    steps = _steps_of(batches)
    seconds = share.model.num_layers * np.array([timings.attention[batch] for batch in batches])
    seconds += np.interp(steps.num_tokens, tokens, dense) + np.interp(steps.num_sampled, sequences, head)
    return replace(steps, seconds=seconds)


def fit_kernels(timings: Timings, share: Share, untimed: UntimedCosts) -> tuple[StepTime, HeldOutError, ValidRange]:
    """Fit a step time to all timings; its error is that of the same fit to four fifths, on the other fifth."""
    whole = composed(timings, share)
    tokens, _ = dense_seconds(timings, share)
    if len(whole) < MIN_BATCHES or len(tokens) < 2:
        raise ValueError(
            f"budget: {len(whole)} batches and {len(tokens)} counts of tokens are too few to fit, {MIN_BATCHES} and"
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
    return with_untimed(every, share, untimed), error, valid


def with_untimed(step_time: StepTime, share: Share, untimed: UntimedCosts) -> StepTime:
    """Add the untimed costs: CPU time to each step, and two all-reduces to each layer."""
    devices, layers = share.tensor_parallel, share.model.num_layers
    if devices == 1:
        return replace(step_time, constant_s=rounded(step_time.constant_s + untimed.cpu_s))
    constant_s = untimed.cpu_s + ALL_REDUCES_A_LAYER * layers * untimed.all_reduce_s
    token_s = 0.0
    if untimed.link_bytes_per_s is not None:  # a ring transfers each hidden state this often
        passed = 2 * (devices - 1) / devices * share.model.hidden_size * BYTES_OF[share.dtype]
        token_s = ALL_REDUCES_A_LAYER * layers * passed / untimed.link_bytes_per_s
    return replace(
        step_time,
        constant_s=rounded(step_time.constant_s + constant_s),
        token_s=rounded(step_time.token_s + token_s),
    )


def _fit(timings: Timings, share: Share, whole: Steps, chosen: np.ndarray) -> StepTime:
    """Fit attention to the difference between whole steps and the curves of the other kernels."""
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
    """Return a shape with a knot at each number of decodes, and at every second one for decodes beside chunks."""
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
    """Return batches as steps of zero seconds; the chunk is its prompt's last one, so it samples a token."""
    chunk, before, decodes, context = (
        np.array([getattr(batch, name) for batch in batches], dtype=float)
        for name in ("chunk", "before", "num_decodes", "context")
    )
    return equal_decodes(chunk, before, decodes, context, np.zeros(len(batches)))


def _curve_of(timed: Mapping[int, float]) -> tuple[Array, Array]:
    counts = sorted(timed)
    return np.array(counts, dtype=float), np.array([timed[count] for count in counts])
