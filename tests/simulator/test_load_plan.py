"""Load plans, and the bodies and headers of planned requests."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.request import Request, Slo
from services.load.asking import WORDS, Manner, body_of, header_of, headers_of, prompt_ids
from simulator.load_plan import Planned, Timing, by_arrival, planned, synthetic

ONE = Planned(request_id="7", due_s=0.0, prompt_tokens=40, output_tokens=12)


def gaps_of(timing: Timing, num: int = 4000, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Draw gaps between arrivals."""
    requests = [Request(request_id=str(n), prompt_tokens=1, output_tokens=1) for n in range(num)]
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
        Request(request_id="b", prompt_tokens=5, output_tokens=3, arrival_s=12.0, priority=2, slo=Slo(ttft_s=1.0)),
        Request(request_id="a", prompt_tokens=4, output_tokens=2, arrival_s=10.0),
    ]
    first, second = planned(by_arrival(trace, None), Timing(kind="trace", speed=4.0), np.random.default_rng(0))
    assert (first.request_id, first.due_s, first.prompt_tokens, first.output_tokens) == ("a", 0.0, 4, 2)
    assert (second.due_s, second.priority, second.slo) == (0.5, 2, Slo(ttft_s=1.0))
    assert [request.request_id for request in by_arrival(trace, 1)] == ["a"]


@settings(max_examples=50)
@given(
    st.sampled_from(["1", "37", "uniform:3:9", "uniform:5:5", "lognormal:20:1.5", "exponential:8"]), st.integers(0, 99)
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


BAD_LENGTHS = ("", "0", "x", "-5", "nan", "1e9", "uniform:9:3", "uniform:3", "normal:1:2", "lognormal:0:1", "3:4")


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


def test_prompts_have_their_length() -> None:
    """Prompts of token ids are exact; the same plan gives the same body, another request another prompt."""
    body = json.loads(body_of(ONE, Manner(model="m")))
    assert len(body["prompt"]) == 40
    assert all(type(token) is int for token in body["prompt"])
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (12, True, True)
    assert body_of(ONE, Manner(model="m")) == body_of(ONE, Manner(model="m"))
    other = Planned(request_id="8", due_s=0.0, prompt_tokens=40, output_tokens=12)
    assert json.loads(body_of(other, Manner(model="m")))["prompt"] != body["prompt"]
    words = json.loads(body_of(ONE, Manner(model="m", prompt="words")))["prompt"].split()
    assert len(words) == 40
    assert set(words) <= set(WORDS)
    chat = json.loads(body_of(ONE, Manner(model="m", endpoint="chat")))
    assert len(chat["messages"][0]["content"].split()) == 40


def test_responses_get_their_length() -> None:
    """By ignore_eos, by a header for emulated engines, or only by max_tokens."""
    body = json.loads(body_of(ONE, Manner(model="m", output="header")))
    assert not {"ignore_eos", "max_tokens"} & set(body)
    headers = dict(headers_of(ONE, Manner(model="m", output="header", headers=((b"a", b"b"),)), "r-1"))
    assert (headers[b"x-block-output-tokens"], headers[b"x-request-id"], headers[b"a"]) == (b"12", b"r-1", b"b")
    body = json.loads(body_of(ONE, Manner(model="m", output="none")))
    assert (body["max_tokens"], "ignore_eos" in body) == (12, False)


def test_shared_prefixes_are_the_same_tokens() -> None:
    """Blocks of one name have the same tokens in every prompt; the rest is the prompt's own."""
    prompts = {}
    for name, prefix, num_tokens in (("a", (1, 2, 3), 11), ("b", (1, 2, 9), 12), ("c", (8, 2), 7)):
        one = Planned(
            request_id=name, due_s=0.0, prompt_tokens=num_tokens, output_tokens=1, prefix=prefix, block_tokens=4
        )
        prompts[name] = prompt_ids(one, 0)
        assert len(prompts[name]) == num_tokens
    assert prompts["a"][:8] == prompts["b"][:8]
    assert prompts["a"][8:] != prompts["b"][8:11]
    assert prompts["c"][:4] != prompts["a"][:4]
    assert prompts["c"][4:] == prompts["a"][4:7]


def test_priority_and_slo_are_sent() -> None:
    """Priority is in the body, SLO targets are in headers: the request's own before the run's, in wall-clock time."""
    one = Planned(request_id="7", due_s=0.0, prompt_tokens=4, output_tokens=2, priority=3, slo=Slo(ttft_s=0.5))
    assert json.loads(body_of(one, Manner(model="m")))["priority"] == 3
    manner = Manner(model="m", slo=Slo(ttft_s=9.0, tpot_s=0.02), time_scale=0.5)
    headers = dict(headers_of(one, manner, "r"))
    assert (headers[b"x-slo-ttft-ms"], headers[b"x-slo-tpot-ms"]) == (b"1000.000", b"40.000")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_time_scale(scale: float) -> None:
    """The time scale must be finite and positive."""
    with pytest.raises(ValueError, match=r"^time_scale: "):
        Manner(model="m", time_scale=scale)


@pytest.mark.parametrize("text", ["", "name", ": x", "a b: c", "a: b\r\nc: d", "a: caf\u00e9"])
def test_bad_headers(text: str) -> None:
    """An invalid header is refused, without its value in the error, which may be a secret."""
    with pytest.raises(ValueError, match="must be NAME: VALUE") as refused:
        header_of(text)
    assert "caf" not in str(refused.value)
