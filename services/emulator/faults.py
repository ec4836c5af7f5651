"""Faults that an operator orders, to see what the rest of the system makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from predictor.suggestions import require_known

LARGEST_FACTOR = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with the engine: steps so many times as long, no steps at all, no new requests, sudden death."""

    slow: float = 1.0
    hang: bool = False
    refuse: bool = False
    crash: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no fault."""
        if isinstance(self.slow, bool) or not isinstance(self.slow, int | float):
            raise ValueError(f"slow: must be a number, not {self.slow!r}")
        if not (math.isfinite(self.slow) and 0 < self.slow <= LARGEST_FACTOR):
            raise ValueError(f"slow: must lie above 0 and at most at {LARGEST_FACTOR:g}, not {self.slow}")
        for name in ("hang", "refuse", "crash"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: must be true or false, not {getattr(self, name)!r}")


FAULT_NAMES = tuple(spec.name for spec in fields(Faults))


def faults_from(data: Any) -> Faults:
    """Read an order; what it does not name is well again."""
    if not isinstance(data, Mapping):
        raise ValueError(f"fault: must be an object with some of {', '.join(FAULT_NAMES)}")
    require_known(data, FAULT_NAMES, "fault")
    return Faults(**data)
