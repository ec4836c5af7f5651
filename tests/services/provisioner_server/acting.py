"""A leader that is driven tick by tick, and a hook that notes what it is told and may fail, or die, when it is told to."""

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
    """The end of a process, as far as a test can have it."""


class Noting:
    """Starts instances in name only, each once."""

    def __init__(self, world: set[str]) -> None:
        """Share the instances that there are with others of its kind: they outlive it."""
        self.world = world
        self.heard: list[pb.Action] = []
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Do as told; the same action twice is done once."""
        heard = pb.Action()
        heard.CopyFrom(action)
        self.heard.append(heard)
        self.before()
        reply = pb.HookReply(action_id=action.action_id)
        if action.kind == pb.ACTION_KIND_START:
            names = [f"{action.action_id}-{number}" for number in range(action.num_instances)]
            self.world.update(names)
            reply.instances.extend(
                common_pb2.Instance(instance_id=name, engine_url="http://127.0.0.1:1", sidecar_address="127.0.0.1:1")
                for name in names
            )
        else:
            self.world.difference_update(action.instance_ids)
        self.after()
        return reply

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Tell who is there."""
        return [
            common_pb2.Instance(instance_id=name, engine_url="http://127.0.0.1:1", sidecar_address="127.0.0.1:1")
            for name in sorted(self.world)
        ]

    def leavers(self, instance_ids: list[str], num: int) -> list[str] | None:
        """Leave the choice free."""
        return None

    async def close(self) -> None:
        """Hold nothing."""


class Answering:
    """Sidecars that say what a test wants them to say."""

    def __init__(self) -> None:
        """All are ready and idle."""
        self.condition = Condition(is_ready=True, num_there=0)

    async def conditions(self, members: Any) -> dict[str, Condition]:
        """Answer for all that can be asked."""
        return {member.instance_id: self.condition for member in members if member.has_address}

    async def forget(self, *_: str) -> None:
        """Have nothing to forget."""

    async def close(self) -> None:
        """Have nothing to close."""


def settings(folder: Path, **changes: Any) -> ProvisionerSettings:
    """Keep two to four instances, and wait for nothing."""
    limits = ScalingLimits(min_instances=2, max_instances=4, cooldown_s=0.0, **changes.pop("limits", {}))
    return ProvisionerSettings(folder=str(folder), limits=limits, provisioner_id="one", settle_s=1e-3, **changes)


def leader(folder: Path, hook: Any, own_id: str = "one", **changes: Any) -> Leader:
    """Make one; that it takes the lease is its own business."""
    measures = ProvisionerMetrics(CollectorRegistry())
    made = Leader(Pool(settings(folder, **changes), measures), hook, FileLease(folder / "lease", own_id), measures)
    made._sidecars = Answering()
    return made


def failing(times: int, *, useless: bool = False) -> Callable[[], None]:
    """Fail so often, then work."""
    left = [times]

    def fail() -> None:
        if left[0]:
            left[0] -= 1
            raise HookError("not now", useless=useless)

    return fail


def dying() -> Callable[[], None]:
    """Die once."""
    left = [1]

    def die() -> None:
        if left[0]:
            left[0] = 0
            raise DeathError

    return die
