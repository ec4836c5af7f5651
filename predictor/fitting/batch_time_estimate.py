"""How long a batch will take, roughly, by what was seen so far: enough to keep to a budget."""

from __future__ import annotations

import numpy as np

from predictor.fitting.measurement_batches import Batch, BatchLimits

FEWEST_STEPS = 8
AROUND_S = 0.05  # a request takes so much beside its steps, at most


class Rough:
    """A law of three numbers: seconds a step, a token, and a token of context."""

    def __init__(self) -> None:
        """Know nothing."""
        self._law: np.ndarray | None = None

    def learn(self, steps: np.ndarray) -> None:
        """Fit the law to steps (`layout.STEP`)."""
        if len(steps) >= FEWEST_STEPS:
            from scipy.optimize import nnls  # takes a while to import

            context = steps["decode_context"] + steps["prefill_qkv"] / np.maximum(1, steps["num_tokens"])
            matrix = np.column_stack((np.ones(len(steps)), steps["num_tokens"], context))
            self._law, _ = nnls(matrix.astype(float), steps["seconds"].astype(float))

    def seconds(self, batch: Batch, room: BatchLimits) -> float:
        """Foretell a batch; nothing where nothing is known yet."""
        if self._law is None:
            return 0.0
        prompts = sum(piece.prompt_tokens for piece in batch.pieces)
        answers = sum(piece.output_tokens for piece in batch.pieces)
        in_turn = max(len(stream) for stream in batch.streams)
        longest = max(sum(piece.output_tokens for piece in stream) for stream in batch.streams)
        steps = longest + max(in_turn, prompts / room.step_tokens)
        context = sum((piece.prompt_tokens + piece.output_tokens / 2) * piece.output_tokens for piece in batch.pieces)
        return float(self._law @ (steps, prompts + answers, context)) + in_turn * AROUND_S
