"""What carries actions out: one way per file, in a table made by the command line. All are idempotent by action id."""

from __future__ import annotations

from typing import Protocol

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb


class HookError(Exception):
    """An action was not carried out; the same one may be tried again, unless that would be `useless`."""

    def __init__(self, message: str, *, useless: bool = False) -> None:
        """Say what went wrong."""
        super().__init__(message)
        self.useless = useless


class Hook(Protocol):
    """Starts instances, and ends them."""

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Carry an action out; one that was carried out already is only answered again."""

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Tell which instances there are, as far as it knows where; None where it cannot know."""

    def leavers(self, instance_ids: list[str], num: int) -> list[str] | None:
        """Tell which ones would go, where that is not free to choose."""

    async def close(self) -> None:
        """Let go of what it holds; instances go on."""


def require_done(reply: pb.HookReply, action: pb.Action) -> pb.HookReply:
    """Refuse a reply that is a refusal, or to another action."""
    if reply.action_id and reply.action_id != action.action_id:
        raise HookError(f"the reply is to {reply.action_id}, not to {action.action_id}")
    if reply.refused:
        raise HookError(f"refused: {reply.message or 'no reason was given'}", useless=True)
    return reply
