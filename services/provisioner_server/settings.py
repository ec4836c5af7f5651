"""What a provisioner can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler.provisioning import rule_from
from scheduler.provisioning.limits import Aims, ScalingLimits
from services.rpc.messages import require_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionerSettings:
    """Which pool it looks after, by which rule, and where it keeps what must survive it.

    Provisioners that share a folder, or a Lease, share its pool: one of them acts.
    """

    folder: str
    pool: str = "default"
    model: str = ""
    rule: str = "headroom"
    schedule: str = ""
    aims: Aims = field(default_factory=Aims)
    limits: ScalingLimits = field(default_factory=ScalingLimits)
    provisioner_id: str = ""
    tick_s: float = 1.0
    drain_s: float = 300.0  # longest wait for a leaving instance's requests
    settle_s: float = 3.0  # for schedulers to hear that an instance is leaving
    attempts: int = 8  # at one action, before it counts as failed
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Refuse what makes no sense, by name."""
        if not self.folder:
            raise ValueError("folder: is missing")
        require_name("pool", self.pool)
        if not all(character.isalnum() or character in "-_." for character in self.pool):
            raise ValueError(f"pool: {self.pool!r} must be of letters, digits, dots, dashes and underscores")
        rule_from(self.rule, self.aims, self.schedule)
        for name in ("tick_s", "drain_s", "settle_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a time above 0, not {value}")
        if self.attempts < 1:
            raise ValueError(f"attempts: must be at least 1, not {self.attempts}")
