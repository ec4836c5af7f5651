"""Gain and attainment, against cases worked out by hand and a plain sum over tokens."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from predictor.gain import (
    GainWeights,
    ServedRequests,
    attained,
    attainment_report,
    attainment_table,
    count_on_time,
    default_levels,
    missed,
    priority_weights,
    response_attainment,
    service_levels_of,
)
from predictor.request import BEST_EFFORT, RequestFacts, Slo

NEVER = math.inf


def request(number: int, **facts: Any) -> RequestFacts:
    """A request with a prompt of its own length."""
    return RequestFacts(request_id=str(number), prompt_tokens=10 * (number + 1), **facts)


def served(requests: Sequence[RequestFacts], token_s: Sequence[Sequence[float]]) -> ServedRequests:
    """What requests got whose tokens came at these times after arrival; one ends when its last token came."""
    on_time, firsts, means = [], [], []
    for facts, times in zip(requests, token_s, strict=True):
        slo = facts.slo or Slo()
        flags = on_time_of(slo, times)
        on_time.append(-1 if slo.ttft_s is None else sum(flags))
        firsts.append(times[0] if times and times[0] < NEVER else math.nan)
        ends = len(times) > 1 and times[-1] < NEVER
        means.append((times[-1] - times[0]) / (len(times) - 1) if ends else math.nan)
    return ServedRequests(
        levels=service_levels_of(requests) or default_levels(len(requests)),
        prompt_tokens=np.array([facts.prompt_tokens for facts in requests]),
        output_tokens=np.array([len(times) for times in token_s]),
        ttft_s=np.array(firsts),
        tpot_s=np.array(means),
        tokens_on_time=np.array(on_time),
        finished=np.array([times[-1] < NEVER for times in token_s]),
    )


def on_time_of(slo: Slo, times: Sequence[float]) -> list[bool]:
    """Return for each token with a deadline whether it came by it."""
    if slo.ttft_s is None:
        return []
    flags = [times[0] <= slo.ttft_s]
    if slo.tpot_s is not None:
        flags += [time_s <= slo.ttft_s + place * slo.tpot_s for place, time_s in enumerate(times) if place > 0]
    return flags


def test_a_case_worked_out_by_hand() -> None:
    """Weights multiply: the token's, the request's, the priority's."""
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    requests = [
        request(0, slo=slo, weight=3.0),  # first token late, the second on time: 3 · 10 · (0 + 1) of 3 · 10 · (4 + 1)
        request(1, slo=slo, priority=1),  # all on time: 4 + 1 + 1 of 6
        request(2, slo=slo, priority=1, request_class=BEST_EFFORT),  # never ends: 0 of 4 + 2
    ]
    report = attainment_report(
        served(requests, [[1.25, 1.5], [1.0, 1.5, 2.0], [0.5, 1.0, NEVER]]),
        GainWeights(first_token=4.0, by_priority={0: 10.0}),
    )
    assert report["tdg_ratio"] == pytest.approx((30 + 6 + 0) / (150 + 6 + 6))
    assert report["slo_attained"] == pytest.approx(1 / 3)
    assert report["deadline_attained"] == pytest.approx(1 / 3)
    assert report["worst_ttft_over_target"] == 1.25
    assert report["ttft_p50_s"] == 1.0
    assert report["by_priority"]["0"]["tpot_p99_s"] == pytest.approx(0.25)
    assert report["by_priority"]["0"]["tdg_ratio"] == pytest.approx(30 / 150)
    assert report["by_priority"]["1"]["tdg_ratio"] == pytest.approx(0.5)
    assert report["by_class"]["real-time"]["num_with_targets"] == 2
    assert report["by_class"]["best-effort"]["deadline_attained"] == 0.0
    assert [part["longest_prompt_tokens"] for part in report["by_prompt_quarter"]] == [10, 20, 30]


def test_a_late_token_may_leave_the_slo_attained() -> None:
    """The SLO is about TTFT and the mean TPOT, deadlines are about every token; both are reported."""
    part = attained(served([request(0, slo=Slo(ttft_s=1.0, tpot_s=0.5))], [[1.0, 1.75, 2.0]]))
    assert part["slo_attained"] == 1.0
    assert part["deadline_attained"] == 0.0
    assert part["tdg_ratio"] == pytest.approx(2 / 3)


def test_partial_targets() -> None:
    """A TTFT target alone is one deadline; a TPOT target alone is none, and counts in the SLO; no target counts nowhere."""
    first_alone = attained(served([request(0, slo=Slo(ttft_s=1.0))], [[0.5, 100.0]]))
    assert (first_alone["tdg_ratio"], first_alone["slo_attained"], first_alone["deadline_attained"]) == (1.0, 1.0, 1.0)
    no_first = attained(served([request(0, slo=Slo(tpot_s=1.0))], [[50.0, 51.5]]))
    assert (no_first["tdg_ratio"], no_first["slo_attained"], no_first["deadline_attained"]) == (None, 0.0, None)
    single = attained(served([request(0, slo=Slo(ttft_s=1.0, tpot_s=0.1))], [[1.0]]))
    assert (single["tdg_ratio"], single["slo_attained"], single["deadline_attained"]) == (1.0, 1.0, 1.0)
    assert attainment_report(served([request(0, weight=2.0)], [[1.0]])) == {}
    both = attainment_report(served([request(0), request(1, slo=Slo(ttft_s=1.0))], [[9.0], [0.5]]))
    assert (both["num_with_targets"], both["tdg_ratio"]) == (1, 1.0)


def test_sums_over_columns_equal_sums_over_tokens() -> None:
    """The gain of many requests is that of their tokens, one by one."""
    draw = random.Random(3)
    for _ in range(40):
        weights = GainWeights(first_token=draw.choice((1.0, 5.0)), later_token=0.5, by_priority={1: 3.0})
        requests, token_s = [], []
        for number in range(draw.randint(1, 12)):
            ttft_s, tpot_s = draw.choice((None, 0.5, 1.0)), draw.choice((None, 0.1, 0.2))
            slo = None if ttft_s is None and tpot_s is None else Slo(ttft_s=ttft_s, tpot_s=tpot_s)
            requests.append(request(number, slo=slo, weight=draw.choice((0.5, 2.0)), priority=draw.randint(0, 2)))
            times = np.cumsum([draw.uniform(0.2, 1.2), *(draw.uniform(0.0, 0.3) for _ in range(draw.randint(0, 9)))])
            token_s.append([*times.tolist()[:-1], NEVER if draw.random() < 0.2 else float(times[-1])])
        gained = possible = 0.0
        for facts, times in zip(requests, token_s, strict=True):
            value = facts.weight * weights.by_priority.get(facts.priority, 1.0)
            for place, flag in enumerate(on_time_of(facts.slo or Slo(), times)):
                worth = value * (weights.later_token if place else weights.first_token)
                possible += worth
                gained += worth * (flag and times[-1] < NEVER)
        report = attainment_report(served(requests, token_s), weights)
        assert report.get("tdg_ratio") == (pytest.approx(gained / possible) if possible else None)
        assert sum(part["num_with_targets"] for part in report.get("by_priority", {}).values()) == sum(
            facts.slo is not None for facts in requests
        )


def test_one_response_as_it_comes() -> None:
    """Counts by marks equal counts by token, where pieces bring several tokens or none."""
    draw = random.Random(5)
    for _ in range(300):
        ttft_s, tpot_s = draw.choice((None, 0.5, 1.0)), draw.choice((None, 0.1, 0.2))
        slo, num_tokens = Slo(ttft_s=ttft_s, tpot_s=tpot_s), draw.randint(1, 12)
        marks, times, time_s = [], [], 0.3
        while len(times) < num_tokens:
            time_s += draw.uniform(0.0, 0.4)
            times += [time_s] * draw.randint(0, 3)
            marks.append((len(times), time_s))
        marks.append((len(times) + 2, time_s + 0.1))  # lines without text
        times = times[:num_tokens]
        on_time = count_on_time(slo, marks, num_tokens)
        assert on_time == sum(on_time_of(slo, times))
        mean_s = (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None
        whole = response_attainment(slo, num_tokens=num_tokens, tokens_on_time=on_time, ttft_s=times[0], tpot_s=mean_s)
        if slo != Slo():
            part = attained(served([request(0, slo=slo)], [times]))
            assert part["slo_attained"] == whole.slo
            assert part["deadline_attained"] == whole.deadlines
            assert part["tdg_ratio"] == (
                None if whole.tokens_due == 0 else pytest.approx(whole.tokens_on_time / whole.tokens_due)
            )


def test_a_response_that_does_not_end_misses_all_its_targets() -> None:
    """Also a TPOT target, of which a single token would be within."""
    nothing = missed(Slo(ttft_s=1.0, tpot_s=1.0), 0)
    assert (nothing.tokens_due, nothing.tokens_on_time) == (1, 0)
    assert (nothing.ttft, nothing.tpot, nothing.slo, nothing.deadlines) == (False, False, False, False)
    rate_alone = missed(Slo(tpot_s=1.0), 7)
    assert (rate_alone.tokens_due, rate_alone.ttft, rate_alone.tpot, rate_alone.deadlines) == (0, None, False, None)
    assert missed(Slo(ttft_s=1.0), 7).tokens_due == 1


def test_the_table_shows_what_the_report_has() -> None:
    """Groups of one value have no line of their own; shares that nothing counts in are dashes."""
    requests = [request(0, slo=Slo(tpot_s=1.0)), request(1, slo=Slo(tpot_s=1.0), request_class=BEST_EFFORT)]
    lines = list(attainment_table(attainment_report(served(requests, [[1.0, 1.5], [1.0, 1.5]]))))
    assert [line.split("  ")[0].rstrip() for line in lines[2:]] == [
        "all with targets", "class best-effort", "class real-time", "prompts up to 10", "prompts up to 20"
    ]  # fmt: skip
    assert lines[2].split()[-6:] == ["2", "-", "1.000", "-", "-", "-"]
    assert list(attainment_table({})) == []


def test_what_was_missed_is_reported() -> None:
    """Attainment has a share by tokens, tiers, who was shed and demoted, and the length of the prompts that missed."""
    requests = [
        request(0, slo=Slo(ttft_s=1.0, tpot_s=0.02)),
        request(1, slo=Slo(ttft_s=1.0, tpot_s=0.1)),
        request(4, slo=Slo(ttft_s=1.0)),
    ]
    never = served(requests, [[0.5, 0.51], [0.5, 0.55, 0.6], [NEVER]])
    shed, demoted = np.array([False, False, True]), np.array([False, True, False])
    report = attainment_report(dataclasses.replace(never, shed=shed, demoted=demoted))
    assert report["deadline_attained"] == pytest.approx(2 / 3)
    assert report["deadline_attained_tokens"] == pytest.approx((12 + 23) / (12 + 23 + 51))
    assert (report["missed_prompt_tokens"], report["missed_prompt_ratio"]) == (50.0, pytest.approx(50 / (80 / 3)))
    assert list(report["by_tier"]) == ["0.02", "0.1", "none"]
    assert (report["num_shed_with_targets"], report["by_tier"]["0.1"]["num_demoted_with_targets"]) == (1, 1)
    lines = list(attainment_table(report))
    assert lines[1].split()[-2:] == ["shed", "demoted"]
    assert [line.rsplit("  ", 1)[0].split("  ")[0] for line in lines if line.startswith("tier")] == [
        "tier 20 ms", "tier 100 ms", "tier none"
    ]  # fmt: skip
    assert "50 tokens on average, 1.88 times" in lines[-1]


def test_weights_of_priorities() -> None:
    """A pair is a whole number and a positive weight."""
    assert priority_weights(["0=2", "-1=0.5"]) == {0: 2.0, -1: 0.5}
    for text in ("0", "a=1", "0=", "0=0", "0=-1", "0=nan", "0=inf", "1.5=2"):
        with pytest.raises(ValueError, match=r"^priority_weight: "):
            priority_weights([text])
    for fields in ({"first_token": 0.0}, {"later_token": math.nan}, {"by_priority": {3: -1.0}}):
        with pytest.raises(ValueError, match="must be above 0"):
            GainWeights(**fields)  # type: ignore[arg-type]
