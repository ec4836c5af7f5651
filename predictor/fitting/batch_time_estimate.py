"""Rough predictions of how long measurement batches take, so that a measurement keeps to its time budget."""

from __future__ import annotations

import numpy as np

from predictor.fitting.measurement_batches import Batch, BatchLimits

MIN_STEPS = 8
OVERHEAD_S = 0.05  # upper bound of a request's time outside of steps


class BatchTimeEstimate:
    """A linear model of three coefficients: seconds per step, per token, and per token of context."""

    def __init__(self) -> None:
        """Initialise it without coefficients."""
        self._coefficients: np.ndarray | None = None

    def fit(self, steps: np.ndarray) -> None:
        """Fit the coefficients to steps (`layout.STEP`)."""
        if len(steps) >= MIN_STEPS:
            from scipy.optimize import nnls  # takes a while to import

            context = steps["decode_context"] + steps["prefill_qkv"] / np.maximum(1, steps["num_tokens"])
            matrix = np.column_stack((np.ones(len(steps)), steps["num_tokens"], context))
            self._coefficients, _ = nnls(matrix.astype(float), steps["seconds"].astype(float))

    def seconds(self, batch: Batch, limits: BatchLimits) -> float:
        """Predict the seconds of a batch; 0 before the first fit."""
        if self._coefficients is None:
            return 0.0
        prompts = sum(item.prompt_tokens for item in batch.items)
        answers = sum(item.output_tokens for item in batch.items)
        in_turn = max(len(stream) for stream in batch.streams)
        longest = max(sum(item.output_tokens for item in stream) for stream in batch.streams)
        steps = longest + max(in_turn, prompts / limits.step_tokens)
        context = sum((item.prompt_tokens + item.output_tokens / 2) * item.output_tokens for item in batch.items)
        return float(self._coefficients @ (steps, prompts + answers, context)) + in_turn * OVERHEAD_S
