"""Pages that fall behind, or that take nothing any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2
from scheduler.placement import Placement
from services.http.application import Call
from services.live_page import pages
from services.live_page.pages import LivePage
from services.placement import tail as tails
from services.placement.decision_log import DecisionLog
from services.placement.instance_registry import InstanceRegistry
from services.placement.tail import Tail
from tests.services.waiting import run


class Nothing:
    """No instance, and no earlier decision."""

    def handles(self) -> list[Any]:
        """Return no instance."""
        return []

    def last(self, _count: int) -> list[Any]:
        """Return no decision."""
        return []

    def show_every(self, _period_s: float | None) -> None:
        """Ask no instance."""


class Endless:
    """Frames without end, and how many pages read them."""

    def __init__(self) -> None:
        """Start without a page."""
        self.num_readers = 0

    @contextmanager
    def watched(self) -> Iterator[Endless]:
        """Count a page."""
        self.num_readers += 1
        try:
            yield self
        finally:
            self.num_readers -= 1

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield frames."""
        while True:
            yield b"{}"

    async def explain(self, request_id: str) -> common_pb2.Decision:
        """Know no decision."""
        raise NotImplementedError(request_id)


def test_the_end_of_a_request_is_passed_on_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than a new page gets may be under way: a page that has seen one gets its end."""
    monkeypatch.setattr(tails, "FRAME_S", 0.01)
    monkeypatch.setattr(tails, "MAX_SHOWN", 2)
    nothing = Nothing()
    log = cast("DecisionLog", nothing)
    tail = Tail(cast("InstanceRegistry", nothing), log, CollectorRegistry(), dict)

    async def test() -> None:
        with tail.watched() as reader:
            frames = reader.frames()
            await anext(frames)
            for number in range(5):
                message = common_pb2.Decision(request_id=f"r{number}")
                tail.on_placement(common_pb2.Request(), cast("Placement", None), message)
            while "placed" not in json.loads(await anext(frames)):
                pass
            tail.on_outcome(common_pb2.Outcome(request_id="r0"))
            while "ended" not in (frame := json.loads(await anext(frames))):
                pass
            assert [one["id"] for one in frame["ended"]] == ["r0"]
            with tail.watched() as later:
                whole = json.loads(await anext(later.frames()))
                assert [one["id"] for one in whole["placed"]] == ["r3", "r4"]
        await tail.close()

    run(test)


def test_a_page_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place among the readers is free again, and a shutdown does not wait for it."""
    monkeypatch.setattr(pages, "STUCK_S", 0.01)
    source, received = Endless(), [{"type": "http.request", "body": b""}]

    async def receive() -> MutableMapping[str, Any]:
        if received:
            return received.pop()
        return await asyncio.Future()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            assert source.num_readers == 1
            await asyncio.Future()

    call = Call(scope={"method": "GET", "headers": []}, receive=receive, send=send)

    async def test() -> None:
        await LivePage(source).routes["/ui/tail"]["GET"](call)

    run(test)
    assert source.num_readers == 0
