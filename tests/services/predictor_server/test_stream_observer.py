"""What a mirror's proxy reads of requests and replies of all endpoints, those of an emulated engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from predictor.mirror.events import MirrorEvent, RequestArrived, RequestEnded, TokensReceived
from services.http.endpoints import ENDPOINTS
from services.predictor_server.stream_observer import StreamObserver, parse_request
from tests.services.emulator.running import Emulated, emulated

HI = [{"role": "user", "content": "Tell me of the sea"}]
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """A fast engine that all tests share."""
    with emulated(tmp_path_factory.mktemp("engine")) as running:
        yield running


class Sink:
    """Records events."""

    def __init__(self) -> None:
        """Start without any."""
        self.events: list[MirrorEvent] = []

    def record(self, event: MirrorEvent) -> None:
        """Take an event."""
        self.events.append(event)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HI, "max_tokens": NUM_TOKENS}),
        ("/v1/responses", {"input": "Tell me of the sea", "max_output_tokens": NUM_TOKENS}),
    ],
)
def test_streams_with_named_events_are_counted(path: str, body: dict[str, Any], engine: Emulated) -> None:
    """Each delta is a token; the prompt can be counted as that of a chat."""
    request = parse_request(ENDPOINTS[path], json.dumps({"model": "tiny", **body}).encode())
    assert request is not None
    assert request.to_tokenize is not None
    assert request.body.max_tokens == NUM_TOKENS
    sink = Sink()
    observer = StreamObserver(sink, ("one",), ENDPOINTS[path].format)
    text = engine.client.post(path, json={"model": "tiny", **body, "stream": True}).content
    for event in text.split(b"\n\n")[:-1]:
        observer.on_events(event + b"\n\n")
    assert [event.num_tokens for event in of(sink, TokensReceived)] == list(range(1, NUM_TOKENS + 1))
    counted = engine.client.post("/tokenize", json=dict(request.to_tokenize)).json()["count"]
    usage = engine.client.post(path, json={"model": "tiny", **body}).json()["usage"]
    assert counted == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


def test_inputs_are_requests_of_one_token(engine: Emulated) -> None:
    """As many as the engine makes of it."""
    body = {"model": "tiny", "input": ["a b", "c", "d"]}
    request = parse_request(ENDPOINTS["/v1/embeddings"], json.dumps(body).encode())
    assert request is not None
    assert (request.num_requests, request.known_tokens) == (3, 1)
    sink = Sink()
    observer = StreamObserver(sink, ("a", "b", "c"), ENDPOINTS["/v1/embeddings"].format)
    usage = engine.client.post("/v1/embeddings", json=body).json()["usage"]
    observer.on_complete(observer.least_tokens, usage["prompt_tokens"])
    observer.on_end()
    assert [(event.num_tokens, event.completed) for event in of(sink, RequestEnded)] == [(1, True)] * 3
    assert not of(sink, RequestArrived)


def of(sink: Sink, kind: type[Any]) -> Sequence[Any]:
    """Return the events of a kind."""
    return [event for event in sink.events if isinstance(event, kind)]


def observed(engine: Emulated, path: str, body: dict[str, Any], *, stream: bool) -> Sink:
    """Return what is reported of a request with several responses."""
    data = {"model": "tiny", "ignore_eos": True, **body}
    request = parse_request(ENDPOINTS[path], json.dumps(data).encode())
    assert request is not None
    sink = Sink()
    observer = StreamObserver(sink, tuple(f"r{place}" for place in range(request.num_requests)), ENDPOINTS[path].format)
    if stream:
        for event in engine.client.post(path, json={**data, "stream": True}).content.split(b"\n\n")[:-1]:
            observer.on_events(event + b"\n\n")
        observer.on_complete(observer.num_tokens, None)
    else:
        usage = engine.client.post(path, json=data).json()["usage"]
        observer.on_complete(usage["completion_tokens"], usage["prompt_tokens"])
    observer.on_end()
    return sink


@pytest.mark.parametrize(
    ("path", "body", "num"),
    [
        ("/v1/completions", {"prompt": "a", "n": 3}, 3),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("/v1/completions", {"prompt": ["a", "b"], "return_token_ids": True}, 2),
        ("/v1/chat/completions", {"messages": HI, "n": 3}, 3),
    ],
)
def test_each_response_of_a_stream_is_counted(path: str, body: dict[str, Any], num: int, engine: Emulated) -> None:
    """Every token is reported for its response, which ends with its finish reason."""
    sink = observed(engine, path, {**body, "max_tokens": NUM_TOKENS}, stream=True)
    names = [f"r{place}" for place in range(num)]
    for name in names:
        counts = [event.num_tokens for event in of(sink, TokensReceived) if event.name == name]
        assert counts == list(range(1, NUM_TOKENS))  # the end reports the last one
    ends = of(sink, RequestEnded)
    assert sorted(event.name for event in ends) == names
    assert {(event.num_tokens, event.completed) for event in ends} == {(NUM_TOKENS, True)}
    assert {event.exact for event in ends} == {"return_token_ids" in body}


def test_responses_in_one_piece_have_their_mean_length(engine: Emulated) -> None:
    """The reply counts all of them together."""
    sink = observed(engine, "/v1/completions", {"prompt": "a", "n": 3, "max_tokens": NUM_TOKENS}, stream=False)
    ends = of(sink, RequestEnded)
    assert [(event.name, event.num_tokens, event.exact) for event in ends] == [
        (f"r{place}", NUM_TOKENS, False) for place in range(3)
    ]


def test_a_stream_that_breaks_ends_the_responses_that_are_left() -> None:
    """One that has ended stays ended; the others are not complete."""
    sink = Sink()
    observer = StreamObserver(sink, ("a", "b"))
    observer.on_events(b'data: {"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}\n\n')
    observer.on_events(b'data: {"choices":[{"index":1,"text":"y","finish_reason":null}]}\n\ndata: nonsense\n\n')
    observer.on_end()
    assert [(event.name, event.num_tokens, event.completed) for event in of(sink, RequestEnded)] == [
        ("a", 1, True), ("b", 1, False),
    ]  # fmt: skip
