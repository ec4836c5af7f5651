"""Hooks, which carry actions out: one kind per file. All are idempotent by action id."""

from __future__ import annotations

import logging
from typing import Protocol

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from services.logs import log_event

log = logging.getLogger(__name__)


class HookError(Exception):
    """An action was not carried out; it may be retried, unless the failure is `permanent`."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        """Note the reason."""
        super().__init__(message)
        self.permanent = permanent


class Hook(Protocol):
    """Starts and ends instances. By default a hook knows no instances itself, and any of them may be removed."""

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Carry an action out; a repeated one has no further effect, and the same reply."""

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Return the instances; None where only replies name them."""
        return None

    def fixed_choice(self, instance_ids: list[str], num: int) -> list[str] | None:
        """Return the instances that would be removed, where the provisioner cannot choose; else None."""
        del instance_ids, num
        return None

    async def close(self) -> None:
        """Close connections; instances keep running."""


def require_done(reply: pb.HookReply, action: pb.Action) -> pb.HookReply:
    """Raise HookError for a refusal, or for a reply to another action."""
    if reply.action_id and reply.action_id != action.action_id:
        raise HookError(f"the reply names action {reply.action_id}, not {action.action_id}")
    if reply.refused:
        raise HookError(f"refused: {reply.message or 'no reason was given'}", permanent=True)
    return reply


class DryRun(Hook):
    """Logs actions instead of carrying them out."""

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Log an action."""
        log_event(
            log, logging.INFO, "action not carried out: dry run", action=action.action_id,
            kind=pb.ActionKind.Name(action.kind), num=action.num_instances, ids=",".join(action.instance_ids),
            why=action.why,
        )  # fmt: skip
        return pb.HookReply(action_id=action.action_id, message="dry run")

    async def close(self) -> None:
        """Do nothing."""
