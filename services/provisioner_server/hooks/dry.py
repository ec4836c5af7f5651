"""A hook that does nothing: the journal and the log say what would be done."""

from __future__ import annotations

import logging

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from services.logs import log_event

log = logging.getLogger(__name__)


class DryRun:
    """Says what it would have another one do."""

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Say it."""
        log_event(log, logging.INFO, "would act", action=action.action_id, kind=pb.ActionKind.Name(action.kind),
            num=action.num_instances, ids=",".join(action.instance_ids), why=action.why)  # fmt: skip
        return pb.HookReply(action_id=action.action_id, message="dry run")

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Know of none."""
        return None

    def leavers(self, instance_ids: list[str], num: int) -> list[str] | None:
        """Leave the choice free."""
        del instance_ids, num
        return None

    async def close(self) -> None:
        """Hold nothing."""
