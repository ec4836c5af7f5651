"""Bodies and headers of planned requests."""

from __future__ import annotations

import json

import pytest

from predictor.request import Slo
from protos.block.v1 import common_pb2
from services.http.request_facts import read_headers
from services.load.request_format import WORDS, RequestFormat, body_of, header_of, headers_of, prompt_ids
from simulator.load_plan import Planned

ONE = Planned(request_id="7", due_s=0.0, prompt_tokens=40, output_tokens=12)


def test_prompts_have_their_length() -> None:
    """Prompts of token ids are exact; the same plan gives the same body, another request another prompt."""
    body = json.loads(body_of(ONE, RequestFormat(model="m")))
    assert len(body["prompt"]) == 40
    assert all(type(token) is int for token in body["prompt"])
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (12, True, True)
    assert body_of(ONE, RequestFormat(model="m")) == body_of(ONE, RequestFormat(model="m"))
    other = Planned(request_id="8", due_s=0.0, prompt_tokens=40, output_tokens=12)
    assert json.loads(body_of(other, RequestFormat(model="m")))["prompt"] != body["prompt"]
    words = json.loads(body_of(ONE, RequestFormat(model="m", prompt="words")))["prompt"].split()
    assert len(words) == 40
    assert set(words) <= set(WORDS)
    chat = json.loads(body_of(ONE, RequestFormat(model="m", endpoint="chat")))
    assert len(chat["messages"][0]["content"].split()) == 40


def test_responses_get_their_length() -> None:
    """By ignore_eos, by a header for emulated engines, or only by max_tokens."""
    body = json.loads(body_of(ONE, RequestFormat(model="m", output="header")))
    assert not {"ignore_eos", "max_tokens"} & set(body)
    headers = dict(headers_of(ONE, RequestFormat(model="m", output="header", headers=((b"a", b"b"),)), "r-1"))
    assert (headers[b"x-block-output-tokens"], headers[b"x-request-id"], headers[b"a"]) == (b"12", b"r-1", b"b")
    body = json.loads(body_of(ONE, RequestFormat(model="m", output="none")))
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
    assert json.loads(body_of(one, RequestFormat(model="m")))["priority"] == 3
    form = RequestFormat(model="m", slo=Slo(ttft_s=9.0, tpot_s=0.02), time_scale=0.5)
    headers = dict(headers_of(one, form, "r"))
    assert (headers[b"x-slo-ttft-ms"], headers[b"x-slo-tpot-ms"]) == (b"1000.000", b"40.000")


def test_class_and_weight_are_sent_where_they_are_not_the_defaults() -> None:
    """They are headers that the gateway reads."""
    one = Planned(request_id="7", due_s=0.0, prompt_tokens=4, output_tokens=2, request_class="best-effort", weight=2.5)
    headers = dict(headers_of(one, RequestFormat(model="m"), "r"))
    assert (headers[b"x-block-class"], headers[b"x-block-weight"]) == (b"best-effort", b"2.5")
    plain = Planned(request_id="7", due_s=0.0, prompt_tokens=4, output_tokens=2)
    assert not {b"x-block-class", b"x-block-weight"} & set(dict(headers_of(plain, RequestFormat(model="m"), "r")))


def test_the_tenant_and_what_happens_when_late_are_sent_where_they_are_stated() -> None:
    """They are headers that the gateway reads."""
    one = Planned(request_id="7", due_s=0.0, prompt_tokens=4, output_tokens=2, tenant="acme", when_late="shed")
    headers = dict(headers_of(one, RequestFormat(model="m"), "r"))
    assert (headers[b"x-llm-d-inference-fairness-id"], headers[b"x-block-when-late"]) == (b"acme", b"shed")
    read = read_headers(list(headers.items()))
    assert (read.fairness_id, read.when_late) == ("acme", common_pb2.WHEN_LATE_SHED)
    plain = dict(headers_of(ONE, RequestFormat(model="m"), "r"))
    assert not {b"x-llm-d-inference-fairness-id", b"x-block-when-late"} & set(plain)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_time_scale(scale: float) -> None:
    """The time scale must be finite and positive."""
    with pytest.raises(ValueError, match=r"^time_scale: "):
        RequestFormat(model="m", time_scale=scale)


@pytest.mark.parametrize("text", ["", "name", ": x", "a b: c", "a: b\r\nc: d", "a: caf\u00e9"])
def test_bad_headers(text: str) -> None:
    """An invalid header is refused, without its value in the error, which may be a secret."""
    with pytest.raises(ValueError, match="must be NAME: VALUE") as refused:
        header_of(text)
    assert "caf" not in str(refused.value)
