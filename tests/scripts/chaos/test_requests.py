"""Which answers count as those that one engine alone gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice

import pytest

from scripts.chaos.plan import ChaosSettings
from scripts.chaos.requests import (
    COMPLETE,
    CUT_SHORT,
    ERROR_EVENT,
    KINDS,
    OTHER_TEXT,
    OTHER_USAGE,
    SERVED,
    ChaosRequest,
    judged,
    request_of,
    requests_of,
)
from services.emulator.openai import request_from
from services.emulator.replies import CompletionReply
from services.emulator.request_bodies import CHAT, COMPLETION

NUM_TOKENS = 5


def reply_to(request: ChaosRequest) -> bytes:
    """Return what one engine replies."""
    parsed = request_from(CHAT if request.is_chat else COMPLETION, request.body, {}, "one", SERVED)
    reply = CompletionReply(parsed, 0)
    return reply.first() + reply.events(0, NUM_TOKENS) if request.is_stream else reply.whole(0)


def usage_in(received: bytes) -> bytes:
    """Return the event with the usage."""
    return next(event for event in received.split(b"\n\n") if b'"usage"' in event)


def with_error(received: bytes) -> bytes:
    """Replace what follows the first event by an error."""
    return received.partition(b"\n\n")[0] + b'\n\ndata: {"error": {}}\n\n'


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_of_one_engine_is_complete(kind: str) -> None:
    """Completions and chats, streamed and whole."""
    request = request_of(7, kind, "tide", NUM_TOKENS)
    assert judged(reply_to(request), request) == COMPLETE


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda received: received.replace(b'"completion_tokens":5', b'"completion_tokens":6'), OTHER_USAGE),
        (lambda received: received.replace(b"data: [DONE]\n\n", b""), CUT_SHORT),
        (with_error, ERROR_EVENT),
        (lambda _: b"", CUT_SHORT),
        (lambda _: b": a comment\n\n", CUT_SHORT),
        (lambda received: received.replace(b'"usage":', b'"other":'), OTHER_USAGE),
        (lambda received: received.replace(b"data: [DONE]", usage_in(received) + b"\n\ndata: [DONE]"), OTHER_USAGE),
    ],
)
def test_a_stream_that_differs_is_found(kind: str, change: Callable[[bytes], bytes], expected: str) -> None:
    """A wrong usage, an error, and a stream that is cut."""
    request = request_of(7, kind, "tide", NUM_TOKENS)
    assert judged(change(reply_to(request)), request) == expected


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("place", range(NUM_TOKENS))
def test_a_token_that_is_missing_or_there_twice_is_found(kind: str, place: int) -> None:
    """At any place."""
    request = request_of(7, kind, "tide", NUM_TOKENS)
    events = reply_to(request).split(b"\n\n")
    place += request.is_chat  # after the event with the role
    without, twice = [*events[:place], *events[place + 1 :]], [*events[: place + 1], *events[place:]]
    for changed in (without, twice):
        assert judged(b"\n\n".join(changed), request) == OTHER_TEXT


def test_a_whole_answer_that_differs_is_found() -> None:
    """Another text, another count of tokens, and half of a reply."""
    request = request_of(7, "whole_chat", "tide", NUM_TOKENS)
    reply = json.loads(reply_to(request))
    reply["choices"][0]["message"]["content"] += " tide"
    assert judged(json.dumps(reply).encode(), request) == OTHER_TEXT
    reply = json.loads(reply_to(request))
    reply["usage"]["completion_tokens"] += 1
    assert judged(json.dumps(reply).encode(), request) == OTHER_USAGE
    assert judged(reply_to(request)[:-9], request) == CUT_SHORT


def test_requests_follow_from_the_seed() -> None:
    """The same ones for one seed, all kinds among them; those that cannot continue say why."""
    first, again, other = (
        list(islice(requests_of(ChaosSettings(seed=seed)), 300)) for seed in (1, 1, 2)
    )  # fmt: skip
    assert first == again
    assert first != other
    assert {request.kind for request in first} == set(KINDS)
    whys = {request.kind: request.why_not_continuable for request in first}
    assert {kind for kind, why in whys.items() if why} == {"tools", "format"}
    assert all(request.leaves_after for request in first if request.kind == "leaving")
