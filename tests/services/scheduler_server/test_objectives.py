"""Requests that ask for an objective by name, requests that are shed, and requests that are demoted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from predictor.request import BEST_EFFORT, REAL_TIME, Slo
from protos.block.v1 import common_pb2, predictor_pb2, scheduler_pb2
from scheduler.decision import Decision
from scheduler.instances import LATE, QUEUE_FULL, TENANT_LIMIT, OverloadedError
from scheduler.intentions import Intention, Shed
from scheduler.objectives import DEMOTE, SHED, Objective
from scheduler.placement import PlacementRequest
from services.placement.settings import SchedulerSettings
from tests.services.files import replace_file
from tests.services.objective_tables import chat_table
from tests.services.scheduler_server.running import cluster, refused, run, scheduler, text_of
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import until

REAL, BEST = common_pb2.REQUEST_CLASS_REAL_TIME, common_pb2.REQUEST_CLASS_BEST_EFFORT
TABLE = chat_table("demote")
START = Decision.start


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A file with one objective."""
    path = tmp_path / "objectives.toml"
    path.write_text(TABLE)
    return str(path)


@contextmanager
def deciding(start: Any) -> Iterator[list[PlacementRequest]]:
    """Begin each decision by a function; record what is to be placed."""
    seen: list[PlacementRequest] = []

    def begin(decision: Decision, now_s: float) -> Intention:
        seen.append(replace(decision.request))
        intention: Intention = start(decision, now_s)
        return intention

    with mock.patch.object(Decision, "start", begin):
        yield seen


def demotes(decision: Decision, now_s: float) -> Intention:
    """Decide as usual, for best effort."""
    decision.request.objective = Objective(request_class=BEST_EFFORT, priority=9, when_late=DEMOTE)
    return START(decision, now_s)


def sheds(reason: str, retry_after_s: float | None) -> Any:
    """Refuse."""
    return lambda *_: Shed(OverloadedError(reason), retry_after_s)


def test_a_name_gives_what_the_request_does_not_say(table: str) -> None:
    """The decision, the sidecar and the answer have final values; deadlines count from the request's arrival."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, objectives=table) as client:
            with deciding(START) as seen:
                request = client.request(
                    objective="chat", waited_s=0.2, slo=common_pb2.Slo(tpot_s=0.1), client_id="c", session_id="s"
                )
                decision = await client.decide(request)
            (placing,) = seen
            slo = Slo(ttft_s=0.5, tpot_s=0.1)
            assert placing.objective == Objective(name="chat", slo=slo, priority=2, weight=3.0, when_late=DEMOTE)
            assert (placing.client_id, placing.session_id) == ("c", "s")
            assert placing.indicators.due_s == pytest.approx(
                placing.arrived_s - 0.2 + 0.5 - SchedulerSettings().deadline_margin_s, abs=1e-6
            )
            assert placing.indicators.tpot_slo_s == 0.1
            asked = stubs[0].questions[-1].requests[0]
            (held,) = stubs[0].held.values()
            for told in (asked, held.request):
                assert (told.objective, told.request_class, told.priority, told.weight) == ("", REAL, 2, 3.0)
                assert (told.slo.ttft_s, told.slo.tpot_s) == (0.5, 0.1)
            assert (decision.objective.priority, decision.objective.slo.ttft_s, decision.demoted) == (2, 0.5, False)

    run(test)


def test_a_policy_that_ignores_when_late_is_warned_of_once(table: str, caplog: pytest.LogCaptureFixture) -> None:
    """At the start where the table has it, or with the first request that asks for it."""

    async def test() -> None:
        late = common_pb2.WHEN_LATE_SHED
        for policy, settings, at_start, then in (
            ("block", {"objectives": table}, 1, 1), ("block", {}, 0, 1), ("slo: hold_s = 0.01", {"objectives": table}, 0, 0),
        ):  # fmt: skip
            caplog.clear()
            async with sidecars("a") as stubs, scheduler(stubs, policy=policy, **settings) as client:
                warned = [one for one in caplog.records if one.message == "policy ignores when_late"]
                assert len(warned) == at_start
                await client.decide(client.request())
                for _ in range(2):
                    with suppress(grpc.RpcError):  # `slo` reads it: no instance admits the request
                        await client.decide(client.request(when_late=late))
                warned = [one for one in caplog.records if one.message == "policy ignores when_late"]
                assert len(warned) == then

    run(test)


def test_a_request_without_targets_is_never_due(table: str) -> None:
    """It has no objective, and its decision says nothing of one."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, objectives=table) as client:
            with deciding(START) as seen:
                decision = await client.decide(client.request(when_late=common_pb2.WHEN_LATE_SHED))
            assert seen[0].objective == Objective(when_late=SHED)
            assert (seen[0].indicators.due_s, seen[0].indicators.tpot_slo_s) == (math.inf, math.inf)
            assert not decision.HasField("objective")

    run(test)


def test_an_unknown_name_is_refused(table: str) -> None:
    """One line names the field, the value and the closest name, or what is missing."""

    async def test() -> None:
        async with sidecars("a") as stubs:
            async with scheduler(stubs, objectives=table) as client:
                error = await refused(client.decide(client.request(objective="chatt")))
                assert error == "request.objective: 'chatt' is no known objective; did you mean chat?"
                error = await refused(client.generate(request=client.request(objective="chatt", output_tokens=None)))
                assert error.startswith("request.objective: 'chatt'")
            async with scheduler(stubs) as client:
                error = await refused(client.decide(client.request(objective="chat")))
                assert error.startswith("request.objective: 'chat' is unknown")
            assert not stubs[0].held

    run(test)


def test_the_table_is_followed(table: str) -> None:
    """A new name is known without a restart."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, objectives=table) as client:
            await refused(client.decide(client.request(objective="batch")))
            replace_file(table, TABLE + '\n[[objective]]\nname = "batch"\nclass = "best-effort"\n')

            async def is_known() -> bool:
                try:
                    return (await client.decide(client.request(objective="batch"))).objective.request_class == BEST
                except grpc.aio.AioRpcError:
                    return False

            await until(is_known)

    run(test)


@pytest.mark.parametrize(
    ("reason", "retry_after_s", "ms", "message"),
    [
        (LATE, 2.25, "2250.0", "no instance can keep the request's targets .*; retry after 2.25 s, or ask .*when_late"),
        (QUEUE_FULL, None, None, "the admission queue is full; retry later"),
        (QUEUE_FULL, math.inf, None, "the admission queue is full; retry later"),
        (TENANT_LIMIT, 1e5, "3600000.0", "the client has as many waiting .*; retry after 1e[+]05 s"),
    ],
)
def test_a_shed_request_is_told_why_and_when_to_retry(
    reason: str, retry_after_s: float | None, ms: str | None, message: str, tmp_path: Path
) -> None:
    """RESOURCE_EXHAUSTED with trailing metadata, for decisions and for streams; counted apart from other refusals."""
    record = tmp_path / "record"

    async def test() -> None:
        async with cluster(1, record=str(record)) as (client, stubs, behind):
            with deciding(sheds(reason, retry_after_s)):
                for call in (client.decide(client.request(request_class=BEST)), client.generate()):
                    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    told = dict(caught.value.trailing_metadata() or ())
                    assert told.get("x-block-shed-reason") == reason
                    assert told.get("x-block-retry-after-ms") == ms
            name = "block_scheduler_shed_total"
            assert client.count(name, reason=reason, **{"class": BEST_EFFORT}) == 1
            assert client.count(name, reason=reason, **{"class": REAL_TIME}) == 1
            assert client.count("block_undecided_total") == 0
            assert (stubs[0].held, behind[0].bodies) == ({}, [])

    run(test)


def test_a_request_that_is_served_late_is_counted(table: str) -> None:
    """And its decision says so."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, objectives=table) as client:
            with mock.patch.object(Decision, "deadlines_dropped", LATE):
                decision = await client.decide(client.request(objective="chat"))
            assert "; late, as no instance keeps its deadlines" in decision.why
            assert not decision.demoted
            assert client.count("block_scheduler_served_late_total", reason="late") == 1

    run(test)


def test_a_demoted_request_is_best_effort_for_sidecar_and_engine(table: str, tmp_path: Path) -> None:
    """Neither has its targets; the answer says so, and the record has what the request asked for."""
    record = tmp_path / "record"

    async def test() -> None:
        async with cluster(1, objectives=table, record=str(record)) as (client, stubs, behind):
            request = client.request(objective="chat", max_tokens=9, output_tokens=None, client_id="c")
            message = scheduler_pb2.GenerateRequest(request=request, prompt="Tell me")
            message.parameters.update({"vllm_xargs": {"block_tpot_s": 0.05, "block_mine": "x"}})
            with deciding(demotes):
                await client.decide(client.request(request_id="held", objective="chat"))
                events = [event async for event in client.stub.Generate(message)]
            held = stubs[0].held["held"].request
            assert (held.request_class, held.HasField("slo"), held.priority) == (BEST, False, 9)
            assert text_of(events) == "Once upon a time"
            decision = events[0].decision
            assert decision.demoted
            assert decision.why.endswith("; demoted to best effort, as no instance keeps its deadlines")
            assert (decision.objective.request_class, decision.objective.HasField("slo")) == (BEST, False)
            asked = stubs[0].questions[-1].requests[0]
            assert len(stubs[0].reserved_ids) == 2
            assert (asked.request_class, asked.HasField("slo"), asked.priority) == (BEST, False, 9)
            body = behind[0].bodies[0]
            assert body["vllm_xargs"] == {"block_mine": "x", "block_class": "best-effort", "block_client_id": "c"}
            assert "priority" not in body
            assert client.count("block_scheduler_demoted_total") == 2

    run(test)
    line = json.loads(record.read_text().splitlines()[0])
    recorded = ParseDict(line["request"], common_pb2.Request())
    assert (recorded.request_class, recorded.slo.ttft_s, recorded.priority) == (REAL, 0.5, 2)
    assert line["decision"]["demoted"] is True


@pytest.mark.parametrize("passes", [False, True])
def test_an_engine_is_told_what_a_stream_asks_for(table: str, monkeypatch: pytest.MonkeyPatch, *, passes: bool) -> None:
    """What the client set for the engine itself has precedence; an objective's priority is passed where that is set."""
    monkeypatch.setattr("services.http.engine_arguments.LONG_WAIT_S", math.inf)  # otherwise less of the target is left

    async def test() -> None:
        async with cluster(1, objectives=table, pass_objective_priority=passes) as (client, _, behind):
            request = client.request(objective="chat", max_tokens=9, output_tokens=None)
            await client.generate(request=request)
            message = scheduler_pb2.GenerateRequest(request=request, prompt="Tell me")
            message.parameters.update({"vllm_xargs": {"block_weight": 7.5}})
            assert [event async for event in client.stub.Generate(message)]
            told = {"block_class": "real-time", "block_ttft_s": 0.5, "block_tpot_s": 0.05, "block_weight": 3.0}
            assert behind[0].bodies[0]["vllm_xargs"] == told
            assert behind[0].bodies[1]["vllm_xargs"] == {**told, "block_weight": 7.5}
            assert [body.get("priority") for body in behind[0].bodies] == [2 if passes else None] * 2
            await client.generate(request=client.request(objective="chat", priority=4, output_tokens=None))
            assert behind[0].bodies[-1]["priority"] == 4

    run(test)


def test_what_happens_to_late_requests() -> None:
    """Where no instance keeps a target, `when_late` decides; a request whose target is kept is placed as ever."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, policy="slo") as client:

            def forecasts(response: predictor_pb2.PredictResponse) -> None:
                slo = stubs[0].questions[-1].requests[0].slo
                is_late = slo.HasField("ttft_s") and slo.ttft_s < stubs[0].ttft_s
                forecast = response.predictions[0].forecast
                forecast.attained, forecast.others_missed, forecast.others_preempted = float(not is_late), 0, 0
                forecast.least_slack_s = 1.0

            stubs[0].twist = forecasts
            late = common_pb2.Slo(ttft_s=stubs[0].ttft_s / 2)
            served = await client.decide(client.request(slo=late))
            demoted = await client.decide(client.request(slo=late, when_late=common_pb2.WHEN_LATE_DEMOTE))
            assert [one.instance.instance_id for one in (served, demoted)] == ["a", "a"]
            assert [one.demoted for one in (served, demoted)] == [False, True]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.decide(client.request(slo=late, when_late=common_pb2.WHEN_LATE_SHED))
            told = dict(caught.value.trailing_metadata() or ())
            assert told["x-block-shed-reason"] == LATE
            assert float(told["x-block-retry-after-ms"]) > 0
            kept = common_pb2.Slo(ttft_s=60.0)
            timely = await client.decide(client.request(slo=kept, when_late=common_pb2.WHEN_LATE_SHED))
            assert not timely.demoted
            held = [stubs[0].held[one.request_id].request for one in (served, demoted, timely)]
            assert [one.HasField("slo") for one in held] == [True, False, True]

    run(test)
