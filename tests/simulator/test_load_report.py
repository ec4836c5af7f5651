"""Reports of loads: summaries, SLO attainment, tables and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from predictor.gain import GainWeights
from predictor.request import Slo
from simulator.load_plan import Planned
from simulator.load_report import SHED, RequestResult, meets_slo, summary, table, write_csv

NO_SLO = Slo()


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


def test_a_request_that_is_sent_again_keeps_nothing_of_the_first_reply() -> None:
    """Where the second attempt gets no reply, the times and marks of the first one do not count for it."""
    one = RequestResult(plan=RESULTS[0].plan, failure=SHED, shed_reason="late", retry_after_s=2.0, answered_s=0.1,
                        instance="e0", demoted=True, note="overloaded")  # fmt: skip
    one.reset_for_retry(2.5)
    assert one == RequestResult(plan=RESULTS[0].plan, num_retries=1, retried_after_s=2.5)


def test_targets() -> None:
    """A request's own target overrides the run's; without targets, all successful requests meet the SLO."""
    run_slo = Slo(ttft_s=0.25, tpot_s=0.085)
    assert [meets_slo(one, run_slo) for one in RESULTS] == [False, True, True, False, False]
    assert [meets_slo(one, NO_SLO) for one in RESULTS] == [True] * 4 + [False]


def test_what_was_attained() -> None:
    """A request's own target overrides the run's; a failed request loses the gain of its planned tokens."""
    results = [replace(one, tokens_on_time=count) for one, count in zip(RESULTS, (11, 5, 2, 0, 11), strict=True)]
    results[3].plan = replace(results[3].plan, priority=1, weight=3.0, mix_entry="m")
    total = summary(results, Slo(ttft_s=0.25, tpot_s=0.085), GainWeights(by_priority={1: 2.0}))
    assert total["tdg_ratio"] == pytest.approx((11 + 5 + 2 + 0 + 0) / (4 * 11 + 6 * 11))
    assert total["slo_attained"] == 0.4
    assert total["deadline_attained"] == 0.2
    assert total["by_priority"]["1"]["tdg_ratio"] == 0.0
    assert set(total["by_mix"]) == {"", "m"}
    assert "tdg_ratio" not in summary(results[:1], NO_SLO)
    assert "priority 1" in "\n".join(table(total))
    out = io.StringIO()
    write_csv(results, NO_SLO, out)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert [row["tokens_on_time"] for row in rows] == ["", "", "2", "", ""]
    assert (rows[3]["class"], rows[3]["priority"], rows[3]["mix"]) == ("real-time", "1", "m")


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


def test_shed_requests_are_no_failures() -> None:
    """They are counted by their reason, with the time after which to retry, and attain nothing."""
    shed = [result(number, 0.1, 0.01, failure=SHED) for number in (5, 6, 7)]
    for one, reason, after_s in zip(shed, ("late", "queue_full", "late"), (2.0, 4.0, 9.0), strict=True):
        one.shed_reason, one.retry_after_s, one.ttft_s, one.output_tokens = reason, after_s, None, 0
    total = summary([*RESULTS, *shed], Slo(ttft_s=0.25))
    assert (total["num_requests"], total["num_ok"], total["num_shed"], total["num_failed"]) == (8, 4, 3, 1)
    assert (total["shed"], total["failures"]) == ({"late": 2, "queue_full": 1}, {"broken": 1})
    assert total["retry_after_s"]["p50"] == 4.0
    assert total["goodput_share"] == 3 / 8
    text = "\n".join(table(total))
    assert "shed: 3 (late 2, queue_full 1), retry after 4.0 s in the median" in text
    assert "failed: 1 broken" in text
    assert "shed" not in "\n".join(table(summary(RESULTS, NO_SLO)))
    out = io.StringIO()
    write_csv(shed, NO_SLO, out)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert [(row["failure"], row["shed_reason"], row["retry_after_s"]) for row in rows] == [
        ("shed", "late", "2.000000"), ("shed", "queue_full", "4.000000"), ("shed", "late", "9.000000"),
    ]  # fmt: skip
