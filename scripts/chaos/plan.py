"""The plan of a chaos run: which fault happens to which part, when, and for how long; the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

ENGINES_PER_SIDECAR = 2
MIN_S, MAX_S = 1.0, 8.0  # how long a fault lasts that ends by itself
ENDS_PROCESS = ("kill", "restart", "torn_journal")
AT_ONCE = (*ENDS_PROCESS, "garble_state", "reset_link")  # they last for no time
NO_PART = "none"

KILLED = ("engine", "predictor", "scheduler", "tagger", "provisioner")
WEIGHTS = {"engine": 6.0, "predictor": 3.0, "scheduler": 2.0, "gateway": 2.0}  # of kinds of parts; others have 1

CLOCKED = ("engine", "predictor", "gateway", "tagger", "provisioner")  # schedulers hang by libfaketime itself, unmoved

# Every other kind of fault: its weight, and the kinds of parts that it may happen to.
OTHERS: dict[str, tuple[float, tuple[str, ...]]] = {
    "stop": (3.0, ("engine", "predictor", "scheduler", "tagger", "provisioner")),
    "crawl": (2.0, ("engine", "predictor", "scheduler", "gateway")),
    "hang": (1.0, ("engine",)),
    "slow": (1.0, ("engine",)),
    "garble_state": (1.0, ("engine",)),
    "garble_instances": (1.0, ("instances",)),
    "torn_journal": (1.0, ("provisioner",)),
    "restart": (2.0, ("gateway",)),
    "delay_link": (2.0, ("engine-link", "sidecar-link")),
    "narrow_link": (1.0, ("engine-link", "sidecar-link")),
    "stall_link": (2.0, ("engine-link", "sidecar-link")),
    "reset_link": (2.0, ("engine-link", "sidecar-link")),
    "full_disk": (2.0, ("disk",)),
    "clock_jump": (2.0, CLOCKED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """The cluster, its load and how often something breaks."""

    minutes: float = 1.0
    every_s: float = 10.0  # from one kill to the next; another fault happens between two of them
    engines: int = 4
    schedulers: int = 2
    gateways: int = 2
    rate: float = 12.0
    tokens: int = 60
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be run, naming the field."""
        for name in ("minutes", "every_s", "rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a number above 0, not {value}")
        for name in ("engines", "schedulers", "gateways", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")

    @property
    def num_sidecars(self) -> int:
        """The number of sidecar processes."""
        return -(-self.engines // ENGINES_PER_SIDECAR)

    @property
    def linked(self) -> range:
        """The numbers of the engines that are reached through a link which can fail; the others directly."""
        return range(1, self.engines, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault of the plan; `for_s` is 0 where it does not end by itself."""

    at_s: float
    kind: str
    part: str
    for_s: float = 0.0


def plan_of(settings: ChaosSettings) -> tuple[PlannedFault, ...]:
    """Draw the faults of a run: a kill every `every_s`, and another fault in the middle between two kills.

    Where there are several parts of a kind, the first one is never killed or restarted, so that its memory can be
    judged over the whole time.
    """
    draw = random.Random(settings.seed)
    faults: list[PlannedFault] = []
    for number in range(1, math.ceil(60.0 * settings.minutes / settings.every_s)):
        at_s = number * settings.every_s
        faults.append(_drawn(draw, settings, at_s, "kill", KILLED))
        kind = draw.choices(list(OTHERS), [weight for weight, _ in OTHERS.values()])[0]
        faults.append(_drawn(draw, settings, at_s + settings.every_s / 2, kind, OTHERS[kind][1]))
    return tuple(faults)


def _drawn(
    draw: random.Random, settings: ChaosSettings, at_s: float, kind: str, part_kinds: Sequence[str]
) -> PlannedFault:
    """Draw a part from those of some kinds, and how long the fault lasts."""
    choices = {one: parts_of(one, settings, ends=kind in ENDS_PROCESS) for one in part_kinds}
    weights = [WEIGHTS.get(one, 1.0) if choices[one] else 0.0 for one in part_kinds]
    part = draw.choice(choices[draw.choices(list(choices), weights)[0]]) if any(weights) else NO_PART
    for_s = 0.0 if kind in AT_ONCE else round(draw.uniform(MIN_S, MAX_S), 1)
    return PlannedFault(at_s=round(at_s, 1), kind=kind, part=part, for_s=for_s)


def kind_of(part: str) -> str:
    """Return the kind of a part: engine for engine-3."""
    kind, _, number = part.rpartition("-")
    return kind if number.isdigit() else part


def parts_of(kind: str, settings: ChaosSettings, *, ends: bool = False) -> list[str]:
    """Return the parts of a kind; without the first of several, where the fault `ends` a process."""
    numbers: dict[str, Sequence[int]] = {
        "engine": range(settings.engines),
        "predictor": range(settings.num_sidecars),
        "scheduler": range(settings.schedulers),
        "gateway": range(settings.gateways),
        "engine-link": settings.linked,
        "sidecar-link": settings.linked,
    }
    if kind not in numbers:
        return [kind]
    parts = [f"{kind}-{number}" for number in numbers[kind]]
    return parts[1:] if ends and len(parts) > 1 else parts
