"""Schedulers over prefill and decode instances: what crosses the wire, and what is released."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos.block.v1 import common_pb2, predictor_pb2
from services.instances.sources import Listed
from services.placement.decision_log import DecisionLog
from tests.services.scheduler_server.running import STOP, Client, refused, run, scheduler, until
from tests.services.stub_sidecars import StubSidecar, sidecars

ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "both"}
ALWAYS = "block: disaggregate = 'always'"


class Fetching:
    """Makes a stub forecast decode legs as sidecars do: their times include what comes before."""

    def __init__(self, stub: StubSidecar) -> None:
        """Change the replies of a stub."""
        self.stub = stub

    def __call__(self, response: predictor_pb2.PredictResponse) -> None:
        """Postpone a decode leg by the time until it arrives."""
        (asked,) = self.stub.questions[-1].requests
        if asked.leg == common_pb2.LEG_DECODE:
            for prediction in response.predictions:
                one = prediction.forecast
                one.queue_s, one.fetched_s = asked.in_s, asked.in_s + 0.05
                one.ttft_s, one.e2e_s = asked.in_s + 0.1, asked.in_s + self.stub.e2e_s


@asynccontextmanager
async def pools(roles: dict[str, str] = ROLES, **settings: Any) -> AsyncIterator[tuple[Client, dict[str, StubSidecar]]]:
    """Serve a scheduler over sidecars of instances with roles."""
    async with sidecars(*roles) as stubs:
        for stub in stubs:
            stub.e2e_s = 0.4 if roles[stub.name] == "prefill" else 2.0
            stub.twist = Fetching(stub)
        listed = Listed([replace(stub.instance, role=roles[stub.name]) for stub in stubs])
        async with scheduler(listed, **{"policy": ALWAYS, **settings}) as client:
            yield client, {stub.name: stub for stub in stubs}


def held(stubs: dict[str, StubSidecar]) -> dict[str, int]:
    """The legs that are reserved."""
    return {name: one.request.leg for name, stub in stubs.items() for one in stub.held.values()}


BOTH_LEGS = {"p": common_pb2.LEG_PREFILL, "d": common_pb2.LEG_DECODE}


def test_a_decision_names_the_instances_of_both_legs() -> None:
    """Both are reserved: the decode leg until it has arrived, the prefill leg with how long its blocks are held."""

    async def test() -> None:
        async with pools(reservation_s=10.0) as (client, stubs):
            decision = await client.decide()
            assert (decision.instance.instance_id, decision.instance.role) == ("d", "decode")
            prefill = decision.prefill
            assert (prefill.leg, prefill.instance.instance_id) == (common_pb2.LEG_PREFILL, "p")
            assert (prefill.instance.role, prefill.reserved_for_s) == ("prefill", 10.0)
            assert prefill.forecast.e2e_s == pytest.approx(0.4)
            assert decision.forecast.e2e_s == pytest.approx(2.403)
            assert decision.forecast.fetched_s == pytest.approx(0.453)
            assert decision.disaggregation == "pair_always"
            assert held(stubs) == BOTH_LEGS
            (decode,), (prefill_leg,) = stubs["d"].held.values(), stubs["p"].held.values()
            assert (decode.request.in_s, decode.ttl_s) == (pytest.approx(0.403), 10.0)
            assert decision.reserved_for_s == pytest.approx(10.403)
            assert prefill_leg.request.held_s == pytest.approx(0.053)
            assert client.count("block_scheduler_disaggregations_total", policy="block", reason="pair_always") == 1

    run(test)


def test_a_sidecar_that_serves_both_pools_is_asked_about_each_leg_by_its_own_message() -> None:
    """In one fan-out; the request that the caller gave is as before."""

    async def test() -> None:
        async with pools(policy="block") as (client, stubs):
            await client.decide()
            legs = {name: [one.requests[0].leg for one in stub.questions] for name, stub in stubs.items()}
            decode = [0, common_pb2.LEG_DECODE]
            assert legs == {"p": [common_pb2.LEG_PREFILL], "q": [common_pb2.LEG_PREFILL], "d": decode, "e": decode}

    run(test)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the instances at which requests ended with an unknown outcome."""
    at: list[str] = []
    monkeypatch.setattr(DecisionLog, "on_release", lambda _log, _request_id, instance_id: at.append(instance_id))
    return at


def test_each_leg_is_released_by_itself(ends: list[str]) -> None:
    """The release of the prefill leg is no end of the request; its outcome teaches the hand-over."""

    async def test() -> None:
        async with pools() as (client, stubs):
            decision = await client.decide()
            message = common_pb2.ReleaseRequest(request_id=decision.request_id, instance_id="p")
            assert (await client.stub.Release(message)).released
            assert held(stubs) == {"d": common_pb2.LEG_DECODE}
            assert ends == []
            outcome = common_pb2.Outcome(
                request_id=decision.request_id, finish_reason=STOP, e2e_s=2.4, prefill_s=0.4, hand_over_s=1.0
            )
            message = common_pb2.ReleaseRequest(request_id=decision.request_id, instance_id="d", outcome=outcome)
            assert (await client.stub.Release(message)).released
            assert held(stubs) == {}
            later = await client.decide()
            assert later.forecast.e2e_s == pytest.approx(2.4 + 0.003 + 0.05 * (1.0 - 0.003))

    run(test)


def test_the_release_of_a_whole_request_at_a_prefill_instance_ends_it(ends: list[str]) -> None:
    """It is reported as an end, as that at any other instance."""

    async def test() -> None:
        async with pools({"p": "prefill"}) as (client, _):
            decision = await client.decide()
            assert decision.disaggregation == "whole_no_decode"
            assert await client.release(decision)
            assert ends == ["p"]

    run(test)


def test_a_bad_hand_over_is_refused() -> None:
    """By the name of the field."""

    async def test() -> None:
        async with pools() as (client, _):
            outcome = common_pb2.Outcome(request_id="r", hand_over_s=-1.0)
            message = common_pb2.ReleaseRequest(request_id="r", instance_id="d", outcome=outcome)
            assert "outcome.hand_over_s: must be a time from 0 on" in await refused(client.stub.Release(message))

    run(test)


@pytest.mark.parametrize("hung", ["hung_reserving", "hung_after_reserving"])
def test_a_caller_that_leaves_between_the_reservations_leaves_none_of_them(hung: str) -> None:
    """The prefill instance does not reply, or only after it reserved."""

    async def test() -> None:
        async with pools(sidecar_deadline_s=200.0) as (client, stubs):
            event = asyncio.Event()
            setattr(stubs["p"], hung, event)
            deciding = asyncio.ensure_future(client.decide())
            await until(lambda: bool(stubs["d"].held))
            if hung == "hung_after_reserving":
                await until(lambda: bool(stubs["p"].held))
            deciding.cancel()
            await until(lambda: not stubs["d"].held)
            event.set()
            await until(lambda: not held(stubs))

    run(test)


@pytest.mark.parametrize(("names", "instance_id"), [("pq", "d"), ("pqd", "e")])
def test_without_a_reservation_of_the_prefill_leg_nothing_of_the_decode_leg_is_left(
    names: Sequence[str], instance_id: str
) -> None:
    """The request is served as a whole."""

    async def test() -> None:
        async with pools() as (client, stubs):
            for name in names:
                stubs[name].refuse_reservations = True
            decision = await client.decide()
            assert decision.instance.instance_id == instance_id
            assert not decision.HasField("prefill")
            assert decision.disaggregation == "whole_prefill_down"
            assert held(stubs) == {instance_id: common_pb2.LEG_UNSPECIFIED}

    run(test)


def test_a_leg_that_arrives_in_an_hour_is_reserved_as_one_that_arrives_in_ten_minutes() -> None:
    """Sidecars accept no later arrival."""

    async def test() -> None:
        async with pools() as (client, stubs):
            stubs["p"].e2e_s = stubs["q"].e2e_s = 3600.0
            assert (await client.decide()).disaggregation == "pair_always"
            assert [one.request.in_s for one in stubs["d"].held.values()] == [600.0]

    run(test)


def test_a_decode_leg_alone_finds_another_instance() -> None:
    """Its blocks are on a prefill instance still."""

    async def test() -> None:
        async with pools() as (client, stubs):
            request = client.request(leg=common_pb2.LEG_DECODE)
            decision = await client.decide(request, exclude_instance_ids=["d"])
            assert decision.instance.instance_id == "e"
            assert not decision.HasField("prefill")
            assert held(stubs) == {"e": common_pb2.LEG_DECODE}
            assert not stubs["p"].questions

    run(test)


@pytest.mark.parametrize(
    ("roles", "reason", "instance_id", "error"),
    [
        ({"d": "decode", "e": "decode"}, "whole_no_prefill", "d", "no instance with role prefill serves the model"),
        ({"p": "prefill"}, "whole_no_decode", "p", "no instance with role decode or both serves the model"),
    ],
)
def test_a_pool_that_nobody_is_in(roles: dict[str, str], reason: str, instance_id: str, error: str) -> None:
    """Requests are served as a whole, or refused with one line that names the pool."""

    async def test() -> None:
        async with pools(roles) as (client, _):
            decision = await client.decide()
            assert (decision.disaggregation, decision.instance.instance_id) == (reason, instance_id)
        async with pools(roles, without_pool="refuse") as (client, _):
            assert await refused(client.decide(), grpc.StatusCode.UNAVAILABLE) == error

    run(test)
