"""Tiers at the leader: moves are journaled, survive a crash, and are in the list of instances."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from protos.block.v1 import provisioner_pb2 as pb
from scheduler.provisioning.tier_planner import TierPlanner
from services.cli.provision import _tier_line
from services.instances.instance import instances_from_file
from services.provisioner_server.journal import entries
from services.provisioner_server.leader import Leader
from services.provisioner_server.service import ProvisionerService
from services.provisioner_server.settings import ProvisionerSettings
from services.provisioner_server.sidecars import Condition
from tests.services.provisioner_server.acting import DeathError, RecordingHook, dying, leader

TIERS = """
[[tier]]
name = "strict"
tpot_slo_s = 0.02
min_instances = 1

[[tier]]
name = "loose"
tpot_slo_s = 0.1
"""
FIRST, SECOND = "default-1-0", "default-1-1"


def tier_leader(folder: Path, running: set[str], tiers: str = TIERS, **changes: Any) -> Leader:
    """Make a leader with tiers, whose hook starts two instances first."""
    (folder / "tiers.toml").write_text(tiers)
    return leader(
        folder, RecordingHook(running), **{"rule": "tiers", "tiers": str(folder / "tiers.toml"), **changes}
    )  # fmt: skip


async def ticks(one: Leader, num: int) -> None:
    """Run some ticks."""
    for _ in range(num):
        await one.tick()


def listed(folder: Path) -> dict[str, tuple[str, float, bool]]:
    """The tiers that schedulers read."""
    found = instances_from_file(str(folder / "instances.json"))
    return {one.instance_id: (one.tier, one.tier_tpot_s, one.tier_closed) for one in found}


def waiting(scheduler_id: str, **num_by_ms: int) -> pb.ReportRequest:
    """A report of waiting requests, by target: t20=3."""
    targets = [pb.WaitingTarget(tpot_slo_s=int(name[1:]) / 1e3, num=num) for name, num in num_by_ms.items()]
    return pb.ReportRequest(scheduler_id=scheduler_id, waiting=pb.WaitingRequests(targets=targets))


def test_a_tier_gets_its_minimum_and_then_what_waiting_requests_need(tmp_path: Path) -> None:
    """The list of instances has it; the reason is in the journal, and no hook is called for it."""

    async def test() -> None:
        one = tier_leader(tmp_path, set())
        await ticks(one, 4)
        assert listed(tmp_path) == {FIRST: ("strict", 0.02, False), SECOND: ("", float("inf"), False)}
        assert one._pool.receive(waiting("s", t100=2))
        await ticks(one, 1)
        assert listed(tmp_path)[SECOND] == ("loose", 0.1, False)
        moves = [entry.action for entry in entries(tmp_path / "journal.jsonl") if entry.action.moves]
        assert [action.state for action in moves] == [pb.ACTION_STATE_WRITTEN, pb.ACTION_STATE_DONE] * 2
        assert moves[-1].why == f"{SECOND} to loose: requests of loose wait"
        assert {action.kind for action in one._hook.actions} == {pb.ACTION_KIND_START}
        (status,) = (await ProvisionerService(one._pool, one).Status(pb.StatusRequest(), None)).pools  # type: ignore[arg-type]
        assert [(tier.name, tier.num_instances, tier.num_waiting) for tier in status.tiers] == [
            ("strict", 1, 0), ("loose", 1, 2),
        ]  # fmt: skip
        assert {(each.tier, each.tier_tpot_s) for each in status.instances} == {("strict", 0.02), ("loose", 0.1)}
        assert one._metrics.tier_instances.labels("default", "loose", "no")._value.get() == 1
        assert one._metrics.tier_waiting.labels("default", "loose")._value.get() == 2

    asyncio.run(test())


def test_waiting_requests_start_an_instance_where_the_pool_is_empty(tmp_path: Path) -> None:
    """Up to the maximum number of instances; requests without a tier start none."""

    async def test() -> None:
        running: set[str] = set()
        one = tier_leader(tmp_path, running)
        await ticks(one, 4)
        busy = Condition(is_ready=True, num_requests=5, least_tpot_slo_s=0.02, alone_step_s=0.01)
        one._sidecars.condition = busy
        await ticks(one, 2)
        assert {tier for tier, *_ in listed(tmp_path).values()} == {"strict"}
        one._pool.receive(waiting("s", t20=2, t1=9))
        await ticks(one, 1)
        assert len(running) == 2  # the action is written, and carried out at the next tick
        await ticks(one, 1)
        assert len(running) == 3

    asyncio.run(test())


def test_a_tier_whose_bound_no_instance_keeps_is_logged_once_and_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the shortest step of the instances; a bound that some instance keeps is not."""

    async def test() -> None:
        one = tier_leader(tmp_path, set())
        service = ProvisionerService(one._pool, one)
        (status,) = (await service.Status(pb.StatusRequest(), None)).pools  # type: ignore[arg-type]
        assert not any(tier.HasField("shortest_step_s") for tier in status.tiers)
        one._sidecars.condition = Condition(is_ready=True, num_requests=0, alone_step_s=0.05)
        await ticks(one, 6)
        assert {tier for tier, *_ in listed(tmp_path).values()} == {""}
        (status,) = (await service.Status(pb.StatusRequest(), None)).pools  # type: ignore[arg-type]
        strict, loose = map(_tier_line, status.tiers)
        assert strict == (
            "  tier strict, 20 ms: 0 instances, 0 pending, 0 requests wait; no instance can keep this bound: the "
            "shortest step takes 50 ms"
        )
        assert loose == "  tier loose, 100 ms: 0 instances, 0 pending, 0 requests wait"

    asyncio.run(test())
    logged = [record for record in caplog.records if record.getMessage().startswith("no instance can keep the bound")]
    assert [vars(record)["fields"]["tier"] for record in logged] == ["strict"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_in_the_middle_of_a_move_loses_no_instance(tmp_path: Path, moment: str) -> None:
    """The next leader finishes the move: before the roster was written, or after it was and before the journal was."""
    running: set[str] = set()

    async def test() -> None:
        one = tier_leader(tmp_path, running)
        apply, die = one.tiers.apply, dying()

        def crash(*arguments: Any) -> None:
            if moment == "after":
                apply(*arguments)
            die()

        one.tiers.apply = crash  # type: ignore[method-assign]
        with pytest.raises(DeathError):
            await ticks(one, 4)
        os.close(one._lease._handle)  # what the kernel does when a process ends
        assert listed(tmp_path)[FIRST][0] == ("strict" if moment == "after" else "")
        last = entries(tmp_path / "journal.jsonl")[-1].action
        assert (last.kind, last.state) == (pb.ACTION_KIND_MOVE, pb.ACTION_STATE_WRITTEN)
        second = tier_leader(tmp_path, running)
        await ticks(second, 1)
        assert listed(tmp_path) == {FIRST: ("strict", 0.02, False), SECOND: ("", float("inf"), False)}
        ended = entries(tmp_path / "journal.jsonl")[-1].action
        assert (ended.action_id, ended.state) == (last.action_id, pb.ACTION_STATE_DONE)
        await ticks(second, 3)
        assert len(entries(tmp_path / "journal.jsonl")) == len({*map(str, entries(tmp_path / "journal.jsonl"))})

    asyncio.run(test())
    assert running == {FIRST, SECOND}


def test_tiers_that_changed_in_the_file_count_after_a_restart(tmp_path: Path) -> None:
    """Another bound, a tier that is gone, and no tiers at all."""

    async def test() -> None:
        running: set[str] = set()
        one = tier_leader(tmp_path, running)
        await ticks(one, 4)
        one._pool.receive(waiting("s", t100=2))
        await ticks(one, 1)
        await one.close()
        second = tier_leader(tmp_path, running, '[[tier]]\nname = "strict"\ntpot_slo_s = 0.03\n')
        await ticks(second, 1)
        assert listed(tmp_path) == {FIRST: ("strict", 0.03, False), SECOND: ("", float("inf"), False)}
        await second.close()
        await ticks(leader(tmp_path, RecordingHook(running)), 1)
        assert {tier for tier, *_ in listed(tmp_path).values()} == {""}

    asyncio.run(test())


def test_a_dry_run_moves_nothing(tmp_path: Path) -> None:
    """It writes what it would do, once."""
    table = {
        "instance_id": "a", "state": "ready", "engine_url": "http://127.0.0.1:1", "sidecar_address": "127.0.0.1:1",
    }  # fmt: skip
    (tmp_path / "roster.json").write_text(json.dumps([table]))

    async def test() -> None:
        one = tier_leader(tmp_path, {"a"}, dry_run=True)
        await ticks(one, 3)
        assert listed(tmp_path) == {"a": ("", float("inf"), False)}

    asyncio.run(test())
    moves = [entry.action for entry in entries(tmp_path / "journal.jsonl") if entry.action.moves]
    assert [(action.state, action.dry_run) for action in moves] == [(pb.ACTION_STATE_PLANNED, True)]


def test_a_dry_run_writes_the_same_moves_once(tmp_path: Path) -> None:
    """Also where there were none meanwhile, as while a tier settles."""
    table = {
        "instance_id": "a", "state": "ready", "engine_url": "http://127.0.0.1:1", "sidecar_address": "127.0.0.1:1",
    }  # fmt: skip
    (tmp_path / "roster.json").write_text(json.dumps([table]))

    async def test() -> None:
        tiers = '[[tier]]\nname = "loose"\ntpot_slo_s = 0.1\n'
        one = tier_leader(tmp_path, {"a"}, tiers, dry_run=True)
        one._pool._tier_planner = TierPlanner(one._pool.tiers, settle_s=0.0)
        for num in (1, 0, 1):
            one._pool.receive(waiting("s", t100=num))
            await ticks(one, 1)

    asyncio.run(test())
    moves = [entry.action for entry in entries(tmp_path / "journal.jsonl") if entry.action.moves]
    assert [action.why for action in moves] == ["a to loose: requests of loose wait"]


def test_reports_of_waiting_requests_replace_each_other_and_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of several schedulers add up; of one that is silent they are left out; a bad one is refused."""
    now_s = 100.0
    monkeypatch.setattr("services.provisioner_server.pool.time.monotonic", lambda: now_s)
    pool = tier_leader(tmp_path, set())._pool
    pool.receive(waiting("one", t20=2, t100=1))
    pool.receive(waiting("one", t20=1))
    pool.receive(waiting("two", t20=4))
    assert pool.waiting_targets() == {0.02: 5}
    now_s += 1.5
    pool.receive(waiting("two", t20=3))
    now_s += 1.0
    assert pool.waiting_targets() == {0.02: 3}
    with pytest.raises(ValueError, match=r"waiting.targets.tpot_slo_s: must be a time above 0, not 0"):
        pool.receive(waiting("one", t0=1))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rule": "tiers"}, "tiers: is missing; the rule tiers needs a file of them"),
        ({"rule": "headroom+tiers"}, "tiers: is missing"),
        ({"tiers": "none.toml"}, "none.toml: cannot be read"),
        ({"tiers": "bad.toml"}, r"tier\[0\].min_instances: must be a whole number from 0 on, not -1"),
        ({"tiers": "many.toml"}, "tier: min_instances: 11 in sum are more than max_instances 10 of the pool"),
        ({"tier_hold_s": 0.0}, "tier_hold_s: must be a time above 0"),
    ],
)
def test_invalid_settings_of_tiers_are_refused_by_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: str
) -> None:
    """Before anything is applied."""
    monkeypatch.chdir(tmp_path)
    entry = '[[tier]]\nname = "a"\ntpot_slo_s = 0.02\n'
    Path("bad.toml").write_text(f"{entry}min_instances = -1")
    Path("many.toml").write_text(f"{entry}min_instances = 11")
    with pytest.raises(ValueError, match=error):
        ProvisionerSettings(folder=str(tmp_path / "state"), **changes)
    assert not (tmp_path / "state").exists()


def test_a_plan_by_the_rule_needs_tiers(tmp_path: Path) -> None:
    """Also one that is only asked for."""
    one = leader(tmp_path, RecordingHook(set()))
    with pytest.raises(ValueError, match="rule: tiers needs a file of them"):
        one.decide("tiers")
