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

    def new_name(self, request_id: str) -> str:
        """Return a name."""
        return request_id

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
