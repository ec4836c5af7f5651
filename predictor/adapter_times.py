"""How long LoRA adapters take to load, learnt from the steps that load some."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MOMENTUM = 0.7  # of what is known so far, beside one more step
LONGEST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTimes:
    """Seconds until an adapter is in host memory, and from there in a GPU slot; 0 where they are not known."""

    load_s: float = 0.0
    activate_s: float = 0.0
    num_observed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible times."""
        for name in ("load_s", "activate_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}: must be at least 0, not {getattr(self, name)}")

    def observe(self, *, num_loads: int, num_activations: int, extra_s: float) -> AdapterTimes:
        """Learn from a step that loaded adapters, and took `extra_s` longer than its batch explains."""
        if num_loads + num_activations <= 0 or not math.isfinite(extra_s):
            return self
        extra_s = min(max(0.0, extra_s), LONGEST_S * (num_loads + num_activations))
        if num_loads == 0:
            return replace(
                self, activate_s=_mixed(self.activate_s, extra_s / num_activations), num_observed=self.num_observed + 1
            )
        each_s = max(0.0, extra_s - num_activations * self.activate_s) / num_loads
        return replace(self, load_s=_mixed(self.load_s, each_s), num_observed=self.num_observed + 1)


def _mixed(known_s: float, seen_s: float) -> float:
    return seen_s if known_s == 0 else MOMENTUM * known_s + (1 - MOMENTUM) * seen_s
