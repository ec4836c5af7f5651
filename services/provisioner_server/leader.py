"""Who leads looks after the instances: what comes up, what goes, what is planned.

Each action is written before it is done. After a crash the same ones are gone on with, under the same ids, by hooks
that know what they have done already.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from pathlib import Path

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.backoff import Backoff
from scheduler.provisioning.planner import DRAIN, NOTHING, START, ScalingDecision
from services.logs import log_event
from services.provisioner_server.hooks import Hook, HookError
from services.provisioner_server.journal import Journal
from services.provisioner_server.lease import Lease
from services.provisioner_server.metrics import STATES, ProvisionerMetrics
from services.provisioner_server.pool import Pool
from services.provisioner_server.roster import DRAINING, READY, STARTING, Member, Roster
from services.provisioner_server.sidecars import Condition, Sidecars

log = logging.getLogger(__name__)

JOURNAL, ROSTER, INSTANCES, LEASE = "journal.jsonl", "roster.json", "instances.json", "lease"
RETRY = Backoff(first_s=0.5, max_s=30.0, random=random.random)
KINDS = {START: pb.ACTION_KIND_START, DRAIN: pb.ACTION_KIND_DRAIN}


class Leader:
    """Leads as long as it holds the lease; until then, and after, it only listens."""

    def __init__(self, pool: Pool, hook: Hook, lease: Lease, measures: ProvisionerMetrics) -> None:
        """Lead nothing yet."""
        self._pool, self._hook, self._lease, self._measures = pool, hook, lease, measures
        self._settings = pool.settings
        self._folder = Path(self._settings.folder)
        self._sidecars = Sidecars()
        self._journal: Journal | None = None
        self._roster = Roster(self._folder / ROSTER, self._folder / INSTANCES)
        self._again_s: dict[str, float] = {}  # when a failed action is tried again
        self._said: tuple[str, int] = (NOTHING, 0)  # in a dry run

    async def run(self) -> None:
        """Look after the pool for ever."""
        while True:
            try:
                await self.tick()
            except (OSError, ValueError) as error:  # a full disk, a folder that went away
                log_event(log, logging.ERROR, "cannot lead", reason=str(error))
                self._resign()
            await asyncio.sleep(self._settings.tick_s)

    async def tick(self) -> None:
        """Look, go on with what is under way, and plan."""
        if not await self._lease.held():
            self._resign()
            return
        if self._journal is None:
            self._take_over()
        assert self._journal is not None
        await self._look(self._journal)
        for action in self._journal.under_way():
            if not await self._lease.held():  # it may have been lost while a hook took its time
                self._resign()
                return
            await self._go_on(self._journal, action)
        self._plan(self._journal)
        self._measure()

    async def close(self) -> None:
        """Let the next one lead; instances go on."""
        await self._lease.release()
        await self._hook.close()
        await self._sidecars.close()

    # Whose turn it is.

    @property
    def leads(self) -> bool:
        """Tell whether it may act."""
        return self._journal is not None

    async def holder(self) -> str:
        """Name who may act."""
        return await self._lease.holder()

    def roster(self) -> Roster:
        """Tell who is there; where another one leads, as that one wrote it down."""
        return self._roster if self.leads else Roster(self._folder / ROSTER, self._folder / INSTANCES)

    @property
    def journal_path(self) -> Path:
        """Where actions are written down."""
        return self._folder / JOURNAL

    def _take_over(self) -> None:
        self._journal = Journal(self.journal_path)
        self._roster = Roster(self._folder / ROSTER, self._folder / INSTANCES)
        self._roster.put()  # so that schedulers find the file
        self._again_s.clear()
        self._measures.leads.set(1)
        log_event(log, logging.INFO, "leads", pool=self._settings.pool, id=self._settings.provisioner_id,
            under_way=len(self._journal.under_way()))  # fmt: skip

    def _resign(self) -> None:
        if self._journal is not None:
            log_event(log, logging.WARNING, "leads no more", pool=self._settings.pool)
        self._journal = None
        self._measures.leads.set(0)

    # Instances.

    async def _look(self, journal: Journal) -> None:
        """See who has come up, who has gone, and who never came."""
        found = await self._hook.instances()
        if found is not None:
            self._adopt(journal, {one.instance_id: one for one in found})
        now_s = time.time()
        conditions = await self._sidecars.conditions(self._roster.those(STARTING))
        patience_s = self._pool.observed.cold_starts.given_up_after_s
        for member in self._roster.those(STARTING):
            if conditions.get(member.instance_id, Condition()).is_ready:
                self._came_up(member, now_s)
            elif now_s - member.asked_unix_s > patience_s and not self._is_stopped(journal, member.instance_id):
                self._give_up(journal, member, f"not ready after {now_s - member.asked_unix_s:.0f} s")

    def _adopt(self, journal: Journal, found: dict[str, common_pb2.Instance]) -> None:
        """Learn of those that a hook's own view shows, and of those that it shows no more."""
        now_s = time.time()
        for member in list(self._roster):
            if member.has_address and member.instance_id not in found:
                if member.state == STARTING and not self._is_stopped(journal, member.instance_id):
                    self._give_up(journal, member, "ended before it was ready")
                elif member.state == READY:
                    log_event(log, logging.WARNING, "instance is gone", instance=member.instance_id)
                    self._roster.drop(member.instance_id)
        if any(action.kind == pb.ACTION_KIND_START and action.state == pb.ACTION_STATE_WRITTEN
               for action in journal.under_way()):  # fmt: skip
            return  # nobody knows yet which of them it has brought
        expected = [member for member in self._roster.those(STARTING) if not member.has_address]
        for name, instance in found.items():
            known = self._roster.named(name)
            if known is None:
                stands_for = expected.pop(0) if expected else None
                if stands_for is not None:
                    self._roster.drop(stands_for.instance_id)
                known = Member(
                    instance_id=name,
                    action_id=stands_for.action_id if stands_for else "",
                    asked_unix_s=stands_for.asked_unix_s if stands_for else now_s,
                    since_unix_s=now_s,
                )
                log_event(log, logging.INFO, "instance seen", instance=name, action=known.action_id)
                self._roster.put(known)
            if not known.has_address and instance.engine_url:
                self._roster.change(
                    name, now_s, engine_url=instance.engine_url, sidecar_address=instance.sidecar_address
                )

    def _came_up(self, member: Member, now_s: float) -> None:
        took_s = now_s - member.asked_unix_s
        self._pool.observed.cold_starts.measured(took_s)
        self._roster.change(member.instance_id, now_s, state=READY)
        log_event(log, logging.INFO, "instance ready", instance=member.instance_id, cold_start_s=round(took_s, 3))

    def _give_up(self, journal: Journal, member: Member, why: str) -> None:
        """Have one stopped that never came up; another will be planned, if it is still wanted."""
        self._measures.given_up.inc()
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
        return len(self._roster.those(STARTING, READY))

    # Actions.

    async def _go_on(self, journal: Journal, action: pb.Action) -> None:
        if self._again_s.get(action.action_id, 0.0) > time.monotonic():
            return
        if action.kind == pb.ACTION_KIND_START:
            if action.state == pb.ACTION_STATE_WRITTEN:
                await self._start(journal, action)
            else:
                self._see_whether_up(journal, action)
        elif action.kind == pb.ACTION_KIND_DRAIN:
            await self._drain(journal, action)
        elif await self._called(journal, action) is not None:
            self._roster.drop(*action.instance_ids)
            self._write(journal, action, pb.ACTION_STATE_DONE)

    async def _start(self, journal: Journal, action: pb.Action) -> None:
        action.num_desired = len(list(self._roster)) + sum(
            one.num_instances
            for one in journal.under_way()
            if one.kind == pb.ACTION_KIND_START and one.state == pb.ACTION_STATE_WRITTEN
        )
        reply = await self._called(journal, action)
        if reply is None:
            return
        told = list(reply.instances)[: action.num_instances]
        names = [one.instance_id for one in told]
        names += [f"{action.action_id}-{number}" for number in range(len(told), action.num_instances)]
        where = {one.instance_id: one for one in told}
        self._roster.put(
            *(
                Member(
                    instance_id=name, action_id=action.action_id, asked_unix_s=action.decided_unix_s,
                    since_unix_s=time.time(), engine_url=where[name].engine_url if name in where else "",
                    sidecar_address=where[name].sidecar_address if name in where else "",
                    models=(self._settings.model,) if self._settings.model else (),
                )
                for name in names if self._roster.named(name) is None
            )
        )  # fmt: skip
        self._write(journal, action, pb.ACTION_STATE_CALLED)

    def _see_whether_up(self, journal: Journal, action: pb.Action) -> None:
        mine = [member for member in self._roster if member.action_id == action.action_id]
        if any(member.state == STARTING for member in mine):
            return
        self._write(journal, action, pb.ACTION_STATE_DONE if mine else pb.ACTION_STATE_GIVEN_UP)

    async def _drain(self, journal: Journal, action: pb.Action) -> None:
        """Have schedulers send nothing more, wait for what is under way, and only then let them go."""
        now_s = time.time()
        there = [member for name in action.instance_ids if (member := self._roster.named(name)) is not None]
        for member in there:
            if member.state != DRAINING:
                self._roster.change(member.instance_id, now_s, state=DRAINING)
        there = [member for name in action.instance_ids if (member := self._roster.named(name)) is not None]
        conditions = await self._sidecars.conditions(there)
        for member in there:
            since_s = now_s - member.since_unix_s
            busy = conditions.get(member.instance_id, Condition()).num_there != 0
            if since_s < self._settings.settle_s or (busy and since_s < self._settings.drain_s):
                return
        action.num_desired = len(list(self._roster)) - len(there)
        if await self._called(journal, action) is None:
            return
        await self._sidecars.forget(*(member.sidecar_address for member in there))
        self._roster.drop(*action.instance_ids)
        self._write(journal, action, pb.ACTION_STATE_DONE)

    async def _called(self, journal: Journal, action: pb.Action) -> pb.HookReply | None:
        """Have the hook do it; None where it did not, and is to be asked again later, or never."""
        action.attempt += 1
        try:
            return await self._hook.act(action)
        except HookError as error:
            log_event(log, logging.WARNING, "action failed", action=action.action_id, attempt=action.attempt,
                reason=str(error))  # fmt: skip
            if error.useless or action.attempt >= self._settings.attempts:
                self._failed(journal, action, str(error))
                return None
            self._write(journal, action, pb.ACTION_STATE_WRITTEN)
            self._again_s[action.action_id] = time.monotonic() + RETRY.pause_s(action.attempt - 1)
            return None

    def _failed(self, journal: Journal, action: pb.Action, reason: str) -> None:
        action.why = f"{action.why}; failed: {reason}"
        self._write(journal, action, pb.ACTION_STATE_FAILED)
        log_event(log, logging.ERROR, "action given up", action=action.action_id, reason=reason)
        if action.kind == pb.ACTION_KIND_STOP:
            self._roster.drop(*action.instance_ids)
        for name in action.instance_ids:
            if action.kind == pb.ACTION_KIND_DRAIN and self._roster.named(name) is not None:
                self._roster.change(name, time.time(), state=READY)

    def _write(
        self, journal: Journal, action: pb.Action, state: pb.ActionState.ValueType = pb.ACTION_STATE_WRITTEN
    ) -> None:
        action.state = state
        journal.write(action, time.time())
        self._measures.actions.labels(
            pb.ActionKind.Name(action.kind).removeprefix("ACTION_KIND_").lower(),
            pb.ActionState.Name(state).removeprefix("ACTION_STATE_").lower(),
        ).inc()

    # Plans.

    def decide(self, rule: str = "") -> ScalingDecision:
        """Say what would be done now."""
        roster = self.roster()
        made = self._pool.rule_named(rule) if rule else None
        decision = self._pool.plan(
            [member.instance_id for member in roster.those(READY)], self._num_starting(roster), made
        )
        if decision.kind != DRAIN:
            return decision
        ready = [member.instance_id for member in roster.those(READY)]
        fixed = self._hook.leavers(ready, len(decision.instance_ids))
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
        return len(roster.those(STARTING)) + sum(
            action.num_instances
            for action in waiting
            if action.kind == pb.ACTION_KIND_START and action.state == pb.ACTION_STATE_WRITTEN
        )

    def action_from(self, decision: ScalingDecision, action_id: str, rule: str = "") -> pb.Action:
        """Write a decision down."""
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
        self._measures.desired.labels(self._settings.pool).set(decision.num_desired)
        if decision.kind == NOTHING:
            self._said = (NOTHING, 0)
            return
        action = self.action_from(decision, journal.next_id(self._settings.pool))
        if self._settings.dry_run:
            if self._said != (decision.kind, decision.num_desired):
                self._said = (decision.kind, decision.num_desired)
                self._write(journal, action, pb.ACTION_STATE_PLANNED)
            return
        self._write(journal, action)
        self._pool.begun(decision)
        log_event(
            log, logging.INFO, "acts", action=action.action_id, kind=decision.kind, num_desired=decision.num_desired,
            ids=",".join(decision.instance_ids), why=decision.why,
        )  # fmt: skip

    def _measure(self) -> None:
        pool = self._settings.pool
        for state in STATES:
            self._measures.instances.labels(pool, state).set(len(self._roster.those(state)))
        now = self._pool.situation(len(self._roster.those(READY)), len(self._roster.those(STARTING)))
        self._measures.forecast_s.labels(pool).set(now.forecast_p_s)
        self._measures.arrivals.labels(pool).set(now.trend.level_per_s)
        if self._pool.observed.cold_starts.num_measured:
            self._measures.cold_start_s.labels(pool).set(now.cold_start_s)
