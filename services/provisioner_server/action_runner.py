"""Carries out the actions of a leader: starts, drains and stops instances by the hook, and moves them between tiers."""

from __future__ import annotations

import logging
import random
import time

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.backoff import Backoff
from services.instances.drains import NEVER, Drain
from services.logs import log_event
from services.provisioner_server.hooks import Hook, HookError
from services.provisioner_server.journal import Journal
from services.provisioner_server.metrics import ProvisionerMetrics
from services.provisioner_server.roster import DRAINING, READY, STARTING, Member, Roster, role_in_roster
from services.provisioner_server.settings import ProvisionerSettings
from services.provisioner_server.sidecars import Condition, Sidecars
from services.provisioner_server.tiers import TierMoves

log = logging.getLogger(__name__)

RETRY = Backoff(first_s=0.5, max_s=30.0, random=random.random)


class ActionRunner:
    """Carries out the actions in the journal of one leader; a failed one is retried after a pause."""

    def __init__(  # noqa: PLR0913 - what actions change
        self,
        settings: ProvisionerSettings,
        journal: Journal,
        roster: Roster,
        *,
        hook: Hook,
        sidecars: Sidecars,
        tiers: TierMoves,
        metrics: ProvisionerMetrics,
    ) -> None:
        """Start with the actions that the leader before has left in the journal."""
        self.journal = journal
        self._settings, self._roster = settings, roster
        self._hook, self._sidecars, self._tiers, self._metrics = hook, sidecars, tiers, metrics
        self._retry_at_s: dict[str, float] = {}  # by failed action

    def unstarted(self) -> list[pb.Action]:
        """Return the actions that start instances, and whose hook has not replied yet."""
        return [
            action
            for action in self.journal.under_way()
            if action.kind == pb.ACTION_KIND_START and action.state == pb.ACTION_STATE_WRITTEN
        ]

    def is_stopped(self, instance_id: str) -> bool:
        """Return whether an instance is being stopped."""
        return any(
            action.kind == pb.ACTION_KIND_STOP and instance_id in action.instance_ids
            for action in self.journal.under_way()
        )

    async def carry_out(self, action: pb.Action) -> None:
        """Go on with an action, as far as is possible now."""
        if self._retry_at_s.get(action.action_id, 0.0) > time.monotonic():
            return
        if action.kind == pb.ACTION_KIND_START:
            if action.state == pb.ACTION_STATE_WRITTEN:
                await self._start(action)
            else:
                self._finish_start(action)
        elif action.kind == pb.ACTION_KIND_DRAIN:
            await self._drain(action)
        elif action.kind == pb.ACTION_KIND_MOVE:
            self.move(action)
        elif await self._call_hook(action) is not None:
            self._roster.drop(*action.instance_ids)
            self.write(action, pb.ACTION_STATE_DONE)

    async def _start(self, action: pb.Action) -> None:
        action.num_desired = len(list(self._roster)) + sum(one.num_instances for one in self.unstarted())
        reply = await self._call_hook(action)
        if reply is None:
            return
        reported = list(reply.instances)[: action.num_instances]
        names = [one.instance_id for one in reported]
        names += [f"{action.action_id}-{number}" for number in range(len(reported), action.num_instances)]
        known = {one.instance_id: one for one in reported}
        unknown = common_pb2.Instance()
        self._roster.put(
            *(
                Member(
                    instance_id=name, action_id=action.action_id, asked_unix_s=action.decided_unix_s,
                    since_unix_s=time.time(), engine_url=known.get(name, unknown).engine_url,
                    sidecar_address=known.get(name, unknown).sidecar_address,
                    models=(self._settings.model,) if self._settings.model else (),
                    role=role_in_roster(known.get(name, unknown).role),
                )
                for name in names if self._roster.find(name) is None
            )
        )  # fmt: skip
        self.write(action, pb.ACTION_STATE_CALLED)

    def _finish_start(self, action: pb.Action) -> None:
        """End a start action once none of its instances is starting."""
        started = [member for member in self._roster if member.action_id == action.action_id]
        if any(member.state == STARTING for member in started):
            return
        self.write(action, pb.ACTION_STATE_DONE if started else pb.ACTION_STATE_GIVEN_UP)

    async def _drain(self, action: pb.Action) -> None:
        """Mark instances as draining, wait for their requests, and only then remove them.

        Requests that are left after `migrate_s` move to other instances; the times are in the roster, so that they
        hold for the next leader and without one.
        """
        now_s = time.time()
        draining = [member for name in action.instance_ids if (member := self._roster.find(name)) is not None]
        for member in draining:
            if member.state != DRAINING:
                drain = Drain(deadline_unix_s=now_s + self._settings.migrate_s) if self._settings.migrate else NEVER
                self._roster.change(member.instance_id, now_s, state=DRAINING, drain=drain.table())
        draining = [member for name in action.instance_ids if (member := self._roster.find(name)) is not None]
        conditions = await self._sidecars.conditions(draining)
        for member in draining:
            since_s = now_s - member.since_unix_s
            busy = conditions.get(member.instance_id, Condition()).num_requests != 0
            if since_s < self._settings.settle_s or (busy and since_s < self._settings.drain_s):
                return
        action.num_desired = len(list(self._roster)) - len(draining)
        if await self._call_hook(action) is None:
            return
        await self._sidecars.forget(*(member.sidecar_address for member in draining))
        self._roster.drop(*action.instance_ids)
        self.write(action, pb.ACTION_STATE_DONE)

    def move(self, action: pb.Action) -> None:
        """Write the tiers of instances into the roster, where they have one each; no hook is needed."""
        self._tiers.apply(self._roster, action.moves)
        self.write(action, pb.ACTION_STATE_DONE)

    async def _call_hook(self, action: pb.Action) -> pb.HookReply | None:
        """Call the hook; None where it failed, and the action is retried later or has failed for good."""
        action.attempt += 1
        try:
            return _with_known_roles(await self._hook.act(action))
        except HookError as error:
            log_event(log, logging.WARNING, "action failed", action=action.action_id, attempt=action.attempt,
                reason=str(error))  # fmt: skip
            if error.permanent or action.attempt >= self._settings.attempts:
                self._failed(action, str(error))
                return None
            self.write(action, pb.ACTION_STATE_WRITTEN)
            self._retry_at_s[action.action_id] = time.monotonic() + RETRY.pause_s(action.attempt - 1)
            return None

    def _failed(self, action: pb.Action, reason: str) -> None:
        action.why = f"{action.why}; failed: {reason}"
        self.write(action, pb.ACTION_STATE_FAILED)
        log_event(log, logging.ERROR, "action failed for good", action=action.action_id, reason=reason)
        if action.kind == pb.ACTION_KIND_STOP:
            self._roster.drop(*action.instance_ids)
        for name in action.instance_ids:
            if action.kind == pb.ACTION_KIND_DRAIN and self._roster.find(name) is not None:
                self._roster.change(name, time.time(), state=READY, drain={})

    def write(self, action: pb.Action, state: pb.ActionState.ValueType = pb.ACTION_STATE_WRITTEN) -> None:
        """Write the state of an action into the journal, and count it."""
        action.state = state
        self.journal.write(action, time.time())
        self._metrics.actions.labels(
            pb.ActionKind.Name(action.kind).removeprefix("ACTION_KIND_").lower(),
            pb.ActionState.Name(state).removeprefix("ACTION_STATE_").lower(),
        ).inc()


def _with_known_roles(reply: pb.HookReply) -> pb.HookReply:
    """Return a reply; HookError where it reports an instance of a role that the pool does not have."""
    for one in reply.instances:
        try:
            role_in_roster(one.role)
        except ValueError as error:
            raise HookError(f"{one.instance_id}: {error}", permanent=True) from None
    return reply
