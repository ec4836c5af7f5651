"""One decision, many drivers: the same answers, failures, conflicts and times give the same placements and holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.block.v1 import common_pb2, scheduler_pb2
from scheduler.candidate import CandidateStatus
from services.placement.driver import PlacementDriver
from tests.scheduler.scripted import Arrival, Record, Reply, Script, ScriptedInstance, recording, reference
from tests.services.placement.scripted_connection import Entry, drive
from tests.strategies import examples

HOLD = 'hold: hold = "predicted_queue_s < 0.5 and predicted_preemptions < 1", hold_s = 0.3'
POLICIES = (
    "block",
    "block: k = 1",
    "block: k = 2, shortlist = 'jsq'",
    "block: filter = 'num_running < 3'",
    "marginal",
    "block_mean",
    "lmetric",
    "jsq",
    "jsq: tie_break = 'num_reserved'",
    "power_of_two",
    "round_robin",
    HOLD,
    HOLD,
    'jsq: hold = "batch_size < 3", hold_s = 0.2',
    'block: hold = "num_running < 0", hold_s = 0.1',
)
FORECAST, LATE, DOWN, INVALID, REFUSED, STOPPED = (
    CandidateStatus.FORECAST,
    CandidateStatus.LATE,
    CandidateStatus.DOWN,
    CandidateStatus.INVALID,
    CandidateStatus.REFUSED,
    CandidateStatus.STOPPED,
)


# How a request enters a placement driver.


async def by_place(
    driver: PlacementDriver, request: common_pb2.Request, excluded: frozenset[str], dry_run: bool
) -> None:
    """As a gateway that decides in its process."""
    await driver.place(request, excluded=excluded, dry_run=dry_run)


async def by_schedule(
    driver: PlacementDriver, request: common_pb2.Request, excluded: frozenset[str], dry_run: bool
) -> None:
    """As the gRPC service."""
    message = scheduler_pb2.ScheduleRequest(
        request=request, exclude_instance_ids=sorted(excluded), dry_run=dry_run, explain=True
    )
    await driver.schedule(message)


ENTRIES: dict[str, Entry] = {"place": by_place, "schedule": by_schedule}


# Scripts.


@st.composite
def scripts(draw: Any, statuses: tuple[CandidateStatus, ...] = (LATE, DOWN, INVALID, REFUSED, STOPPED)) -> Script:
    """A few requests that meet a few instances; no two things happen at the same time."""
    names = "abcd"[: draw(st.integers(1, 4))]
    number = iter(range(1 << 30))

    def after_s(most_ms: int) -> float:
        return draw(st.integers(1, most_ms)) / 1e3 + next(number) * 1.37e-7

    def replies(most: int) -> dict[str, list[Reply]]:
        return {name: [reply() for _ in range(draw(st.integers(1, most)))] for name in names if draw(st.booleans())}

    def reply() -> Reply:
        fails = statuses and draw(st.integers(0, 3)) == 0
        return Reply(
            after_s=after_s(30),
            status=draw(st.sampled_from(statuses)) if fails else FORECAST,
            others_first=draw(st.sampled_from((0, 0, 0, 1, 2))),
        )

    def instance(name: str) -> ScriptedInstance:
        return ScriptedInstance(
            name=name,
            e2e_s=draw(st.sampled_from((1.0, 2.0, 2.2, float("inf")))),
            num_running=draw(st.integers(0, 3)),
            draining=draw(st.integers(0, 9)) == 0,
            engine_failed=draw(st.integers(0, 9)) == 0,
            finishes_s=[after_s(400) for _ in range(draw(st.integers(0, 3)))],
        )

    def arrival() -> Arrival:
        return Arrival(
            after_s=1e-3 + after_s(draw(st.sampled_from((10, 200)))),
            forecasts=all_after(replies(3)),
            reservations=all_after(replies(3)),
            excluded=frozenset(draw(st.sampled_from(("", "", "", "a", "b")))),
            dry_run=draw(st.integers(0, 9)) == 0,
        )

    def all_after(given: dict[str, list[Reply]]) -> dict[str, list[Reply]]:
        return {name: given.get(name) or [Reply(after_s=after_s(30))] for name in names}

    return Script(
        policy=draw(st.sampled_from(POLICIES)),
        instances=[instance(name) for name in names],
        arrivals=[arrival() for _ in range(draw(st.integers(1, 6)))],
        max_conflicts=draw(st.sampled_from((0, 1, 10))),
        max_held=draw(st.sampled_from((1, 2, 1000))),
        forecast_always=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


def assert_same(ours: Record, expected: Record) -> None:
    """Compare step by step, so that the first difference is what is shown."""
    for step, other in zip(ours.steps, expected.steps, strict=False):
        assert step == other
    assert len(ours.steps) == len(expected.steps)
    assert ours.times_s == pytest.approx(expected.times_s, abs=1e-6)
    for name, decision in ours.decisions.items():
        other = expected.decisions[name]
        assert decision.num_conflicts == other.num_conflicts
        if decision.policy.holds and not decision.is_waiting:
            assert decision._held_s == pytest.approx(other._held_s, abs=1e-6)


@pytest.mark.parametrize("entry", ENTRIES)
@examples(150)
@given(script=scripts())
def test_the_asyncio_driver_decides_as_the_reference_does(entry: str, script: Script) -> None:
    """Intentions, placements, holds, explanations and candidates are the same, and so are their times."""
    record = Record()
    with recording(record):
        drive(script, ENTRIES[entry])
    assert_same(record, reference(script))
