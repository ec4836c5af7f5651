"""What a frame of the live page has of many instances."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.instances.instance import Instance
from services.placement import tail as module
from services.placement.decision_log import DecisionLog
from services.placement.instance_registry import InstanceRegistry
from services.placement.metrics import SchedulerMetrics
from services.placement.settings import SchedulerSettings
from services.placement.tail import MAX_REPORTED, Tail, TailReader
from tests.services.waiting import run

NUM = 2 * MAX_REPORTED + 5


@contextmanager
def registry_of(num: int) -> Iterator[tuple[InstanceRegistry, Tail]]:
    """Keep instances that nothing is asked of, and a tail over them."""
    metrics = SchedulerMetrics(CollectorRegistry())
    registry = InstanceRegistry(SchedulerSettings(sidecar_deadline_s=60.0), metrics)
    registry.update(
        tuple(
            Instance(instance_id=f"i{n:03}", engine_url="http://127.0.0.1:1", sidecar_address="127.0.0.1:1")
            for n in range(num)
        )
    )
    yield registry, Tail(registry, DecisionLog(4096), metrics.registry, dict)


async def next_frame(reader: TailReader) -> dict[str, Any]:
    """Wait for a frame."""
    frames = reader.frames()
    frame: dict[str, Any] = json.loads(await anext(frames))
    await frames.aclose()
    return frame


def ids_in(frame: dict[str, Any]) -> list[str]:
    """The instances that a frame has."""
    return [one["id"] for one in frame.get("instances", ())]


def test_new_numbers_of_many_instances_come_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance has its turn; one whose state changes is in the next frame."""
    monkeypatch.setattr(module, "FRAME_S", 0.001)

    async def test() -> None:
        with registry_of(NUM) as (registry, tail):
            with tail.watched() as reader:
                assert len(ids_in(await next_frame(reader))) == NUM  # the whole state
                assert len(ids_in(await next_frame(reader))) == NUM  # all states are new to the frames
                while ids_in(await next_frame(reader)):  # until those of the connections have settled
                    pass
                for handle in registry.handles():
                    handle.status.reported_s += 1.0
                last = registry.handles()[-1]
                last.status.reported_state = "draining"
                found: list[list[str]] = []
                while sum(map(len, found)) < NUM:
                    ids = ids_in(await next_frame(reader))
                    if ids:
                        found.append(ids)
                assert last.name in found[0]
                assert len(found) > 1
                assert max(map(len, found[1:])) <= MAX_REPORTED < len(found[0]) <= MAX_REPORTED + 1
                assert {name for ids in found for name in ids} == {one.name for one in registry.handles()}
            await tail.close()
            await registry.close()

    run(test)


def test_reports_for_a_page_come_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread over the interval; without a page nobody reports."""
    waits_s: list[float] = []

    async def test() -> None:
        with registry_of(40) as (registry, _):
            for handle in registry.handles():
                monkeypatch.setattr(
                    handle, "watch", lambda interval_s, *, after_s: waits_s.append(after_s / interval_s)
                )
            registry.show_every(0.5)
            assert sorted(set(waits_s)) == pytest.approx([0, 1 / 3, 2 / 3])
            assert max(map(waits_s.count, waits_s)) == 14
            waits_s.clear()
            registry.watch()  # for a policy, which needs them at once
            assert set(waits_s) == {0.0}
            await registry.close()
            await asyncio.sleep(0)

    run(test)
