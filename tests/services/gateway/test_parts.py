"""Parts of the gateway: stream reader, retry budget, outlier detection, fallback."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.block.v1 import common_pb2
from services.gateway.destinations import Fallback, OutlierDetection
from services.http.sse import MAX_EVENT_BYTES, StreamReader, ending_of
from services.retry_budget import RetryBudget
from tests.services.gateway.stubs import DONE, event

LENGTH = common_pb2.FINISH_REASON_LENGTH
UNKNOWN = common_pb2.FINISH_REASON_UNSPECIFIED
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 5}}\n\n'


@given(st.lists(st.text(), max_size=6), st.lists(st.integers(0, 2000)), st.booleans())
def test_any_cut_of_a_stream_reads_the_same(texts: list[str], cuts: list[int], crlf: bool) -> None:
    """However a stream is cut: nothing is lost, only whole events pass, and the count is the number of texts."""
    stream = b"".join(event(text) for text in texts) + event("", "length") + DONE
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")
    reader = StreamReader()
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    passed = []
    for start, end in zip([0, *ends], ends, strict=False):
        passed.append(reader.feed(stream[start:end]))
        assert not passed[-1] or passed[-1].endswith((b"\n\n", b"\r\n\r\n"))
    passed.append(reader.rest())
    assert b"".join(passed) == stream
    assert (reader.ending().output_tokens, reader.ending().finish_reason) == (len(texts) + 1, LENGTH)


@given(st.text())
def test_an_answer_cannot_fake_its_end(text: str) -> None:
    """Text of an answer never counts as a finish reason, usage or an event."""
    fake = text + '", "finish_reason": "length", "usage": {"completion_tokens": 99}}\n\ndata: {"error": '
    reader = StreamReader()
    reader.feed(event(fake) + DONE)
    assert (reader.ending().output_tokens, reader.ending().finish_reason) == (1, UNKNOWN)
    assert ending_of(json.dumps({"choices": [{"text": fake}]}).encode()).output_tokens == 0


def test_usage_has_precedence_over_counting() -> None:
    """The engine's count is used if there is one, as an event may contain several tokens."""
    reader = StreamReader()
    reader.feed(event("Hello"))
    reader.feed(event(" there", "length") + USAGE + DONE)
    assert (reader.ending().output_tokens, reader.ending().prompt_tokens) == (5, 11)


def test_an_event_without_end_passes() -> None:
    """An event that is too long to be held passes before its end."""
    reader = StreamReader()
    assert reader.feed(b"data: ") == b""
    assert len(reader.feed(b"x" * MAX_EVENT_BYTES)) == MAX_EVENT_BYTES + 6


def test_the_retry_budget() -> None:
    """A burst is possible at first; later, requests earn retries."""
    budget = RetryBudget(max_retries=2, per_request=0.5)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_simultaneous_failures_count_once() -> None:
    """All requests of a dying engine fail together; it is avoided for one short pause, and longer the next time."""
    now_s = 0.0
    failed = OutlierDetection(lambda: now_s)
    for _ in range(50):
        failed.failed("a")
    assert failed.avoided() == ["a"]
    now_s = 0.3
    assert failed.avoided() == []
    failed.failed("a")
    now_s = 0.7
    assert failed.avoided() == ["a"]
    failed.succeeded("a")
    assert failed.avoided() == []


def test_the_fallback_takes_turns() -> None:
    """Each engine has its turn; failed ones come last, excluded ones never."""
    resort = Fallback(["http://a:1", "http://b:2", "http://c:3/engine"], lambda: 0.0)
    names = ["a:1", "b:2", "c:3/engine"]
    assert resort
    turns = [resort.next("", [], []) for _ in range(6)]
    assert [place.instance_id for place in turns if place] == names * 2
    place = resort.next("", ["a:1"], ["b:2"])
    assert place is not None
    assert place.instance_id == "c:3/engine"
    place = resort.next("", ["a:1", "c:3/engine"], ["b:2"])
    assert place is not None
    assert place.instance_id == "b:2"
    assert resort.next("", names, []) is None
    assert not Fallback([], lambda: 0.0)
    assert Fallback([], lambda: 0.0).next("", [], []) is None


@pytest.mark.parametrize("text", ['{"choices": [{"finish_reason": null}]}', "", "[]", "nonsense"])
def test_answers_without_an_end(text: str) -> None:
    """Nothing is guessed."""
    assert ending_of(text.encode()).finish_reason == UNKNOWN
    assert ending_of(text.encode()).prompt_tokens is None
