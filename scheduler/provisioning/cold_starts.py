"""How long instances take from being asked for to being ready: measured, and learnt."""

from __future__ import annotations

from collections import deque

import numpy as np

KEPT = 16
CAUTION = 0.75  # the quantile of what was measured that is reckoned with
PATIENCE = 3.0  # times the expected time, after which an instance is given up
LEAST_PATIENCE_S = 30.0


class ColdStarts:
    """Remembers the last few; before the first, what it was told."""

    def __init__(self, initial_s: float) -> None:
        """Know nothing but a guess."""
        self._initial_s = initial_s
        self._measured: deque[float] = deque(maxlen=KEPT)

    def measured(self, took_s: float) -> None:
        """Learn how long one took."""
        if took_s >= 0:
            self._measured.append(took_s)

    @property
    def num_measured(self) -> int:
        """How many it rests on."""
        return len(self._measured)

    @property
    def expected_s(self) -> float:
        """How long the next one will take, on the safe side."""
        return float(np.quantile(list(self._measured), CAUTION)) if self._measured else self._initial_s

    @property
    def given_up_after_s(self) -> float:
        """How long to wait for one."""
        return max(LEAST_PATIENCE_S, PATIENCE * self.expected_s)
