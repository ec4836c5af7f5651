"""The leader: actions are written before they are carried out, and survive a crash at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protos.block.v1 import provisioner_pb2 as pb
from scheduler.backoff import Backoff
from scheduler.provisioning.pool_state import ScalingTarget
from services.instances.instance import instances_from_file
from services.provisioner_server.journal import Journal, entries
from services.provisioner_server.lease import FileLease
from services.provisioner_server.roster import Roster
from services.provisioner_server.service import ProvisionerService
from services.provisioner_server.sidecars import Condition
from tests.services.provisioner_server.acting import DeathError, RecordingHook, dying, failing, leader
from tests.services.waiting import wait_until

PATIENCE_S = 90.0


async def ticks(one: object, num: int) -> None:
    """Run some ticks of a leader."""
    for _ in range(num):
        await one.tick()  # type: ignore[attr-defined]


def states(folder: Path, action_id: str) -> list[str]:
    """The states of an action, in order."""
    return [
        pb.ActionState.Name(entry.action.state).removeprefix("ACTION_STATE_").lower()
        for entry in entries(folder / "journal.jsonl")
        if entry.action.action_id == action_id
    ]


def test_an_action_is_on_the_disk_before_its_hook_is_called(tmp_path: Path) -> None:
    """The journal contains the action when the hook starts."""
    hook = RecordingHook(set())
    seen: list[list[str]] = []
    hook.before = lambda: seen.append(states(tmp_path, "default-1"))
    one = leader(tmp_path, hook)
    asyncio.run(ticks(one, 4))
    assert seen == [["written"]]
    assert states(tmp_path, "default-1") == ["written", "called", "done"]
    assert hook.running == {"default-1-0", "default-1-1"}
    listed = json.loads((tmp_path / "instances.json").read_text())["instances"]
    assert [instance["state"] for instance in listed] == ["ready", "ready"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_around_an_action_never_doubles_it(tmp_path: Path, moment: str) -> None:
    """The next leader repeats the same action under the same id: two instances, not four."""
    running: set[str] = set()
    first = RecordingHook(running)
    setattr(first, moment, dying())
    one = leader(tmp_path, first)

    async def test() -> None:
        with pytest.raises(DeathError):
            await ticks(one, 3)
        os.close(one._lease._handle)  # what the kernel does when a process ends
        assert states(tmp_path, "default-1") == ["written"]
        second = RecordingHook(running)
        await ticks(leader(tmp_path, second), 4)
        assert [action.action_id for action in second.actions] == ["default-1"]

    asyncio.run(test())
    assert running == {"default-1-0", "default-1-1"}
    assert states(tmp_path, "default-1") == ["written", "called", "done"]


def test_after_a_crash_a_called_action_is_waited_for(tmp_path: Path) -> None:
    """An action whose hook has replied is not called again, and is done when its instances are ready."""
    running: set[str] = set()

    async def test() -> None:
        one = leader(tmp_path, RecordingHook(running))
        one._sidecars.condition = Condition()
        await ticks(one, 3)
        os.close(one._lease._handle)
        assert states(tmp_path, "default-1") == ["written", "called"]
        second = RecordingHook(running)
        await ticks(leader(tmp_path, second), 3)
        assert second.actions == []

    asyncio.run(test())
    assert states(tmp_path, "default-1")[-1] == "done"


def test_the_role_that_a_hook_reports_is_in_the_list_of_instances(tmp_path: Path) -> None:
    """Of those that it started, and of those that it only found; a role that a roster of before has not is both."""

    async def test() -> None:
        hook = RecordingHook({"found"})
        hook.role = "decode"
        one = leader(tmp_path, hook)
        await ticks(one, 4)
        roles = {each.instance_id: each.role for each in instances_from_file(str(tmp_path / "instances.json"))}
        assert roles == {"default-1-0": "decode", "found": "decode"}
        (status,) = (await ProvisionerService(one._pool, one).Status(pb.StatusRequest(), None)).pools  # type: ignore[arg-type]
        assert {each.role for each in status.instances} == {"decode"}
        assert {member.role for member in Roster(tmp_path / "roster.json", tmp_path / "i.json")} == {"decode"}

    asyncio.run(test())


def test_prefill_instances_are_refused_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An action that started some fails for good, and those that are only found do not join the pool."""

    async def test() -> None:
        hook = RecordingHook({"found"})
        hook.role = "prefill"
        one = leader(tmp_path, hook)
        await ticks(one, 2)
        assert list(one.roster()) == []
        (failed, *_) = [one.action for one in entries(tmp_path / "journal.jsonl") if "failed:" in one.action.why]
        assert failed.state == pb.ACTION_STATE_FAILED
        assert failed.why.endswith("block instances add --role prefill)")

    asyncio.run(test())
    refused = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "instance refused"]
    assert [one["instance"] for one in refused].count("found") == 1
    assert refused[0]["reason"].startswith("role: a provisioner runs no prefill instances; start them without it")


def test_only_one_of_two_acts(tmp_path: Path) -> None:
    """The second leader waits until the first releases the lease."""
    running: set[str] = set()

    async def test() -> None:
        hooks = [RecordingHook(running), RecordingHook(running)]
        one, other = (leader(tmp_path, hook, own_id=name) for hook, name in zip(hooks, "ab", strict=True))
        await ticks(one, 3)
        await ticks(other, 3)
        assert (one.leads, other.leads) == (True, False)
        assert await other.holder() == "a"
        assert hooks[1].actions == []
        assert len(list(other.roster())) == 2
        await one.close()
        await ticks(other, 2)
        assert other.leads
        assert await other.holder() == "b"

    asyncio.run(test())


def test_a_failed_hook_is_called_again_with_the_same_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After pauses; the attempt is counted, the id stays."""
    monkeypatch.setattr("services.provisioner_server.action_runner.RETRY", Backoff(first_s=0.0, max_s=30.0))
    hook = RecordingHook(set())
    hook.before = failing(2)
    asyncio.run(ticks(leader(tmp_path, hook), 6))
    assert [(action.action_id, action.attempt) for action in hook.actions] == [
        ("default-1", 1), ("default-1", 2), ("default-1", 3),
    ]  # fmt: skip
    assert len(hook.running) == 2


def test_a_refused_action_fails_with_its_reason(tmp_path: Path) -> None:
    """A permanent failure is not retried; the next plan makes a new action if one is still needed."""
    hook = RecordingHook(set())
    hook.before = failing(1, permanent=True)
    asyncio.run(ticks(leader(tmp_path, hook), 5))
    first = entries(tmp_path / "journal.jsonl")[1].action
    assert first.state == pb.ACTION_STATE_FAILED
    assert "not now" in first.why
    assert len(hook.running) == 2


def test_an_instance_that_never_becomes_ready_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped and counted, and another one is started while it is needed."""
    monkeypatch.setattr("scheduler.provisioning.cold_starts.LEAST_PATIENCE_S", 0.0)
    monkeypatch.setattr("scheduler.provisioning.cold_starts.PATIENCE", 0.0)
    hook = RecordingHook(set())

    async def test() -> None:
        one = leader(tmp_path, hook)
        one._sidecars.condition = Condition()
        await ticks(one, 5)
        assert one._metrics.given_up._value.get() >= 2
        one._sidecars.condition = Condition(is_ready=True, num_requests=0)
        await ticks(one, 6)

    asyncio.run(test())
    assert states(tmp_path, "default-1")[-1] == "given_up"
    stops = [action for action in hook.actions if action.kind == pb.ACTION_KIND_STOP]
    assert {name for action in stops for name in action.instance_ids} >= {"default-1-0", "default-1-1"}
    assert len(hook.running) == 2


def test_an_instance_is_removed_only_without_requests(tmp_path: Path) -> None:
    """Schedulers see it draining first, then its requests end, and only then the hook is called."""
    hook = RecordingHook(set())

    async def test() -> None:
        one = leader(tmp_path, hook, limits={"calm_s": 0.0}, rule="relief")
        one._pool._planner._rule = lambda _: ScalingTarget(num_wanted=3, num_enough=3, why="three")
        await ticks(one, 6)
        assert len(hook.running) == 3
        one._sidecars.condition = Condition(is_ready=True, num_requests=4)
        one._pool._planner._rule = lambda _: ScalingTarget(num_wanted=2, num_enough=2, why="two")
        one._pool._planner._limits = replace(one._pool._planner._limits, calm_s=0.0)
        one._pool.history.cold_starts = type(one._pool.history.cold_starts)(0.0)
        await ticks(one, 6)
        listed = json.loads((tmp_path / "instances.json").read_text())["instances"]
        assert sorted(instance["state"] for instance in listed) == ["draining", "ready", "ready"]
        assert len(hook.running) == 3
        one._sidecars.condition = Condition(is_ready=True, num_requests=0)
        await ticks(one, 2)

    asyncio.run(test())
    assert len(hook.running) == 2


@pytest.mark.parametrize("migrate", [True, False])
def test_a_drain_goes_on_without_its_leader(tmp_path: Path, migrate: bool) -> None:
    """The list says when requests leave; the next leader keeps the time, and removes the instance once it is empty."""
    hook = RecordingHook(set())

    def drain_listed() -> dict[str, Any]:
        listed = json.loads((tmp_path / "instances.json").read_text())["instances"]
        return next(dict(one["drain"]) for one in listed if one["state"] == "draining")

    async def test() -> None:
        one = leader(tmp_path, hook, limits={"calm_s": 0.0}, rule="relief", migrate=migrate, migrate_s=30.0)
        one._pool._planner._rule = lambda _: ScalingTarget(num_wanted=3, num_enough=3, why="three")
        await ticks(one, 6)
        one._sidecars.condition = Condition(is_ready=True, num_requests=4)
        one._pool._planner._rule = lambda _: ScalingTarget(num_wanted=2, num_enough=2, why="two")
        one._pool.history.cold_starts = type(one._pool.history.cold_starts)(0.0)
        await ticks(one, 6)
        told = drain_listed()
        assert ("deadline_unix_s" in told) is migrate
        if migrate:
            assert 25 < told["deadline_unix_s"] - time.time() <= 30
        instances = instances_from_file(str(tmp_path / "instances.json"))
        assert sorted(one.state for one in instances) == ["draining", "ready", "ready"]
        await one._lease.release()  # the process has been killed: nothing else of it is used again
        two = leader(tmp_path, hook, limits={"calm_s": 0.0}, rule="relief", migrate=migrate, migrate_s=30.0)
        two._pool._planner._rule = lambda _: ScalingTarget(num_wanted=2, num_enough=2, why="two")
        two._sidecars.condition = Condition(is_ready=True, num_requests=4)
        await ticks(two, 3)
        assert drain_listed() == told
        assert len(hook.running) == 3
        two._sidecars.condition = Condition(is_ready=True, num_requests=0)
        await ticks(two, 3)

    asyncio.run(test())
    assert len(hook.running) == 2


def test_a_dry_run_only_logs_what_it_would_do(tmp_path: Path) -> None:
    """The action is planned once, not at every tick, and the hook is not called."""
    hook = RecordingHook(set())
    asyncio.run(ticks(leader(tmp_path, hook, dry_run=True), 5))
    assert hook.actions == []
    (entry,) = entries(tmp_path / "journal.jsonl")
    assert (entry.action.state, entry.action.dry_run, entry.action.num_instances) == (pb.ACTION_STATE_PLANNED, True, 2)


def test_a_journal_continues_after_its_last_complete_line(tmp_path: Path) -> None:
    """An incomplete line is dropped; an invalid one is an error that names its line."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    action = pb.Action(action_id="p-1", kind=pb.ACTION_KIND_START, state=pb.ACTION_STATE_WRITTEN)
    journal.write(action, 1.0)
    with path.open("ab") as file:
        file.write(b'{"at_unix_s": 2, "action"')
    again = Journal(path)
    assert [one.action_id for one in again.under_way()] == ["p-1"]
    action.state = pb.ACTION_STATE_DONE
    again.write(action, 3.0)
    assert [entry.at_unix_s for entry in entries(path)] == [1.0, 3.0]
    assert Journal(path).next_id("p") == "p-2"
    with path.open("ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(ValueError, match="line 3"):
        Journal(path)


def test_a_journal_drops_old_moves_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have ended, but for the latest; numbers of actions are never used again, also after a restart."""
    monkeypatch.setattr("services.provisioner_server.journal.MAX_LINES", 20)
    monkeypatch.setattr("services.provisioner_server.journal.KEPT_MOVES", 3)
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)

    def write(kind: pb.ActionKind.ValueType, *states: pb.ActionState.ValueType) -> str:
        name = journal.next_id("p")
        for state in states:
            journal.write(pb.Action(action_id=name, kind=kind, state=state), 1.0)
        return name

    started = write(pb.ACTION_KIND_START, pb.ACTION_STATE_WRITTEN, pb.ACTION_STATE_DONE)
    open_move = write(pb.ACTION_KIND_MOVE, pb.ACTION_STATE_WRITTEN)
    names = [write(pb.ACTION_KIND_MOVE, pb.ACTION_STATE_WRITTEN, pb.ACTION_STATE_DONE) for _ in range(40)]
    assert len(set(names)) == 40
    kept = {entry.action.action_id for entry in entries(path)}
    assert kept >= {started, open_move, *names[-3:]}
    assert len(entries(path)) <= 30
    again = Journal(path)
    assert [action.action_id for action in again.under_way()] == [open_move]
    assert again.next_id("p") == journal.next_id("p") == "p-43"


def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    """The kernel releases a lock when its process is killed."""
    code = (
        "import asyncio, pathlib, sys, time\nfrom services.provisioner_server.lease import FileLease\n"
        "assert asyncio.run(FileLease(pathlib.Path(sys.argv[1]), 'first').held())\nprint('held', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lease")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        lease = FileLease(tmp_path / "lease", "second")
        assert not asyncio.run(lease.held())
        assert asyncio.run(lease.holder()) == "first"
        process.kill()
        process.wait()
    wait_until(lambda: asyncio.run(lease.held()), PATIENCE_S)
    assert asyncio.run(lease.holder()) == "second"


COMMAND = """
import json, os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
action = json.load(sys.stdin)
with (folder / "heard").open("a") as file:
    file.write(action["action_id"] + "\\n")
when = folder / sys.argv[2]
def die():
    if not when.exists():
        when.touch()
        os.kill(os.getppid(), signal.SIGKILL)
if sys.argv[2] == "before":
    die()
if not (folder / "heard").read_text().count("stop"):
    (folder / ("made-" + action["action_id"])).touch()
if sys.argv[2] == "after":
    die()
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_provisioner_continues_after_a_restart(tmp_path: Path, moment: str) -> None:
    """A real process, killed by its own hook before or after the hook's work: restarted, it starts one instance, not two."""
    script = tmp_path / "hook.py"
    script.write_text(COMMAND)
    words = [
        sys.executable, "-m", "services.cli", "serve", "provisioner", "--port", "0", "--folder", str(tmp_path / "kept"),
        "--hook", "exec", "--exec", f"{sys.executable} {script} {tmp_path} {moment}", "--tick-s", "0.1",
    ]  # fmt: skip
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert states(tmp_path / "kept", "default-1") == ["written"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: "called" in states(tmp_path / "kept", "default-1"), PATIENCE_S)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert (tmp_path / "heard").read_text().split() == ["default-1", "default-1"]
    assert [path.name for path in tmp_path.glob("made-*")] == ["made-default-1"]
