"""Open-loop load on working and failing engines, and its report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise

import pytest

from predictor.request import Slo
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from simulator.load_plan import Planned
from simulator.load_report import RequestResult, summary, table
from tests.services.gateway.stubs import DONE, Answer, Call, engines, event, hangs, unreachable
from tests.services.waiting import PATIENCE_S, run

NO_SLO = Slo()


def plan_of(num: int, gap_s: float = 0.0) -> list[Planned]:
    """Plan requests with responses of three tokens."""
    return [
        Planned(request_id=str(number), due_s=number * gap_s, prompt_tokens=2, output_tokens=3) for number in range(num)
    ]


async def answers(call: Call) -> None:
    """Return the requested number of tokens, with the instance and forecasts in headers."""
    num = json.loads(call.body)["max_tokens"]
    headers = ("x-block-instance: e0", "x-block-predicted-ttft-ms: 10", "x-block-predicted-e2e-ms: 20")
    call.head(200, "text/event-stream", "transfer-encoding: chunked", *headers)
    for number in range(num):
        await call.chunk(event("x", "length" if number == num - 1 else None))
    await call.chunk(DONE)
    call.end()


async def load(
    plan: Sequence[Planned], url: str, limits: LoadLimits | None = None, time_scale: float = 1.0
) -> list[RequestResult]:
    """Send a plan to an engine."""
    form = RequestFormat(model="tiny", time_scale=time_scale)
    return await run_plan(plan, origin_of(url), form, limits or LoadLimits(), lambda _: None)


def test_all_requests_are_sent_and_timed() -> None:
    """Each result has its times, its tokens, its instance and its forecasts."""

    async def test() -> None:
        async with engines(answers) as (engine,):
            results = await load(plan_of(20, 0.002), engine.url)
            assert len(engine.calls) == len(results) == 20
            for result in results:
                assert (result.failure, result.output_tokens, result.instance) == (None, 3, "e0")
                assert result.ttft_s is not None
                assert result.e2e_s is not None
                assert 0 <= result.sent_s < result.ttft_s <= result.e2e_s
                assert result.tpot_s == pytest.approx((result.e2e_s - result.ttft_s) / 2)
                assert (result.predicted_ttft_s, result.predicted_e2e_s) == (0.01, 0.02)

    run(test)


def test_requests_do_not_wait_for_earlier_ones() -> None:
    """Requests are sent when they are due, although none has been answered yet."""
    all_sent = asyncio.Barrier(8)

    async def waits(call: Call) -> None:
        await all_sent.wait()
        await answers(call)

    async def test() -> None:
        async with engines(waits) as (engine,):
            results = await load(plan_of(8), engine.url)
            assert [result.failure for result in results] == [None] * 8

    run(test)


def test_waiting_for_max_in_flight_counts() -> None:
    """If requests wait for each other, their latencies count from when they were due."""

    async def test() -> None:
        async with engines(answers) as (engine,):
            results = await load(plan_of(4), engine.url, LoadLimits(max_in_flight=1))
            for before, result in pairwise(results):
                assert before.e2e_s is not None
                assert result.ttft_s is not None
                assert before.e2e_s <= result.sent_s < result.ttft_s

    run(test)


def test_time_scale() -> None:
    """All latencies, and the forecasts in headers, are in the endpoint's time."""

    async def test() -> None:
        async with engines(answers) as (engine,):
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            results = await load(plan_of(5, 0.01), engine.url, time_scale=0.1)
            wall_s = loop.time() - start_s
            assert wall_s > 0.39
            assert [result.failure for result in results] == [None] * 5
            assert all(result.e2e_s is not None and result.e2e_s <= 0.1 * wall_s for result in results)
            assert {(result.predicted_ttft_s, result.predicted_e2e_s) for result in results} == {(0.001, 0.002)}

    run(test)


async def refuses(call: Call) -> None:
    """Answer with an error status."""
    call.whole({"error": {"message": "too much"}}, 429)


async def breaks(call: Call) -> None:
    """Close the connection in the middle of a response."""
    call.stream()
    await call.chunk(event("x"))
    call.die()


async def errs(call: Call) -> None:
    """End with an error event."""
    call.stream()
    await call.chunk(event("x") + b'data: {"error": {"message": "gone"}}\n\n')
    call.end()


async def sends_no_tokens(call: Call) -> None:
    """End without a token."""
    call.stream()
    await call.chunk(DONE)
    call.end()


async def stops_short(call: Call) -> None:
    """End without a finish reason."""
    call.stream()
    await call.chunk(event("x"))
    call.end()


FAILURES = (
    (stops_short, "cut short"),
    (refuses, "status 429"),
    (breaks, "broken"),
    (errs, "error event"),
    (hangs, "timeout"),
    (sends_no_tokens, "empty"),
)


@pytest.mark.parametrize(("answer", "kind"), FAILURES)
def test_failures_by_kind(answer: Answer, kind: str) -> None:
    """Failures are counted by kind, and do not end the run."""

    async def test() -> None:
        async with engines(answer) as (engine,):
            limits = LoadLimits(timeout_s=2.0 if kind == "timeout" else PATIENCE_S)
            total = summary(await load(plan_of(3), engine.url, limits), NO_SLO)
            assert (total["num_ok"], total["failures"]) == (0, {kind: 3})
            assert total["e2e_s"] is None
            assert any(kind in line for line in table(total))

    run(test)


@pytest.mark.parametrize(
    ("headers", "reason", "retry_after_s"),
    [
        (("retry-after: 2",), "unnamed", 0.2),
        (("retry-after: 3", "x-block-retry-after-ms: 2500.0", "x-block-shed-reason: late"), "late", 0.25),
    ],
)
def test_a_request_that_is_told_when_to_retry_is_shed(
    headers: tuple[str, ...], reason: str, retry_after_s: float
) -> None:
    """It is counted apart from failures, with the exact time where there is one, in the endpoint's time."""

    async def sheds(call: Call) -> None:
        call.whole({"error": {"message": "late"}}, 429, *headers)

    async def test() -> None:
        async with engines(sheds) as (engine,):
            results = await load(plan_of(3), engine.url, time_scale=0.1)
            assert [one.shed_reason for one in results] == [reason] * 3
            assert [one.retry_after_s for one in results] == [pytest.approx(retry_after_s)] * 3
            total = summary(results, NO_SLO)
            assert (total["num_ok"], total["num_failed"], total["shed"]) == (0, 0, {reason: 3})

    run(test)


def test_an_unreachable_endpoint() -> None:
    """An endpoint that cannot be reached is a kind of failure."""

    async def test() -> None:
        total = summary(await load(plan_of(2), unreachable()), NO_SLO)
        assert total["failures"] == {"unreachable": 2}

    run(test)
