"""Objectives by name at the gateway; requests that are shed, and requests that are demoted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import httpx
import pytest

from protos.block.v1 import common_pb2
from scheduler.decision import Decision
from scheduler.instances import LATE, QUEUE_FULL, OverloadedError
from scheduler.intentions import Shed
from tests.services.files import replace_file
from tests.services.gateway.stubs import STREAM, Call, Scene, completes, scene, streams
from tests.services.gateway.test_failing import error_of
from tests.services.gateway.test_in_process import gateway
from tests.services.objective_tables import chat_table
from tests.services.security.key_files import key
from tests.services.waiting import run, until

REAL, BEST = common_pb2.REQUEST_CLASS_REAL_TIME, common_pb2.REQUEST_CLASS_BEST_EFFORT
TABLE = f"""{chat_table("shed")}
[[objective]]
name = "batch"
class = "best-effort"
"""
CHAT = {"block_class": "real-time", "block_ttft_s": 0.5, "block_tpot_s": 0.05, "block_weight": 3.0}


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A file with two objectives."""
    path = tmp_path / "objectives.toml"
    path.write_text(TABLE)
    return str(path)


def received_last(here: Scene) -> tuple[common_pb2.Request, dict[str, Any]]:
    """Return what the scheduler and the engine received last."""
    return here.scheduler.asked[-1].request, json.loads(here.engines[0].calls[-1].body)


@pytest.mark.parametrize(
    "header", ["x-block-objective", "x-llm-d-inference-objective", "x-gateway-inference-objective"]
)
def test_a_name_gives_what_the_request_does_not_say(header: str, table: str) -> None:
    """Scheduler and engine get final values, not the name."""

    async def test() -> None:
        async with scene(completes, objectives=table) as here:
            assert (await here.post(headers={header: "chat"})).status_code == 200
            request, body = received_last(here)
            assert (request.objective, request.request_class, request.priority, request.weight) == ("", REAL, 2, 3.0)
            assert (request.slo.ttft_s, request.slo.tpot_s) == (0.5, 0.05)
            assert request.when_late == common_pb2.WHEN_LATE_SHED
            assert ("priority" in body, body["vllm_xargs"]) == (False, CHAT)

    run(test)


def test_engines_get_the_priority_of_an_objective_only_where_they_order_by_it(table: str) -> None:
    """A vLLM without the priority policy may refuse any other than 0. What the client states itself is passed."""
    named = {"x-block-objective": "chat"}
    told = common_pb2.Decision(objective=common_pb2.Objective(priority=2, request_class=REAL))

    async def test() -> None:
        for passes in (False, True):
            passed = 2 if passes else None
            async with scene(completes, objectives=table, pass_objective_priority=passes) as here:
                await here.post(headers=named)
                request, body = received_last(here)
                assert (request.priority, body.get("priority")) == (2, passed)
                await here.post(headers={**named, "x-block-priority": "5"})
                assert received_last(here)[1]["priority"] == 5
                await here.post(headers=named, priority=6)
                assert received_last(here)[1]["priority"] == 6
                await here.post(headers=named, nvext={"agent_hints": {"priority": -7}})
                assert received_last(here)[1]["priority"] == 7
            async with scene(completes, pass_objective_priority=passes) as here:
                here.scheduler.changes = told
                await here.post(headers=named)
                assert received_last(here)[1].get("priority") == passed

    run(test)


def test_what_the_request_says_itself_has_precedence(table: str) -> None:
    """Headers, the body's priority and vllm_xargs, each for its own field; a priority of 0 is one that is given."""
    headers = {
        "x-block-objective": "chat", "x-gateway-inference-objective": "batch", "x-slo-ttft-ms": "250",
        "x-block-class": "best-effort", "x-block-priority": "0", "x-block-when-late": "demote",
    }  # fmt: skip

    async def test() -> None:
        async with scene(completes, objectives=table) as here:
            assert (await here.post(headers=headers, vllm_xargs={"block_weight": 0.5})).status_code == 200
            request, body = received_last(here)
            assert (request.request_class, request.priority, request.weight) == (BEST, 0, 0.5)
            assert (request.slo.ttft_s, request.slo.tpot_s) == (0.25, 0.05)
            assert request.when_late == common_pb2.WHEN_LATE_DEMOTE
            assert "priority" not in body
            assert body["vllm_xargs"]["block_class"] == "best-effort"
            for priority in ({"priority": 5}, {"nvext": {"agent_hints": {"priority": -5}}}):
                await here.post(headers={"x-block-objective": "chat"}, **priority)
                assert received_last(here)[0].priority == 5

    run(test)


def test_an_unknown_name_is_refused_in_one_line(table: str) -> None:
    """The line names the header, the value and the closest name; so does one for an unknown word."""

    async def test() -> None:
        async with scene(completes, objectives=table) as here:
            for header, value, message in (
                ("x-block-objective", "chatt", "'chatt' is no known objective; did you mean chat?"),
                ("x-gateway-inference-objective", "x", "'x' is no known objective"),
                ("x-block-when-late", "drop", "must be one of serve, demote, shed, not 'drop'"),
                ("x-block-objective", "a" * 300, "must be at most 256 printable ASCII characters"),
            ):
                response = await here.post(headers={header: value})
                assert (response.status_code, error_of(response)["param"]) == (400, header)
                assert error_of(response)["message"] == f"{header}: {message}"
            assert not here.scheduler.asked

    run(test)


def test_without_a_table_the_scheduler_gets_the_name() -> None:
    """What it makes of the name goes to the engine, and its refusal to the client."""

    async def test() -> None:
        async with scene(completes) as here:
            here.scheduler.changes = common_pb2.Decision(
                objective=common_pb2.Objective(slo=common_pb2.Slo(ttft_s=0.5), priority=2, request_class=REAL)
            )
            assert (await here.post(headers={"x-block-objective": "chat", "x-block-weight": "2"})).status_code == 200
            request, body = received_last(here)
            assert (request.objective, request.weight, request.HasField("slo")) == ("chat", 2.0, False)
            assert body["vllm_xargs"]["block_ttft_s"] == 0.5
            here.scheduler.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "request.objective: 'chat' is unknown")
            response = await here.post(headers={"x-block-objective": "chat"})
            assert (response.status_code, error_of(response)["param"]) == (400, "objective")

    run(test)


def test_a_key_has_an_objective_of_its_own(table: str) -> None:
    """It applies to requests that name none; a table without it is refused."""
    keys = (
        key("secret-a", "alice", objective="chat"), key("secret-b", "b", objective="batch"), key("secret-c", "c"),
    )  # fmt: skip

    async def test() -> None:
        async with scene(completes, keys=keys, objectives=table) as here:
            for secret, headers, expected in (
                ("secret-a", {}, ("alice", 3.0)),
                ("secret-a", {"x-block-objective": "batch"}, ("alice", 1.0)),
                ("secret-b", {"x-gateway-inference-objective": "chat"}, ("b", 3.0)),
                ("secret-c", {}, ("c", 1.0)),
            ):
                response = await here.post(headers={"authorization": f"Bearer {secret}", **headers})
                assert response.status_code == 200
                request, _ = received_last(here)
                assert (request.client_id, request.weight if request.HasField("weight") else 1.0) == expected
        async with scene(completes, keys=keys) as here:
            await here.post(headers={"authorization": "Bearer secret-a"})
            assert received_last(here)[0].objective == "chat"
        with pytest.raises(ValueError, match=r"objective: 'chatter' is missing, which is the objective of an API key"):
            async with scene(keys=(key("k", objective="chatter"),), objectives=table):
                raise AssertionError

    run(test)


def test_the_table_is_followed(table: str) -> None:
    """A new name is known without a restart."""

    async def test() -> None:
        async with scene(completes, objectives=table) as here:
            replace_file(table, TABLE.replace("batch", "bulk"))

            async def is_known() -> bool:
                return (await here.post(headers={"x-block-objective": "bulk"})).status_code == 200

            await until(is_known)
            assert received_last(here)[0].request_class == BEST

    run(test)


# Shed.


def shed_reply(response: httpx.Response) -> tuple[int, str | None, str | None, str | None]:
    """Status, reason and times of a reply; its body is OpenAI's error of a rate limit."""
    assert (error_of(response)["type"], error_of(response)["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    names = ("x-block-shed-reason", "retry-after", "x-block-retry-after-ms")
    return (response.status_code, *(response.headers.get(name) for name in names))  # type: ignore[return-value]


def test_a_request_that_a_scheduler_sheds_goes_nowhere_else() -> None:
    """No other scheduler and no last resort is tried, and the call does not count as failed."""

    async def test() -> None:
        async with scene(completes, num_schedulers=2) as here:
            assert (await here.post()).status_code == 200  # the engine could be a last resort from now on
            num_asked = sum(len(one.asked) for one in here.schedulers)
            for scheduler in here.schedulers:
                scheduler.refusal = (
                    grpc.StatusCode.RESOURCE_EXHAUSTED, "no instance; retry after 2.25 s",
                    (("x-block-shed-reason", "late"), ("x-block-retry-after-ms", "2250.5")),
                )  # fmt: skip
            response = await here.post()
            assert shed_reply(response) == (429, "late", "3", "2250.5")
            assert error_of(response)["message"] == "no instance; retry after 2.25 s"
            assert sum(len(one.asked) for one in here.schedulers) == num_asked + 1
            assert await here.metric("block_gateway_scheduler_failures_total") == 0
            assert len(here.engines[0].calls) == 1

    run(test)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ((("x-block-shed-reason", "queue_full"),), ("queue_full", "1", None)),
        ((("x-block-shed-reason", "new_reason"), ("x-block-retry-after-ms", "x")), ("new_reason", "1", None)),
        ((("x-block-shed-reason", "late"), ("x-block-retry-after-ms", "-5")), ("late", "1", None)),
        ((("x-block-shed-reason", "late"), ("x-block-retry-after-ms", "inf")), ("late", "1", None)),
        ((("x-block-shed-reason", "late"), ("x-block-retry-after-ms", "0")), ("late", "1", "0.0")),
        ((("x-block-shed-reason", "late"), ("x-block-retry-after-ms", "1e9")), ("late", "3600", "3600000.0")),
    ],
)
def test_retry_after_is_within_bounds(
    metadata: tuple[tuple[str, str], ...], expected: tuple[str, str, str | None]
) -> None:
    """At least one second, at most an hour; what a scheduler does not say is left out."""

    async def test() -> None:
        async with scene(completes) as here:
            here.scheduler.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no", metadata)
            assert shed_reply(await here.post())[1:] == expected

    run(test)


def test_a_busy_scheduler_is_not_one_that_sheds() -> None:
    """Without a reason the next scheduler is asked."""

    async def test() -> None:
        async with scene(completes, num_schedulers=2) as here:
            for scheduler in here.schedulers:
                scheduler.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "max_concurrency: too many")
            response = await here.post()
            assert shed_reply(response) == (429, None, "1", None)
            assert [len(one.asked) for one in here.schedulers] == [1, 1]

    run(test)


async def is_down(call: Call) -> None:
    """Refuse, as an engine that does not serve."""
    call.whole({"error": {"message": "down"}}, 503)


def test_a_retry_that_is_shed_says_when_to_come_back() -> None:
    """Where an engine failed and the next decision sheds the request, no other engine is used without a decision."""

    async def test() -> None:
        async with scene(is_down, completes) as here:
            refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no", (("x-block-shed-reason", "late"),))

            async def fails(call: Call) -> None:
                here.scheduler.refusal = refusal
                await is_down(call)

            here.engines[0].answer = fails
            assert shed_reply(await here.post()) == (429, "late", "1", None)
            assert not here.engines[1].calls

    run(test)


def test_a_gateway_that_decides_itself_sheds_as_well() -> None:
    """The same status, headers and body."""

    async def test() -> None:
        async with gateway(completes) as here:
            refused = Shed(OverloadedError(QUEUE_FULL), 0.25)
            with mock.patch.object(Decision, "start", return_value=refused):
                response = await here.post()
            assert shed_reply(response) == (429, QUEUE_FULL, "1", "250.0")
            assert error_of(response)["message"] == "the admission queue is full; retry after 0.25 s"
            late = Shed(OverloadedError(LATE))
            with mock.patch.object(Decision, "start", return_value=late):
                assert shed_reply(await here.post()) == (429, LATE, "1", None)

    run(test)


# Demoted.


def test_a_demoted_request_is_best_effort_for_the_engine(table: str) -> None:
    """The engine gets no targets, not even those of the body; the reply says so; a retry asks as the client did."""

    async def test() -> None:
        async with scene(is_down, streams, objectives=table) as here:
            here.scheduler.changes = common_pb2.Decision(
                demoted=True, objective=common_pb2.Objective(request_class=BEST, priority=2, weight=3)
            )
            xargs = {"block_ttft_s": 0.1, "block_mine": "x"}
            response = await here.post(headers={"x-block-objective": "chat"}, vllm_xargs=xargs, stream=True)
            assert response.headers["x-block-demoted"] == "true"
            assert response.content == b"".join(STREAM)
            for engine in here.engines:
                body = json.loads(engine.calls[-1].body)
                assert body["vllm_xargs"] == {"block_mine": "x", "block_class": "best-effort", "block_weight": 3.0}
            assert [asked.request.slo.ttft_s for asked in here.scheduler.asked] == [0.1, 0.1]
            here.scheduler.changes = common_pb2.Decision()
            here.engines[0].answer = streams
            assert "x-block-demoted" not in (await here.post(stream=True)).headers

    run(test)
