"""Load plans: lengths and arrival times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.request import RequestFacts, Slo
from simulator.load_plan import Timing, by_arrival, lengths_of, planned, synthetic


def gaps_of(timing: Timing, num: int = 4000, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Draw gaps between arrivals."""
    requests = [RequestFacts(request_id=str(n), prompt_tokens=1, output_tokens=1) for n in range(num)]
    return np.diff([one.due_s for one in planned(requests, timing, np.random.default_rng(seed))])


@pytest.mark.parametrize(
    ("timing", "cv"),
    [
        (Timing(kind="poisson", rate=5.0), 1.0),
        (Timing(kind="gamma", rate=5.0, cv=2.0), 2.0),
        (Timing(kind="gamma", rate=5.0, cv=0.5), 0.5),
        (Timing(kind="uniform", rate=5.0), 0.0),
    ],
)
def test_arrivals_have_their_rate_and_their_bursts(timing: Timing, cv: float) -> None:
    """Gaps have the requested mean and coefficient of variation, and the same seed gives the same gaps."""
    gaps = gaps_of(timing)
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.1 * max(cv, 0.01))
    assert (gaps >= 0).all()
    assert (gaps == gaps_of(timing)).all()


def test_a_trace_keeps_its_times() -> None:
    """Requests are planned in the order of arrival, from 0 on, `speed` times as fast."""
    trace = [
        RequestFacts(request_id="b", prompt_tokens=5, output_tokens=3, arrival_s=12.0, priority=2, slo=Slo(ttft_s=1.0)),
        RequestFacts(request_id="a", prompt_tokens=4, output_tokens=2, arrival_s=10.0),
    ]
    first, second = planned(by_arrival(trace, None), Timing(kind="trace", speed=4.0), np.random.default_rng(0))
    assert (first.request_id, first.due_s, first.prompt_tokens, first.output_tokens) == ("a", 0.0, 4, 2)
    assert (second.due_s, second.priority, second.slo) == (0.5, 2, Slo(ttft_s=1.0))
    assert [request.request_id for request in by_arrival(trace, 1)] == ["a"]


@settings(max_examples=50)
@given(
    st.sampled_from(
        ["1", "37", "uniform:3:9", "uniform:5:5", "lognormal:20:1.5", "exponential:8", "quantiles:0.5:9:1:20"]
    ),
    st.integers(0, 99),
)
def test_lengths_are_token_counts(text: str, seed: int) -> None:
    """Lengths are whole and at least one, and the same seed gives the same lengths."""
    requests = synthetic(50, text, text, np.random.default_rng(seed))
    assert requests == synthetic(50, text, text, np.random.default_rng(seed))
    lengths = {request.prompt_tokens for request in requests}
    assert min(lengths) >= 1
    if text == "uniform:3:9":
        assert lengths <= set(range(3, 10))
    if text.isdecimal():
        assert lengths == {int(text)}


def test_lengths_by_quantiles() -> None:
    """Each share of the lengths is at most its quantile; all are at most the last."""
    text = "quantiles:0.25:12:0.5:28:0.75:82:0.99:750"
    whole = np.array([one.prompt_tokens for one in synthetic(100_000, text, "1", np.random.default_rng(0))])
    drawn = np.array(lengths_of(text, "prompt_tokens", continuous=True)(np.random.default_rng(0), 100_000))
    for lengths in (whole, drawn):
        for share, tokens in ((0.25, 12), (0.5, 28), (0.75, 82), (0.99, 749.99)):
            assert (lengths <= tokens).mean() == pytest.approx(share, abs=0.005)
        assert lengths.min() >= 1
        assert lengths.max() == pytest.approx(750)
    assert np.quantile(drawn, 0.375) == pytest.approx((12 * 28) ** 0.5, rel=0.03)


BAD_LENGTHS = (
    "", "0", "x", "-5", "nan", "1e9", "uniform:9:3", "uniform:3", "normal:1:2", "lognormal:0:1", "3:4", "quantiles",
    "quantiles:0.5", "quantiles:0.5:9:0.4:10", "quantiles:0.5:9:0.6:8", "quantiles:0:9", "quantiles:2:9",
    "quantiles:0.5:0.5",
)  # fmt: skip


@pytest.mark.parametrize("text", BAD_LENGTHS)
def test_bad_lengths(text: str) -> None:
    """What is neither a length nor a distribution is refused, naming the field."""
    with pytest.raises(ValueError, match=r"^prompt_tokens: "):
        synthetic(5, text, "10", np.random.default_rng(0))


BAD_TIMINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"kind": "normal", "rate": 1.0}, "arrivals"),
    ({"kind": "poisson", "rate": 0.0}, "rate"),
    ({"kind": "gamma", "rate": 1.0, "cv": -1.0}, "cv"),
    ({"kind": "trace", "speed": float("inf")}, "speed"),
)


@pytest.mark.parametrize(("fields", "name"), BAD_TIMINGS)
def test_bad_timings(fields: dict[str, Any], name: str) -> None:
    """Invalid timings are refused, naming the field."""
    with pytest.raises(ValueError, match=f"^{name}: "):
        Timing(**fields)
