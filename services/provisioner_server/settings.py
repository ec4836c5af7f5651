"""Settings of the provisioner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from scheduler.provisioning import RULE_NAMES, TIERS, rule_from
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from scheduler.provisioning.tiers import Tiers, require_room, tiers_in
from services.rpc.messages import require_name
from services.security.own_key import PartKeyFile
from services.settings import PORTS, Nested, Option
from simulator.codec import read_text

HOOKS = ("process", "exec", "webhook", "kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionerSettings:
    """The pool, the rule that sizes it, and the folder for what must survive a restart.

    Provisioners that share a folder, or a Kubernetes Lease, share its pool: one of them acts.
    """

    folder: Annotated[str, Option("Folder for the journal, the lease and the list of instances.", metavar="DIR")]
    part_key_file: PartKeyFile = ""
    pool: Annotated[str, "Name of the pool of instances."] = "default"
    model: Annotated[str, Option("Model that the instances serve.", unset="any")] = ""
    rule: Annotated[
        str, f"Rule that sizes the pool: one of {', '.join(RULE_NAMES)}, or several joined by + (the largest counts)."
    ] = "headroom"
    tiers: Annotated[
        str,
        Option(
            "TOML file with a table [[tier]] for each tier, between which instances move. The rule `tiers` needs it.",
            metavar="FILE",
        ),
    ] = ""
    tier_hold_s: Annotated[
        float,
        "Time that an instance stays in a tier at least, and after the tier's last request there, in seconds.",
    ] = 5.0
    schedule: Annotated[str, "Times of the rule `schedule`, in UTC: 'mon-fri 07:30-19:00=8; 00:00-07:30=2'."] = ""
    objectives: Annotated[ScalingObjectives, Nested()] = field(default_factory=ScalingObjectives)
    limits: Annotated[ScalingLimits, Nested()] = field(default_factory=ScalingLimits)
    provisioner_id: Annotated[str, Option("Name of this provisioner.", unset="HOSTNAME/PID")] = ""
    tick_s: Annotated[float, "Interval between two evaluations of the rule, in seconds."] = 1.0
    drain_s: Annotated[
        float,
        Option("Maximum time to wait for the requests of an instance that leaves, in seconds.", name="leave_s"),
    ] = 300.0
    migrate: Annotated[bool, "Move the requests of an instance that leaves to other instances after --migrate-s."] = (
        True
    )
    migrate_s: Annotated[
        float, "Time after which requests that an instance which leaves still has move to other ones, in seconds."
    ] = 60.0
    settle_s: Annotated[float, "Time for schedulers to notice that an instance is leaving, in seconds."] = 3.0
    attempts: Annotated[int, "Maximum number of attempts at one action before it counts as failed."] = 8
    dry_run: Annotated[bool, "Log the actions without carrying them out."] = False

    def __post_init__(self) -> None:
        """Refuse settings that no provisioner can have."""
        if not self.folder:
            raise ValueError("folder: is missing")
        require_name("pool", self.pool)
        if not all(character.isalnum() or character in "-_." for character in self.pool):
            raise ValueError(f"pool: {self.pool!r} must be of letters, digits, dots, dashes and underscores")
        rule_from(self.rule, self.objectives, self.schedule)
        if TIERS in self.rule.split("+") and not self.tiers:
            raise ValueError("tiers: is missing; the rule tiers needs a file of them")
        require_room(self.read_tiers(), self.limits.max_instances)
        for name in ("tick_s", "drain_s", "migrate_s", "settle_s", "tier_hold_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a time above 0, not {value}")
        if self.attempts < 1:
            raise ValueError(f"attempts: must be at least 1, not {self.attempts}")

    def read_tiers(self) -> Tiers:
        """Read the file of tiers; there are none without a file."""
        return tiers_in(read_text(self.tiers), self.tiers) if self.tiers else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSettings:
    """The hook that starts and stops instances, with the settings of each kind of hook."""

    hook: Annotated[str, Option("How instances are started and stopped.", choices=HOOKS)] = "process"
    engine_command: Annotated[
        str,
        Option(
            "process: command line of an engine; {port}, {name} and {state} are replaced.", unset="an emulated engine"
        ),
    ] = ""
    engine_flags: Annotated[str, "process: flags of the emulated engines."] = ""
    sidecar_flags: Annotated[str, "process: flags of the sidecars."] = ""
    keep_instances: Annotated[
        bool,
        Option("process: whether instances keep running when the provisioner stops.", negative="--end-instances"),
    ] = True
    command: Annotated[
        str, Option("exec: command that receives each action as JSON on standard input.", name="exec")
    ] = ""
    webhook: Annotated[str, "webhook: URL that receives each action."] = ""
    webhook_secret: Annotated[str, "webhook: secret that signs the actions."] = ""
    hook_timeout_s: Annotated[float, "exec, webhook: maximum time for one action, in seconds."] = 60.0
    kubernetes: Annotated[
        str, "kubernetes: NAMESPACE/deployment/NAME or NAMESPACE/statefulset/NAME whose scale is set."
    ] = ""
    engine_port: Annotated[int, "kubernetes: port of the engine in each pod."] = PORTS["engine"]
    sidecar_port: Annotated[int, "kubernetes: port of the sidecar in each pod."] = PORTS["predictor"]
    lease: Annotated[
        str,
        Option(
            "Kubernetes Lease by which one provisioner of several is elected.",
            metavar="NAMESPACE/NAME",
            unset="a lock file in the folder",
        ),
    ] = ""

    def __post_init__(self) -> None:
        """Refuse a time that is none."""
        if not 0 < self.hook_timeout_s < 1e6:
            raise ValueError(f"hook_timeout_s: must be a time above 0, not {self.hook_timeout_s}")
