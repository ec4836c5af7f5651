"""The time from the request for an instance until it is ready, learned from measurements."""

from __future__ import annotations

from collections import deque

import numpy as np

MAX_MEASUREMENTS = 16
QUANTILE = 0.75  # of the measurements
PATIENCE = 3.0  # times the predicted cold start, after which an instance is given up
LEAST_PATIENCE_S = 30.0


class ColdStarts:
    """Predicts the next cold start from the last few; before the first, from a setting."""

    def __init__(self, initial_s: float) -> None:
        """Start with the prediction that holds until the first measurement."""
        self._initial_s = initial_s
        self._measured_s: deque[float] = deque(maxlen=MAX_MEASUREMENTS)

    def measured(self, cold_start_s: float) -> None:
        """Add a measurement."""
        if cold_start_s >= 0:
            self._measured_s.append(cold_start_s)

    @property
    def num_measured(self) -> int:
        """The number of measurements."""
        return len(self._measured_s)

    @property
    def predicted_s(self) -> float:
        """The time that the next instance will take, rather too long than too short."""
        return float(np.quantile(list(self._measured_s), QUANTILE)) if self._measured_s else self._initial_s

    @property
    def given_up_after_s(self) -> float:
        """The time after which an instance that is not ready is given up."""
        return max(LEAST_PATIENCE_S, PATIENCE * self.predicted_s)
