"""What a forecast says of deadlines, against the times of all tokens by a plain step-by-step model of the engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.forecast_result import Forecast
from predictor.request import RequestFacts, Slo
from tests.predictor.test_forecast import at_moment
from tests.predictor.test_tokens_on_time import counted, token_times
from tests.strategies import AFFINE, Load, affine_seconds, examples, load_of, loads

CLOSE = 1e-9
BATCHERS = ("vllm_v1", "decode_then_edf", "slide_batching")
TTFT_TARGETS = (None, 1 / 64, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 0.25, 0.5)
TPOT_TARGETS = (None, 1 / 96, 1 / 64, 1 / 48, 1 / 40, 1 / 32, 1 / 16)
Times = Mapping[str, Sequence[float]]


@st.composite
def loads_with_targets(draw: st.DrawFn, batcher: str, *, is_async: bool) -> Load:
    """Draw a load whose requests have weights, and targets, or one of both, or none."""
    load = draw(loads(batcher, ending=True, is_async=is_async, tick_s=0.004, max_requests=10))
    for spec in load.requests:
        spec["ttft_slo_s"] = draw(st.sampled_from(TTFT_TARGETS))
        spec["tpot_slo_s"] = draw(st.sampled_from(TPOT_TARGETS))
        spec["weight"] = draw(st.sampled_from((0.5, 1.0, 3.0)))
    return load


def attains(spec: dict[str, Any], token_s: Sequence[float]) -> bool:
    """Whether all tokens that are due at some time came by then."""
    num_on_time = counted(spec, list(token_s))
    return num_on_time is None or num_on_time == (1 if spec["tpot_slo_s"] is None else len(token_s))


def gain(specs: Sequence[dict[str, Any]], times: Times, now_s: float) -> float:
    """Add the weights of the tokens that come by their deadlines after now."""
    total = 0.0
    for spec in specs:
        token_s = times[spec["id"]]
        before = [one for one in token_s if one <= now_s]
        total += spec["weight"] * ((counted(spec, list(token_s)) or 0) - (counted(spec, before) or 0))
    return total


def least_slack(specs: Sequence[dict[str, Any]], times: Times, now_s: float) -> float:
    """Return the least time that any token comes before its deadline, before the first late one of each request."""
    least_s = math.inf
    for spec in specs:
        if spec["ttft_slo_s"] is None:
            continue
        for number, time_s in enumerate(times[spec["id"]]):
            if number > 0 and spec["tpot_slo_s"] is None:
                break
            slack_s = spec["arrival_s"] + spec["ttft_slo_s"] + number * (spec["tpot_slo_s"] or 0.0) - time_s
            if slack_s < 0:
                break
            if time_s > now_s:
                least_s = min(least_s, slack_s)
    return least_s


def leaves(forecast: Forecast, min_slack_s: float) -> bool:
    """Whether the other requests keep their deadlines, with some seconds of slack, and are not preempted."""
    assert forecast.others_missed is not None
    assert forecast.others_preempted is not None
    assert forecast.least_slack_s is not None
    is_harmful = forecast.others_missed > 0 or forecast.others_preempted > 0
    return not is_harmful and forecast.least_slack_s >= min_slack_s - CLOSE


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("batcher", BATCHERS)
def test_deadlines_are_kept_as_by_the_plain_model(batcher: str, is_async: bool) -> None:
    """Attained, missed by others, gain and slack follow from the times of all tokens with and without the request."""
    seen = Counter[str]()

    @examples(200)
    @given(
        loads_with_targets(batcher, is_async=is_async),
        st.floats(0.0, 0.5),
        st.floats(0.0001, 0.05),
        st.sampled_from((0.0, 0.0, 0.011, 0.3)),
        st.sampled_from((0.0, 0.0, 0.003, 0.02)),
    )
    def check(load: Load, moment: float, in_s: float, waited_s: float, min_slack_s: float) -> None:
        *others, last = sorted(load.requests, key=lambda spec: spec["prompt_tokens"])
        if not others:
            return
        rest = Load(engine=load.engine, requests=others)
        last = {**last, "id": "candidate", "max_tokens": last["output_tokens"]}
        candidate = Load(engine=load.engine, requests=[last]).our_requests()[0]
        engine, now_s = at_moment(rest, moment, reserve=True)
        (forecast,) = Forecaster(engine).forecast([replace(candidate, in_s=in_s, waited_s=waited_s)], now_s)

        arriving = {**last, "arrival_s": now_s + in_s}
        if last["ttft_slo_s"] is not None:
            arriving["ttft_slo_s"] = last["ttft_slo_s"] - waited_s - in_s
        everyone = [*others, arriving]
        without = token_times(rest, affine_seconds)
        times = token_times(Load(engine=load.engine, requests=everyone), affine_seconds)

        missed = sum(attains(one, without[one["id"]]) and not attains(one, times[one["id"]]) for one in others)
        assert forecast.attained == float(attains(arriving, times["candidate"]))
        assert forecast.others_missed == missed
        assert forecast.gain_before == pytest.approx(gain(others, without, now_s))
        assert forecast.gain_after == pytest.approx(gain(everyone, times, now_s))
        assert forecast.least_slack_s == pytest.approx(least_slack(everyone, times, now_s), rel=CLOSE, abs=CLOSE)
        seen["attained" if forecast.attained else "late"] += 1
        seen["harmful"] += missed > 0
        seen["with gain"] += forecast.gain_before > 0
        seen["with slack"] += 0 < forecast.least_slack_s < math.inf

        (short,) = Forecaster(engine).forecast([replace(candidate, in_s=in_s, waited_s=waited_s)], now_s, delays=False)
        assert short.attained == forecast.attained
        assert (short.others_missed, short.gain_before, short.gain_after, short.least_slack_s) == (None,) * 4

        (verdict,) = Forecaster(engine).forecast(
            [replace(candidate, in_s=in_s, waited_s=waited_s)], now_s, only_deadlines=True, min_slack_s=min_slack_s
        )
        for name in ("ttft_s", "e2e_s", "queue_s", "attained", "num_preemptions", "output_tokens"):
            assert getattr(verdict, name) == pytest.approx(getattr(forecast, name), rel=CLOSE, abs=CLOSE), name
        assert (verdict.delay_sum_s, verdict.gain_before) == (None, None)
        if forecast.others_preempted == forecast.num_preemptions == verdict.others_preempted == 0:
            assert leaves(verdict, min_slack_s) == leaves(forecast, min_slack_s)
        elif missed > 0:
            assert not leaves(verdict, min_slack_s)

    check()
    assert min(seen.values()) >= 3, seen
    assert len(seen) == 5, seen


def idle_engine() -> tuple[Engine, float]:
    """An engine without requests, and the time of its first token for a prompt of eight tokens."""
    engine = load_of("vllm_v1", (8, 4)).loaded(AFFINE)
    engine.advance()
    return Engine(load_of("vllm_v1", (8, 4)).config, AFFINE), engine.outcome("a").ttft_s or 0.0


def candidate_with(slo: Slo | None, **fields: Any) -> RequestFacts:
    """A request of eight prompt tokens and four others."""
    return RequestFacts(request_id="c", prompt_tokens=8, output_tokens=4, slo=slo, **fields)


@pytest.mark.parametrize(
    ("ttft_ratio", "waited_ratio", "in_ratio", "attained"),
    [(1.01, 0.0, 0.0, 1.0), (0.99, 0.0, 0.0, 0.0), (2.0, 0.98, 0.0, 1.0), (2.0, 1.02, 0.0, 0.0),
     (2.0, 0.0, 0.98, 1.0), (2.0, 0.0, 1.02, 0.0), (3.0, 0.98, 0.98, 1.0), (3.0, 1.02, 1.02, 0.0)],
)  # fmt: skip
def test_deadlines_count_from_the_arrival_at_the_system(
    ttft_ratio: float, waited_ratio: float, in_ratio: float, attained: float
) -> None:
    """What a request has waited, and the time until it arrives at the engine, are parts of its time to first token."""
    engine, ttft_s = idle_engine()
    candidate = candidate_with(Slo(ttft_s=ttft_ratio * ttft_s), waited_s=waited_ratio * ttft_s, in_s=in_ratio * ttft_s)
    (forecast,) = Forecaster(engine).forecast([candidate], 0.0)
    assert forecast.attained == attained
    slack = ttft_ratio - waited_ratio - in_ratio - 1.0
    assert forecast.least_slack_s == (pytest.approx(slack * ttft_s) if attained else math.inf)


def test_a_request_without_a_target_for_its_first_token_has_no_deadlines() -> None:
    """It attains them wherever it goes, gains nothing, and has no slack."""
    engine, _ = idle_engine()
    for slo in (None, Slo(tpot_s=1e-6)):
        (forecast,) = Forecaster(engine).forecast([candidate_with(slo, weight=5.0)], 0.0)
        assert (forecast.attained, forecast.others_missed, forecast.gain_after) == (1.0, 0, 0.0)
        assert forecast.least_slack_s == math.inf


def test_candidates_of_one_call_do_not_change_each_other() -> None:
    """Each is compared with the same run without any of them."""
    load = load_of("vllm_v1", (16, 20), (16, 20), slos=[(0.2, 0.03), (0.2, 0.03)])
    engine = load.loaded(AFFINE)
    engine.advance(0.05)
    candidates = [
        replace(candidate_with(Slo(ttft_s=0.1, tpot_s=tpot_s)), request_id=name, prompt_tokens=prompt)
        for name, prompt, tpot_s in (("x", 8, 0.5), ("y", 40, 0.01), ("z", 60, 0.05))
    ]
    together = Forecaster(engine).forecast(candidates, 0.05)
    alone = [Forecaster(engine).forecast([one], 0.05)[0] for one in candidates]
    assert together == alone
    assert len({one.least_slack_s for one in alone}) > 1
