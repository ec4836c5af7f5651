"""Random: any instance, without looking (Block §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scheduler.instances import InstanceView


def uniform(generator: np.random.Generator) -> Callable[[Sequence[InstanceView]], list[float]]:
    """Score = a fresh random number."""

    def policy(views: Sequence[InstanceView]) -> list[float]:
        return [float(number) for number in generator.random(len(views))]

    return policy
