"""Block: the instance on which the request is predicted to finish first (Block §4.2, §5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.instances import InstanceView


def lowest_e2e(views: Sequence[InstanceView]) -> list[float]:
    """Score = predicted e2e; an instance without a forecast comes after all that have one."""
    return [math.inf if view.forecast is None else view.forecast.e2e_s for view in views]
