"""The leader among provisioners: follows the instances, plans actions, and has them carried out.

Each action is written to the journal first. After a crash the next leader continues the same actions under the same
ids, and hooks ignore those that are done already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.provisioning.planner import DRAIN, NOTHING, START, ScalingDecision
from scheduler.provisioning.tier_planner import TierMove
from services.logs import log_event
from services.provisioner_server.action_runner import ActionRunner
from services.provisioner_server.hooks import Hook
from services.provisioner_server.journal import Journal
from services.provisioner_server.lease import Lease
from services.provisioner_server.metrics import STATES, ProvisionerMetrics
from services.provisioner_server.pool import Pool
from services.provisioner_server.roster import READY, STARTING, Member, Roster, role_in_roster
from services.provisioner_server.sidecars import Condition, Sidecars
from services.provisioner_server.tiers import TierMoves, action_from
from services.security.own_key import own_key

log = logging.getLogger(__name__)

JOURNAL, ROSTER, INSTANCES, LEASE = "journal.jsonl", "roster.json", "instances.json", "lease"
KINDS = {START: pb.ACTION_KIND_START, DRAIN: pb.ACTION_KIND_DRAIN}


class Leader:
    """Acts while it holds the lease; without it, only receives reports."""

    def __init__(self, pool: Pool, hook: Hook, lease: Lease, metrics: ProvisionerMetrics) -> None:
        """Hold no lease yet."""
        self._pool, self._hook, self._lease, self._metrics = pool, hook, lease, metrics
        self._settings = pool.settings
        self._folder = Path(self._settings.folder)
        self._sidecars = Sidecars(own_key(self._settings.part_key_file))
        self._runner: ActionRunner | None = None  # while it leads
        self._roster = Roster(self._folder / ROSTER, self._folder / INSTANCES)
        self._last_planned: tuple[str, int] = (NOTHING, 0)  # in a dry run
        self._last_moves: Sequence[TierMove] = ()  # in a dry run
        self._refused: dict[str, str] = {}  # instances whose role the pool does not have, with the reason
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
        if self._runner is None:
            self._take_over()
        assert self._runner is not None
        await self._update(self._runner)
        for action in self._runner.journal.under_way():
            if not await self._lease.held():  # it may have expired during a slow hook
                self._resign()
                return
            await self._runner.carry_out(action)
        await self._plan_tiers(self._runner)
        if self._runner is None:  # the lease was lost meanwhile
            return
        self._plan(self._runner)
        self._measure()

    async def close(self) -> None:
        """Release the lease, and close connections; instances keep running."""
        await self._lease.release()
        await self._hook.close()
        await self._sidecars.close()

    # The lease.

    @property
    def leads(self) -> bool:
        """Whether this provisioner is the leader."""
        return self._runner is not None

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
        journal = Journal(self.journal_path)
        self._roster = Roster(self._folder / ROSTER, self._folder / INSTANCES)
        self._runner = ActionRunner(
            self._settings, journal, self._roster, hook=self._hook, sidecars=self._sidecars, tiers=self.tiers,
            metrics=self._metrics,
        )  # fmt: skip
        self.tiers.refresh(self._roster)
        self._roster.put()  # writes the file that schedulers watch
        self._metrics.leads.set(1)
        log_event(log, logging.INFO, "became leader", pool=self._settings.pool, id=self._settings.provisioner_id,
            under_way=len(journal.under_way()))  # fmt: skip

    def _resign(self) -> None:
        if self._runner is not None:
            log_event(log, logging.WARNING, "no longer leader", pool=self._settings.pool)
        self._runner = None
        self._metrics.leads.set(0)

    # Instances.

    async def _update(self, runner: ActionRunner) -> None:
        """Note the instances that became ready, that are gone, and that never became ready."""
        found = await self._hook.instances()
        if found is not None:
            self._adopt(runner, {one.instance_id: one for one in found if self._may_join(one)})
        now_s = time.time()
        conditions = await self._sidecars.conditions(self._roster.in_state(STARTING))
        timeout_s = self._pool.history.cold_starts.given_up_after_s
        for member in self._roster.in_state(STARTING):
            if conditions.get(member.instance_id, Condition()).is_ready:
                self._became_ready(member, now_s)
            elif now_s - member.asked_unix_s > timeout_s and not runner.is_stopped(member.instance_id):
                self._give_up(runner, member, f"not ready after {now_s - member.asked_unix_s:.0f} s")

    def _may_join(self, instance: common_pb2.Instance) -> bool:
        """Return whether the pool may have an instance of this role; log once where it may not."""
        try:
            role_in_roster(instance.role)
        except ValueError as error:
            if self._refused.get(instance.instance_id) != str(error):
                self._refused[instance.instance_id] = str(error)
                log_event(log, logging.ERROR, "instance refused", instance=instance.instance_id, reason=str(error))
            return False
        return True

    def _adopt(self, runner: ActionRunner, found: dict[str, common_pb2.Instance]) -> None:
        """Add instances that the hook reports, and remove those that it no longer reports."""
        now_s = time.time()
        for member in list(self._roster):
            if member.has_address and member.instance_id not in found:
                if member.state == STARTING and not runner.is_stopped(member.instance_id):
                    self._give_up(runner, member, "ended before it was ready")
                elif member.state == READY:
                    log_event(log, logging.WARNING, "instance disappeared", instance=member.instance_id)
                    self._roster.drop(member.instance_id)
        if runner.unstarted():
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
                    role=role_in_roster(instance.role),
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

    def _give_up(self, runner: ActionRunner, member: Member, why: str) -> None:
        """Stop an instance that did not become ready; the next plan replaces it if it is still needed."""
        self._metrics.given_up.inc()
        log_event(log, logging.ERROR, "instance given up", instance=member.instance_id, reason=why)
        action = pb.Action(
            action_id=runner.journal.next_id(self._settings.pool), kind=pb.ACTION_KIND_STOP, pool=self._settings.pool,
            model=self._settings.model, instance_ids=[member.instance_id], rule="-", why=why,
            num_present=self._num_present(), decided_unix_s=time.time(), state=pb.ACTION_STATE_WRITTEN,
        )  # fmt: skip
        runner.write(action)

    def _num_present(self) -> int:
        return len(self._roster.in_state(STARTING, READY))

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
        unstarted = [] if self._runner is None else self._runner.unstarted()
        return len(roster.in_state(STARTING)) + sum(action.num_instances for action in unstarted)

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

    def _plan(self, runner: ActionRunner) -> None:
        decision = self.decide()
        self._metrics.desired.labels(self._settings.pool).set(decision.num_desired)
        if decision.kind == NOTHING:
            self._last_planned = (NOTHING, 0)
            return
        action = self.action_from(decision, runner.journal.next_id(self._settings.pool))
        if self._settings.dry_run:
            if self._last_planned != (decision.kind, decision.num_desired):
                self._last_planned = (decision.kind, decision.num_desired)
                runner.write(action, pb.ACTION_STATE_PLANNED)
            return
        runner.write(action)
        self._pool.started(decision)
        log_event(
            log, logging.INFO, "action planned", action=action.action_id, kind=decision.kind,
            num_desired=decision.num_desired, ids=",".join(decision.instance_ids), why=decision.why,
        )  # fmt: skip

    async def _plan_tiers(self, runner: ActionRunner) -> None:
        """Move instances between tiers; all moves of a moment are one action."""
        if not self._pool.tiers:
            return
        moves = await self.tiers.plan(self._roster, self._sidecars)
        if not await self._lease.held():  # it may have expired while sidecars were asked
            self._resign()
            return
        if not moves or (self._settings.dry_run and moves == self._last_moves):
            return
        action = action_from(moves, runner.journal.next_id(self._settings.pool), self._pool, self._num_present())
        if self._settings.dry_run:
            self._last_moves = moves
            runner.write(action, pb.ACTION_STATE_PLANNED)
            return
        runner.write(action)
        runner.move(action)
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
