"""Adapter affinity: an instance that has the request's LoRA adapter, unless another one is predicted to be faster."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = predicted e2e; less the bound where the adapter is active and the predicted e2e is within the bound.

    The bound is the best predicted e2e, and `slack` of it. Forecasts include the time that loading an adapter takes;
    the policy keeps the adapters of later requests loaded.
    """
    slack = parameters["slack"]

    def score(candidates: Candidates) -> Column:
        predicted_s = candidates["predicted_e2e_s"]
        bound_s = (1.0 + slack) * np.fmin.reduce(predicted_s, initial=np.inf)
        if bound_s == np.inf:  # nothing is predicted to end
            return predicted_s
        is_near = (candidates["adapter_active"] > 0) & (predicted_s <= bound_s)
        return np.where(is_near, predicted_s - bound_s, predicted_s)

    return score
