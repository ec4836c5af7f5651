"""Timing of planned kernels within a time budget; kernels that would exceed it are left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from predictor.fitting.kernel_plan import (
    NUM_MIXES,
    AttentionBatch,
    Reach,
    chunks,
    decodes,
    mixes,
    parts_of,
    sequence_counts,
    token_counts,
)
from predictor.fitting.kernel_profile import Timings, times_a_step
from predictor.fitting.model_shard import Share
from services.profiling.torch_attention import attention_for
from services.profiling.torch_device import Stopwatch, stopwatch_for
from services.profiling.torch_kernels import TorchLayer

Progress = Callable[[float], None]
OutOfMemoryError = torch.cuda.OutOfMemoryError
P = TypeVar("P")
T = TypeVar("T")

# The shares of the budget at which each kind of kernels must end.
DENSE_UNTIL, HEAD_UNTIL, DECODES_UNTIL, CHUNKS_UNTIL, MIXES_UNTIL = 0.4, 0.45, 0.65, 0.8, 1.0
SHORTEST_SAMPLE_S, LONGEST_SAMPLE_S = 1e-3, 20e-3  # to time one kernel
SAMPLES_SHARE = 0.5  # of the budget; the rest is for warm-up and for allocating data


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernels:
    """The timings, the attention that was used, and the duration."""

    timings: Timings
    attention: str
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOptions:
    """What to time, up to which sizes, on which device, and the time budget."""

    share: Share
    reach: Reach
    device: torch.device
    budget_s: float
    seed: int = 0


@torch.inference_mode()
def time_kernels(
    options: TimingOptions,
    progress: Progress,
    stopwatch: Callable[[torch.device, float], Stopwatch] = stopwatch_for,
) -> TimedKernels:
    """Time all kernels of one device's shard, for as many token counts and batches as the budget allows."""
    share, reach = options.share, options.reach
    counts, sequences, decode_batches, chunk_batches = (
        token_counts(reach),
        sequence_counts(reach),
        decodes(reach),
        chunks(reach),
    )
    num_batches = len(decode_batches) + len(chunk_batches) + NUM_MIXES
    budget = _Budget(options.budget_s, len(counts) + len(sequences) + num_batches, progress)
    num_kernels = len(counts) * len(times_a_step(share)) + len(sequences) + num_batches
    sample_s = float(np.clip(SAMPLES_SHARE * options.budget_s / num_kernels, SHORTEST_SAMPLE_S, LONGEST_SAMPLE_S))
    watch = stopwatch(options.device, sample_s)
    layer = TorchLayer(share, options.device)
    attention = attention_for(share, options.device, [*decode_batches, *chunk_batches])

    def dense(count: int) -> dict[str, float]:
        return {name: watch.seconds(run) for name, run in layer.dense(count).items()}

    model = share.model
    full = model.num_attention_layers - model.num_windowed_layers

    def attended(batch: AttentionBatch) -> float:
        """Time a layer, or the mean of the layers where some have a window."""
        total = full * watch.seconds(attention.of(batch)) if full else 0.0
        if model.window:
            total += model.num_windowed_layers * watch.seconds(attention.of(batch, model.window.num_tokens))
        return total / model.num_attention_layers

    by_count = budget.spend(DENSE_UNTIL, counts, float, dense)
    head = budget.spend(HEAD_UNTIL, sequences, float, lambda count: watch.seconds(layer.head(count)))
    of_decodes = budget.spend(DECODES_UNTIL, decode_batches, lambda batch: batch.work, attended)
    of_chunks = budget.spend(CHUNKS_UNTIL, chunk_batches, lambda batch: batch.work, attended)
    separate = {**of_decodes, **of_chunks}
    mixed = mixes(of_chunks, of_decodes, reach, np.random.default_rng(options.seed))
    of_mixed = budget.spend(MIXES_UNTIL, mixed, lambda batch: sum(separate[part] for part in parts_of(batch)), attended)
    progress(1.0)
    return TimedKernels(
        timings=Timings(
            dense={name: {count: by_count[count][name] for count in by_count} for name in times_a_step(share)},
            head=head,
            attention={**separate, **of_mixed},
        ),
        attention=attention.name,
        took_s=budget.spent_s,
    )


class _Budget:
    """The time budget, and the progress of the plan."""

    def __init__(self, budget_s: float, num_points: int, progress: Progress) -> None:
        self._start_s = time.monotonic()
        self._budget_s = budget_s
        self._num_points = num_points
        self._num_done = 0
        self._progress = progress

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def spend(
        self, until: float, points: Iterable[P], work_of: Callable[[P], float], timed: Callable[[P], T]
    ) -> dict[P, T]:
        """Time one point after another; skip those that would end after the share `until` of the budget."""
        found: dict[P, T] = {}
        max_work = took_s = 0.0
        for point in points:
            self._num_done += 1
            work = work_of(point)
            if found and self.spent_s + took_s * max(1.0, work / max_work) > until * self._budget_s:
                continue
            begin_s = time.monotonic()
            found[point] = timed(point)
            if work >= max_work:
                max_work, took_s = work, time.monotonic() - begin_s
            self._progress(min(1.0, self._num_done / self._num_points))
        return found
