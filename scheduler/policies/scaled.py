"""Bringing indicators of different units onto one scale."""

from __future__ import annotations

import numpy as np

from scheduler.indicators import Column


def of_highest(column: Column) -> Column:
    """Divide by the highest value that is known; where all are zero, they stay so."""
    highest = column.max(initial=0.0)
    if highest != highest:  # noqa: PLR0124 - NaN: some are not known
        highest = np.fmax.reduce(column, initial=0.0)
    return column / highest if highest > 0 else column
