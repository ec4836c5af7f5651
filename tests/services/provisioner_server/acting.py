"""A leader that a test drives tick by tick, a hook that records its actions and fails on demand, and fixed sidecars."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.provisioning.limits import ScalingLimits
from services.provisioner_server.hooks import HookError
from services.provisioner_server.leader import Leader
from services.provisioner_server.lease import FileLease
from services.provisioner_server.metrics import ProvisionerMetrics
from services.provisioner_server.pool import Pool
from services.provisioner_server.settings import ProvisionerSettings
from services.provisioner_server.sidecars import Condition


class DeathError(BaseException):
    """The end of a process, simulated."""


class RecordingHook:
    """Starts instances by name only, each once."""

    def __init__(self, running: set[str]) -> None:
        """Share the running instances with other hooks, as they outlive a hook."""
        self.running = running
        self.actions: list[pb.Action] = []
        self.role = ""  # of all instances
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Carry an action out; a repeated one has no further effect."""
        copy = pb.Action()
        copy.CopyFrom(action)
        self.actions.append(copy)
        self.before()
        reply = pb.HookReply(action_id=action.action_id)
        if action.kind == pb.ACTION_KIND_START:
            names = [f"{action.action_id}-{number}" for number in range(action.num_instances)]
            self.running.update(names)
            reply.instances.extend(self._instance(name) for name in names)
        else:
            self.running.difference_update(action.instance_ids)
        self.after()
        return reply

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Return the running instances."""
        return [self._instance(name) for name in sorted(self.running)]

    def _instance(self, name: str) -> common_pb2.Instance:
        return common_pb2.Instance(
            instance_id=name, engine_url="http://127.0.0.1:1", sidecar_address="127.0.0.1:1", role=self.role
        )

    def fixed_choice(self, instance_ids: list[str], num: int) -> list[str] | None:
        """Return None: any instance may be removed."""
        return None

    async def close(self) -> None:
        """Do nothing."""


class FixedSidecars:
    """Sidecars that all report the same condition, but for some."""

    def __init__(self) -> None:
        """Report ready and idle."""
        self.condition = Condition(is_ready=True, num_requests=0, alone_step_s=0.01)
        self.others: dict[str, Condition] = {}  # by instance

    async def conditions(self, members: Any, *, with_step: bool = False) -> dict[str, Condition]:
        """Return the conditions of all that have an address."""
        del with_step
        return {
            member.instance_id: self.others.get(member.instance_id, self.condition)
            for member in members
            if member.has_address
        }

    async def forget(self, *_: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def settings(folder: Path, **changes: Any) -> ProvisionerSettings:
    """Keep two to four instances, without pauses."""
    limits = ScalingLimits(min_instances=2, max_instances=4, cooldown_s=0.0, **changes.pop("limits", {}))
    return ProvisionerSettings(folder=str(folder), limits=limits, provisioner_id="one", settle_s=1e-3, **changes)


def leader(folder: Path, hook: Any, own_id: str = "one", **changes: Any) -> Leader:
    """Make a leader, which does not hold the lease yet."""
    metrics = ProvisionerMetrics(CollectorRegistry())
    made = Leader(Pool(settings(folder, **changes), metrics), hook, FileLease(folder / "lease", own_id), metrics)
    made._sidecars = FixedSidecars()
    return made


def failing(times: int, *, permanent: bool = False) -> Callable[[], None]:
    """Fail a number of times, then work."""
    left = [times]

    def fail() -> None:
        if left[0]:
            left[0] -= 1
            raise HookError("not now", permanent=permanent)

    return fail


def dying() -> Callable[[], None]:
    """Simulate one crash."""
    left = [1]

    def die() -> None:
        if left[0]:
            left[0] = 0
            raise DeathError

    return die
