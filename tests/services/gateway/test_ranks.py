"""Requests to data-parallel ranks of an engine that serves several at one URL."""

from __future__ import annotations

import pytest

from protos.block.v1 import common_pb2
from services.gateway.destinations import Fallback, destination_of, unreserved_destinations
from tests.services.gateway.stubs import Call, completes, scene, unreachable
from tests.services.waiting import run

HEADER = "x-data-parallel-rank"


async def fails(call: Call) -> None:
    """Refuse the request as an engine that is down."""
    call.whole({"error": {"message": "down"}}, 503)


@pytest.mark.parametrize("own", [{}, {HEADER: "7"}, {HEADER: "none"}])
def test_the_rank_that_was_chosen_is_in_the_header(own: dict[str, str]) -> None:
    """Whatever the client names: the reservation is at the chosen rank."""

    async def test() -> None:
        async with scene(completes, instance={"data_parallel_rank": 2}) as here:
            assert (await here.post(headers=own)).status_code == 200
            assert here.engines[0].calls[0].headers[HEADER] == "2"

    run(test)


def test_a_retry_names_the_rank_of_the_next_instance() -> None:
    """Each attempt has its own."""

    async def test() -> None:
        async with scene(fails, completes) as here:
            for rank, instance in enumerate(here.scheduler.instances):
                instance.data_parallel_rank = rank
            assert (await here.post()).status_code == 200
            assert [engine.calls[0].headers[HEADER] for engine in here.engines] == ["0", "1"]

    run(test)


def test_an_engine_that_cannot_be_reached_fails_with_all_its_ranks() -> None:
    """The next attempt goes to another engine, not to the next rank behind the same URL."""

    async def test() -> None:
        dead = unreachable()
        async with scene(completes, urls=[dead, dead, dead], attempts=2) as here:
            for rank, instance in enumerate(here.scheduler.instances[:3]):
                instance.data_parallel_rank = rank
            here.scheduler.changes.next_best.extend(here.scheduler.instances[1:])
            response = await here.post()
            assert response.status_code == 200
            assert response.headers["x-block-instance"] == "e3"
            assert len(here.scheduler.asked) == 2
            assert set(here.scheduler.asked[1].exclude_instance_ids) >= {"e0", "e1", "e2"}

    run(test)


def test_without_a_rank_headers_pass_as_they_are() -> None:
    """An instance that is a whole engine gets what the client sent."""

    async def test() -> None:
        async with scene(completes) as here:
            await here.post()
            await here.post(headers={HEADER: "1"})
            assert [call.headers.get(HEADER) for call in here.engines[0].calls] == [None, "1"]

    run(test)


def test_without_a_scheduler_all_ranks_of_a_url_take_turns() -> None:
    """Those that decisions named."""
    ranks = [
        common_pb2.Instance(instance_id=f"e-{rank}", engine_url="http://a:1", data_parallel_rank=rank)
        for rank in range(3)
    ]
    decision = common_pb2.Decision(instance=ranks[0], next_best=ranks[1:])
    assert destination_of(decision).rank == 0
    assert [one.rank for one in unreserved_destinations(ranks, "next_best")] == [0, 1, 2]
    resort = Fallback(["http://a:1"], lambda: 0.0)
    resort.note(decision)
    assert resort.urls == []
    chosen = [resort.next("", [], []) for _ in range(3)]
    assert {(one.instance_id, one.rank) for one in chosen if one is not None} == {("e-0", 0), ("e-1", 1), ("e-2", 2)}
