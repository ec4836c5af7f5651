"""Open-loop load on working and failing engines, and its report."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Sequence
from itertools import pairwise

import pytest

from predictor.request import Slo
from services.http.client import origin_of
from services.load.asking import Manner
from services.load.running import LoadLimits, run_plan
from simulator.load_plan import Planned
from simulator.load_report import RequestResult, meets_slo, summary, table, write_csv
from tests.services.gateway.stubs import DONE, Answer, Call, engines, event, hangs, unreachable
from tests.services.waiting import run

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
    manner = Manner(model="tiny", time_scale=time_scale)
    return await run_plan(plan, origin_of(url), manner, limits or LoadLimits(), lambda _: None)


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
            limits = LoadLimits(timeout_s=0.1 if kind == "timeout" else 60.0)
            total = summary(await load(plan_of(3), engine.url, limits), NO_SLO)
            assert (total["num_ok"], total["failures"]) == (0, {kind: 3})
            assert total["e2e_s"] is None
            assert any(kind in line for line in table(total))

    run(test)


def test_an_unreachable_endpoint() -> None:
    """An endpoint that cannot be reached is a kind of failure."""

    async def test() -> None:
        total = summary(await load(plan_of(2), await unreachable()), NO_SLO)
        assert total["failures"] == {"unreachable": 2}

    run(test)


# Reports.


def result(
    number: int, ttft_s: float, tpot_s: float, *, slo: Slo | None = None, failure: str | None = None
) -> RequestResult:
    """Return a result with eleven tokens."""
    plan = Planned(request_id=str(number), due_s=float(number), prompt_tokens=5, output_tokens=11, slo=slo)
    return RequestResult(
        plan=plan, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=ttft_s + 10 * tpot_s, output_tokens=11, failure=failure,
        predicted_e2e_s=1.0, predicted_ttft_s=0.1, instance="e0" if number == 2 else "e1",
    )  # fmt: skip


RESULTS = [
    result(0, 0.1, 0.09),
    result(1, 0.2, 0.08),
    result(2, 0.3, 0.02, slo=Slo(ttft_s=0.35)),
    result(3, 0.4, 0.06),
    result(4, 0.1, 0.01, failure="broken"),
]


def test_a_summary() -> None:
    """Rates count from the first arrival to the last end; latencies leave failures out."""
    total = summary(RESULTS, Slo(ttft_s=0.25, tpot_s=0.085))
    assert (total["num_requests"], total["num_ok"], total["num_failed"], total["failures"]) == (5, 4, 1, {"broken": 1})
    assert total["duration_s"] == pytest.approx(4.2)
    assert total["requests_per_s"] == pytest.approx(4 / 4.2)
    assert total["output_tokens_per_s"] == pytest.approx(44 / 4.2)
    assert total["offered_requests_per_s"] == pytest.approx(1.0)
    assert total["ttft_s"] == {
        "mean": pytest.approx(0.25), "p50": pytest.approx(0.25), "p90": pytest.approx(0.37), "p99": pytest.approx(0.397),
    }  # fmt: skip
    assert (total["goodput_share"], total["goodput_requests_per_s"]) == (0.4, pytest.approx(2 / 4.2))
    error = total["forecast_error"]["e2e_s"]
    assert total["instances"] == {"e0": 1, "e1": 4}
    assert error == {"n": 4, "median": pytest.approx(0.0), "bias": pytest.approx(0.0)}


def test_targets() -> None:
    """A request's own target overrides the run's; without targets, all successful requests meet the SLO."""
    run_slo = Slo(ttft_s=0.25, tpot_s=0.085)
    assert [meets_slo(one, run_slo) for one in RESULTS] == [False, True, True, False, False]
    assert [meets_slo(one, NO_SLO) for one in RESULTS] == [True] * 4 + [False]


def test_a_table_and_a_file() -> None:
    """The table has milliseconds for people, the CSV file one line per request."""
    text = "\n".join(table(summary(RESULTS, Slo(ttft_s=0.25))))
    assert "TTFT ms" in text
    assert "within TTFT 250 ms: 60.0 %" in text
    assert "failed: 1 broken" in text
    assert "requests by instance: e0 1, e1 4" in text
    assert "predicted e2e: median error 0.0 %, bias +0.0 %" in text
    out = io.StringIO()
    write_csv(list(reversed(RESULTS)), NO_SLO, out)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert [row["request_id"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert (rows[0]["ttft_s"], rows[0]["met_slo"], rows[4]["met_slo"], rows[4]["failure"]) == (
        "0.100000", "1", "0", "broken",
    )  # fmt: skip
