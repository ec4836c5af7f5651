"""Response lengths as schedulers predict them from tags, in the compiled code of simulated clusters."""

from __future__ import annotations

import numpy as np

from predictor.compiled import small_kernel
from simulator.fleet_arrays import EngineArrays

RESIDUAL_LOW, RESIDUAL_HIGH = -8.0, 8.0


@small_kernel
def predicted_tokens(log_median: float, spread: float, produced: int, residual: np.ndarray) -> int:
    """Predict a response's total length as `predictor.lengths` does, from a table over standard scores."""
    if spread <= 0.0 or produced == 0 or len(residual) == 0:
        median = np.exp(log_median)
        whole = median if median > produced else produced + 10.0
    else:
        score = (np.log(produced) - log_median) / spread
        if score <= RESIDUAL_LOW:
            shifted = residual[0]
        elif score >= RESIDUAL_HIGH:
            shifted = score + (residual[-1] - RESIDUAL_HIGH) * RESIDUAL_HIGH / score
        else:
            position = (score - RESIDUAL_LOW) / (RESIDUAL_HIGH - RESIDUAL_LOW) * (len(residual) - 1)
            below = int(position)
            shifted = residual[below] + (position - below) * (residual[below + 1] - residual[below])
        whole = np.exp(log_median + spread * shifted)
    return max(produced + 1, int(min(2147483647.0, np.ceil(whole - 0.5))))


@small_kernel
def remaining_tokens_of(fleet: EngineArrays, request: np.record, entry: np.record) -> int:
    """Predict how many tokens of a response remain."""
    if np.isnan(entry.log_median):
        return request.final_tokens - request.output_tokens
    whole = predicted_tokens(entry.log_median, entry.spread, request.output_tokens, fleet.residual)
    return min(whole, request.max_tokens) - request.output_tokens
