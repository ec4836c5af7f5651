"""The leader among provisioners: follows the instances, plans actions, and carries them out.

Each action is written to the journal first. After a crash the next leader continues the same actions under the same
ids, and hooks ignore those that are done already.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.backoff import Backoff
from scheduler.provisioning.planner import DRAIN, NOTHING, START, ScalingDecision
from scheduler.provisioning.tier_planner import TierMove
from services.drains import NEVER, Drain
from services.logs import log_event
from services.provisioner_server.hooks import Hook, HookError
from services.provisioner_server.journal import Journal
from services.provisioner_server.lease import Lease
from services.provisioner_server.metrics import STATES, ProvisionerMetrics
from services.provisioner_server.pool import Pool
from services.provisioner_server.roster import DRAINING, READY, STARTING, Member, Roster
from services.provisioner_server.sidecars import Condition, Sidecars
from services.provisioner_server.tiers import TierMoves, action_from
from services.security.own_key import own_key

log = logging.getLogger(__name__)

JOURNAL, ROSTER, INSTANCES, LEASE = "journal.jsonl", "roster.json", "instances.json", "lease"
RETRY = Backoff(first_s=0.5, max_s=30.0, random=random.random)
KINDS = {START: pb.ACTION_KIND_START, DRAIN: pb.ACTION_KIND_DRAIN}


class Leader:
    """Acts while it holds the lease; without it, only receives reports."""

    def __init__(self, pool: Pool, hook: Hook, lease: Lease, metrics: ProvisionerMetrics) -> None:
        """Hold no lease yet."""
        self._pool, self._hook, self._lease, self._metrics = pool, hook, lease, metrics
        self._settings = pool.settings
        self._folder = Path(self._settings.folder)
        self._sidecars = Sidecars(own_key(self._settings.part_key_file))
        self._journal: Journal | None = None
        self._roster = Roster(self._folder / ROSTER, self._folder / INSTANCES)
        self._retry_at_s: dict[str, float] = {}  # by failed action
        self._last_planned: tuple[str, int] = (NOTHING, 0)  # in a dry run
        self._last_moves: Sequence[TierMove] = ()  # in a dry run
        self.tiers = TierMoves(pool)

    async def run(self) -> None:
        """Size the pool until cancelled."""
        while True:
            try:
                await self.tick()
            except (OSError, ValueError) as error:  # a full disk, a folder that went away
                log_event(log, logging.ERROR, "leading failed", reason=str(error))
                self._resign()
            await asyncio.sleep(self._settings.tick_s)

    async def tick(self) -> None:
        """Update the instances, continue the actions under way, and plan."""
        if not await self._lease.held():
            self._resign()
            return
        if self._journal is None:
            self._take_over()
        assert self._journal is not None
        await self._update(self._journal)
        for action in self._journal.under_way():
            if not await self._lease.held():  # it may have expired during a slow hook
                self._resign()
                return
            await self._continue(self._journal, action)
        await self._plan_tiers(self._journal)
        if self._journal is None:  # the lease was lost meanwhile
            return
        self._plan(self._journal)
        self._measure()

    async def close(self) -> None:
        """Release the lease, and close connections; instances keep running."""
        await self._lease.release()
        await self._hook.close()
        await self._sidecars.close()

    # The lease.

    @property
    def leads(self) -> bool:
        """Tell whether this provisioner is the leader."""
        return self._journal is not None

    async def holder(self) -> str:
        """Return the id of the leader."""
        return await self._lease.holder()

    def roster(self) -> Roster:
        """Return the instances; those of another leader are read from its file."""
        return self._roster if self.leads else Roster(self._folder / ROSTER, self._folder / INSTANCES)

    @property
    def journal_path(self) -> Path:
        """The path of the journal."""
        return self._folder / JOURNAL

    def _take_over(self) -> None:
        self._journal = Journal(self.journal_path)
        self._roster = Roster(self._folder / ROSTER, self._folder / INSTANCES)
        self.tiers.refresh(self._roster)
        self._roster.put()  # writes the file that schedulers watch
        self._retry_at_s.clear()
        self._metrics.leads.set(1)
        log_event(log, logging.INFO, "became leader", pool=self._settings.pool, id=self._settings.provisioner_id,
            under_way=len(self._journal.under_way()))  # fmt: skip

    def _resign(self) -> None:
        if self._journal is not None:
            log_event(log, logging.WARNING, "no longer leader", pool=self._settings.pool)
        self._journal = None
        self._metrics.leads.set(0)

    # Instances.

    async def _update(self, journal: Journal) -> None:
        """Note the instances that became ready, that are gone, and that never became ready."""
        found = await self._hook.instances()
        if found is not None:
            self._adopt(journal, {one.instance_id: one for one in found})
        now_s = time.time()
        conditions = await self._sidecars.conditions(self._roster.in_state(STARTING))
        timeout_s = self._pool.history.cold_starts.given_up_after_s
        for member in self._roster.in_state(STARTING):
            if conditions.get(member.instance_id, Condition()).is_ready:
                self._became_ready(member, now_s)
            elif now_s - member.asked_unix_s > timeout_s and not self._is_stopped(journal, member.instance_id):
                self._give_up(journal, member, f"not ready after {now_s - member.asked_unix_s:.0f} s")

    def _adopt(self, journal: Journal, found: dict[str, common_pb2.Instance]) -> None:
        """Add instances that the hook reports, and remove those that it no longer reports."""
        now_s = time.time()
        for member in list(self._roster):
            if member.has_address and member.instance_id not in found:
                if member.state == STARTING and not self._is_stopped(journal, member.instance_id):
                    self._give_up(journal, member, "ended before it was ready")
                elif member.state == READY:
                    log_event(log, logging.WARNING, "instance disappeared", instance=member.instance_id)
                    self._roster.drop(member.instance_id)
        if any(action.kind == pb.ACTION_KIND_START and action.state == pb.ACTION_STATE_WRITTEN
               for action in journal.under_way()):  # fmt: skip
            return  # which instances it started is not known yet
        unaddressed = [member for member in self._roster.in_state(STARTING) if not member.has_address]
        for name, instance in found.items():
            known = self._roster.find(name)
            if known is None:
                placeholder = unaddressed.pop(0) if unaddressed else None
                if placeholder is not None:
                    self._roster.drop(placeholder.instance_id)
                known = Member(
                    instance_id=name,
                    action_id=placeholder.action_id if placeholder else "",
                    asked_unix_s=placeholder.asked_unix_s if placeholder else now_s,
                    since_unix_s=now_s,
                )
                log_event(log, logging.INFO, "instance found", instance=name, action=known.action_id)
                self._roster.put(known)
            if not known.has_address and instance.engine_url:
                self._roster.change(
                    name, now_s, engine_url=instance.engine_url, sidecar_address=instance.sidecar_address
                )

    def _became_ready(self, member: Member, now_s: float) -> None:
        took_s = now_s - member.asked_unix_s
        self._pool.history.cold_starts.measured(took_s)
        self._roster.change(member.instance_id, now_s, state=READY)
        log_event(log, logging.INFO, "instance ready", instance=member.instance_id, cold_start_s=round(took_s, 3))

    def _give_up(self, journal: Journal, member: Member, why: str) -> None:
        """Stop an instance that did not become ready; the next plan replaces it if it is still needed."""
        self._metrics.given_up.inc()
        log_event(log, logging.ERROR, "instance given up", instance=member.instance_id, reason=why)
        action = pb.Action(
            action_id=journal.next_id(self._settings.pool), kind=pb.ACTION_KIND_STOP, pool=self._settings.pool,
            model=self._settings.model, instance_ids=[member.instance_id], rule="-", why=why,
            num_present=self._num_present(), decided_unix_s=time.time(), state=pb.ACTION_STATE_WRITTEN,
        )  # fmt: skip
        self._write(journal, action)

    def _is_stopped(self, journal: Journal, instance_id: str) -> bool:
        return any(
            action.kind == pb.ACTION_KIND_STOP and instance_id in action.instance_ids for action in journal.under_way()
        )

    def _num_present(self) -> int:
        return len(self._roster.in_state(STARTING, READY))

    # Actions.

    async def _continue(self, journal: Journal, action: pb.Action) -> None:
        if self._retry_at_s.get(action.action_id, 0.0) > time.monotonic():
            return
        if action.kind == pb.ACTION_KIND_START:
            if action.state == pb.ACTION_STATE_WRITTEN:
                await self._start(journal, action)
            else:
                self._finish_start(journal, action)
        elif action.kind == pb.ACTION_KIND_DRAIN:
            await self._drain(journal, action)
        elif action.kind == pb.ACTION_KIND_MOVE:
            self._move(journal, action)
        elif await self._call_hook(journal, action) is not None:
            self._roster.drop(*action.instance_ids)
            self._write(journal, action, pb.ACTION_STATE_DONE)

    async def _start(self, journal: Journal, action: pb.Action) -> None:
        action.num_desired = len(list(self._roster)) + sum(
            one.num_instances
            for one in journal.under_way()
            if one.kind == pb.ACTION_KIND_START and one.state == pb.ACTION_STATE_WRITTEN
        )
        reply = await self._call_hook(journal, action)
        if reply is None:
            return
        reported = list(reply.instances)[: action.num_instances]
        names = [one.instance_id for one in reported]
        names += [f"{action.action_id}-{number}" for number in range(len(reported), action.num_instances)]
        addresses = {one.instance_id: one for one in reported}
        self._roster.put(
            *(
                Member(
                    instance_id=name, action_id=action.action_id, asked_unix_s=action.decided_unix_s,
                    since_unix_s=time.time(), engine_url=addresses[name].engine_url if name in addresses else "",
                    sidecar_address=addresses[name].sidecar_address if name in addresses else "",
                    models=(self._settings.model,) if self._settings.model else (),
                )
                for name in names if self._roster.find(name) is None
            )
        )  # fmt: skip
        self._write(journal, action, pb.ACTION_STATE_CALLED)

    def _finish_start(self, journal: Journal, action: pb.Action) -> None:
        """End a start action once none of its instances is starting."""
        started = [member for member in self._roster if member.action_id == action.action_id]
        if any(member.state == STARTING for member in started):
            return
        self._write(journal, action, pb.ACTION_STATE_DONE if started else pb.ACTION_STATE_GIVEN_UP)

    async def _drain(self, journal: Journal, action: pb.Action) -> None:
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
        if await self._call_hook(journal, action) is None:
            return
        await self._sidecars.forget(*(member.sidecar_address for member in draining))
        self._roster.drop(*action.instance_ids)
        self._write(journal, action, pb.ACTION_STATE_DONE)

    def _move(self, journal: Journal, action: pb.Action) -> None:
        """Write the tiers of instances into the roster, where they have one each; no hook is needed."""
        self.tiers.apply(self._roster, action.moves)
        self._write(journal, action, pb.ACTION_STATE_DONE)

    async def _call_hook(self, journal: Journal, action: pb.Action) -> pb.HookReply | None:
        """Call the hook; None where it failed, and the action is retried later or has failed for good."""
        action.attempt += 1
        try:
            return await self._hook.act(action)
        except HookError as error:
            log_event(log, logging.WARNING, "action failed", action=action.action_id, attempt=action.attempt,
                reason=str(error))  # fmt: skip
            if error.permanent or action.attempt >= self._settings.attempts:
                self._failed(journal, action, str(error))
                return None
            self._write(journal, action, pb.ACTION_STATE_WRITTEN)
            self._retry_at_s[action.action_id] = time.monotonic() + RETRY.pause_s(action.attempt - 1)
            return None

    def _failed(self, journal: Journal, action: pb.Action, reason: str) -> None:
        action.why = f"{action.why}; failed: {reason}"
        self._write(journal, action, pb.ACTION_STATE_FAILED)
        log_event(log, logging.ERROR, "action failed for good", action=action.action_id, reason=reason)
        if action.kind == pb.ACTION_KIND_STOP:
            self._roster.drop(*action.instance_ids)
        for name in action.instance_ids:
            if action.kind == pb.ACTION_KIND_DRAIN and self._roster.find(name) is not None:
                self._roster.change(name, time.time(), state=READY, drain={})

    def _write(
        self, journal: Journal, action: pb.Action, state: pb.ActionState.ValueType = pb.ACTION_STATE_WRITTEN
    ) -> None:
        action.state = state
        journal.write(action, time.time())
        self._metrics.actions.labels(
            pb.ActionKind.Name(action.kind).removeprefix("ACTION_KIND_").lower(),
            pb.ActionState.Name(state).removeprefix("ACTION_STATE_").lower(),
        ).inc()

    # Plans.

    def decide(self, rule: str = "") -> ScalingDecision:
        """Return what would be done now."""
        roster = self.roster()
        other_rule = self._pool.rule_named(rule) if rule else None
        decision = self._pool.plan(
            [member.instance_id for member in roster.in_state(READY)], self._num_starting(roster), other_rule
        )
        if decision.kind != DRAIN:
            return decision
        ready = [member.instance_id for member in roster.in_state(READY)]
        fixed = self._hook.fixed_choice(ready, len(decision.instance_ids))
        if fixed is None:
            return decision
        return ScalingDecision(
            kind=DRAIN,
            instance_ids=tuple(fixed),
            num_present=decision.num_present,
            why=decision.why,
            numbers=decision.numbers,
        )

    def _num_starting(self, roster: Roster) -> int:
        waiting = [] if self._journal is None else self._journal.under_way()
        return len(roster.in_state(STARTING)) + sum(
            action.num_instances
            for action in waiting
            if action.kind == pb.ACTION_KIND_START and action.state == pb.ACTION_STATE_WRITTEN
        )

    def action_from(self, decision: ScalingDecision, action_id: str, rule: str = "") -> pb.Action:
        """Convert a decision to an action."""
        return pb.Action(
            action_id=action_id,
            kind=KINDS[decision.kind],
            pool=self._settings.pool,
            model=self._settings.model,
            num_instances=decision.num,
            instance_ids=decision.instance_ids,
            num_desired=decision.num_desired,
            num_present=decision.num_present,
            rule=rule or self._settings.rule,
            why=decision.why,
            numbers=decision.numbers,
            decided_unix_s=time.time(),
            dry_run=self._settings.dry_run,
            state=pb.ACTION_STATE_PLANNED,
        )

    def _plan(self, journal: Journal) -> None:
        decision = self.decide()
        self._metrics.desired.labels(self._settings.pool).set(decision.num_desired)
        if decision.kind == NOTHING:
            self._last_planned = (NOTHING, 0)
            return
        action = self.action_from(decision, journal.next_id(self._settings.pool))
        if self._settings.dry_run:
            if self._last_planned != (decision.kind, decision.num_desired):
                self._last_planned = (decision.kind, decision.num_desired)
                self._write(journal, action, pb.ACTION_STATE_PLANNED)
            return
        self._write(journal, action)
        self._pool.started(decision)
        log_event(
            log, logging.INFO, "action planned", action=action.action_id, kind=decision.kind,
            num_desired=decision.num_desired, ids=",".join(decision.instance_ids), why=decision.why,
        )  # fmt: skip

    async def _plan_tiers(self, journal: Journal) -> None:
        """Move instances between tiers; all moves of a moment are one action."""
        if not self._pool.tiers:
            return
        moves = await self.tiers.plan(self._roster, self._sidecars)
        if not await self._lease.held():  # it may have expired while sidecars were asked
            self._resign()
            return
        if not moves or (self._settings.dry_run and moves == self._last_moves):
            return
        action = action_from(moves, journal.next_id(self._settings.pool), self._pool, self._num_present())
        if self._settings.dry_run:
            self._last_moves = moves
            self._write(journal, action, pb.ACTION_STATE_PLANNED)
            return
        self._write(journal, action)
        self._move(journal, action)
        log_event(log, logging.INFO, "instances moved", action=action.action_id, why=action.why)

    def _measure(self) -> None:
        self.tiers.measure(self._roster, self._metrics)
        pool = self._settings.pool
        self._metrics.max_instances.labels(pool).set(self._settings.limits.max_instances)
        for state in STATES:
            self._metrics.instances.labels(pool, state).set(len(self._roster.in_state(state)))
        now = self._pool.state(len(self._roster.in_state(READY)), len(self._roster.in_state(STARTING)))
        self._metrics.forecast_s.labels(pool).set(now.forecast_p_s)
        self._metrics.arrivals.labels(pool).set(now.trend.level_per_s)
        if self._pool.history.cold_starts.num_measured:
            self._metrics.cold_start_s.labels(pool).set(now.cold_start_s)
