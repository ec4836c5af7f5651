"""Continuing a stream on another engine: requests for the rest of an answer, and one stream from two."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.emulator.answers import AnswerLengths
from services.emulator.openai import ParsedRequest, Served, request_from
from services.emulator.replies import CompletionReply
from services.emulator.request_bodies import CHAT, COMPLETION
from services.http.continuable import IDS_FIELD, why_not_continuable
from services.http.sse import StreamReader, data_of
from services.http.stream_continuation import (
    NotContinuableError,
    StreamTranscript,
    failure_in,
)

SERVED = Served(model="tiny", max_model_len=4096, lengths=AnswerLengths(median_tokens=30, spread=0.5))
COMPLETE = {"model": "tiny", "prompt": "Tell me of the sea", "max_tokens": 20, "stream": True}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me of the sea"}], "stream": True}


def parsed(data: dict[str, Any], *, chat: bool, request_id: str = "one") -> ParsedRequest:
    """The request as an engine reads it."""
    return request_from(CHAT if chat else COMPLETION, data, {}, request_id, SERVED)


def events_of(data: dict[str, Any], *, chat: bool, request_id: str = "one") -> list[bytes]:
    """All events of an engine's stream; the last ones end it."""
    request = parsed(data, chat=chat, request_id=request_id)
    reply, num = CompletionReply(request, 1_700_000_000), request.answer.num_tokens
    pieces = [reply.events(place, place + 1) for place in range(num)]
    text = reply.first() + b"".join(pieces)
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


def transcript_of(data: dict[str, Any], *, chat: bool, hides_ids: bool = True) -> StreamTranscript:
    """The transcript of a stream that has not begun."""
    return StreamTranscript(
        body=json.dumps(data).encode(), chat=chat, max_model_len=SERVED.max_model_len, hides_ids=hides_ids
    )


def joined(transcript: StreamTranscript, data: dict[str, Any], *, chat: bool, cuts: list[int]) -> bytes:
    """The client's stream where each engine fails after a number of its events."""
    sent = {**data, IDS_FIELD: True} if transcript.hides_ids else data
    received = b""
    for number, cut in enumerate(cuts):
        for event in events_of(sent, chat=chat, request_id=f"engine-{number}")[:cut]:
            received += transcript.passed(event)
        rest = transcript.continuation()
        transcript.continue_as(rest)
        chat, sent = rest.path.endswith(b"chat/completions"), json.loads(rest.body)
    for event in events_of(sent, chat=chat, request_id="last"):
        received += transcript.passed(event)
    return received


def read(events: bytes) -> list[dict[str, Any]]:
    """The events of a stream, but for [DONE], which must come last."""
    *found, last = data_of(events)
    assert last == b"[DONE]"
    return [json.loads(event) for event in found]


def counts(event: dict[str, Any]) -> list[int]:
    """The numbers of an event's usage."""
    usage = event.get("usage") or {}
    return [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens") if name in usage]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("hides_ids", [False, True])
@pytest.mark.parametrize("cuts", [[1], [2], [9], [5, 4], [3, 1, 6]])
@pytest.mark.parametrize(
    "usage", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_the_client_sees_one_stream(
    chat: bool, hides_ids: bool, cuts: list[int], usage: dict[str, bool] | None
) -> None:
    """Text, usage, ids and the end are those of one engine that never failed."""
    data: dict[str, Any] = {**(TALK if chat else COMPLETE), **({"stream_options": usage} if usage else {})}
    whole = b"".join(events_of(data, chat=chat, request_id="engine-0"))
    transcript = transcript_of(data, chat=chat, hides_ids=hides_ids)
    received = read(joined(transcript, data, chat=chat, cuts=cuts))
    expected = read(whole)
    assert [event["choices"] for event in received if event["choices"]] == [
        event["choices"] for event in expected if event["choices"]
    ]
    assert {(event["id"], event["model"], event["object"]) for event in received} == {
        (event["id"], event["model"], event["object"]) for event in expected
    }
    assert list(map(counts, received)) == list(map(counts, expected))
    assert transcript.is_done
    assert transcript.finish_reason == expected[-2 if usage else -1]["choices"][0]["finish_reason"]


def test_without_a_failure_streams_pass_byte_for_byte() -> None:
    """The token ids that were asked for in the client's place are not shown."""
    for chat, data in ((False, COMPLETE), (True, TALK)):
        transcript = transcript_of(data, chat=chat)
        received = b"".join(map(transcript.passed, events_of({**data, IDS_FIELD: True}, chat=chat)))
        assert received == b"".join(events_of(data, chat=chat))


def test_a_client_that_asked_for_token_ids_gets_those_of_all_engines() -> None:
    """No id is a duplicate."""
    data = {**COMPLETE, IDS_FIELD: True}
    transcript = transcript_of(data, chat=False, hides_ids=False)
    received = read(joined(transcript, data, chat=False, cuts=[7]))
    ids = [token for event in received for token in event["choices"][0]["token_ids"]]
    assert ids == parsed(data, chat=False).answer.token_ids()


def test_long_streams_are_not_kept_as_they_came() -> None:
    """Events beyond a limit are read, and what is needed of them is kept."""
    data = {**COMPLETE, "max_tokens": 2000, "ignore_eos": True}
    transcript = transcript_of(data, chat=False)
    events = events_of({**data, IDS_FIELD: True}, chat=False)
    for event in events[:1500]:
        transcript.passed(event)
    assert sum(map(len, transcript._unread)) < 2**17
    assert transcript.num_tokens == 1500
    assert transcript.continuation().max_tokens == 500


def test_a_long_prompt_returns_long_events() -> None:
    """The ids of its tokens come in one event, which is received in many pieces, and the client does not get them."""
    ids = list(range(100_000, 300_000))
    first = json.dumps({"id": "x", "prompt_token_ids": ids, "choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    second = json.dumps({"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [5]}]})
    data = {**TALK, "max_tokens": 3}
    stream = f"data: {first}\n\ndata: {second}\n\n".encode()
    reader, transcript = StreamReader(), transcript_of(data, chat=True)
    pieces = (stream[start : start + 2**16] for start in range(0, len(stream), 2**16))
    received = b"".join(transcript.passed(reader.feed(piece)) for piece in pieces)
    assert len(received) < 2**10
    assert json.loads(transcript.continuation().body)["prompt"] == [*ids, 5]


@pytest.mark.parametrize("event", ["ping", "[1]", '{"choices": [3]}', '{"choices": [{"text": 7}]}', '{"usage": "?"}'])
def test_events_that_cannot_be_read(event: str) -> None:
    """They pass as they came, and such a stream does not continue; those of the next engine are its failure."""
    invalid = f"data: {event}\n\n".encode()
    transcript = transcript_of(COMPLETE, chat=False)
    text = b'data: {"choices": [{"text": "%s"}]}\n\n' % (b"x" * 2**17)
    assert transcript.passed(invalid) + transcript.passed(text) == invalid + text
    with pytest.raises(NotContinuableError, match="invalid_event"):
        transcript.continuation()
    other = transcript_of(COMPLETE, chat=False)
    other.passed(text)
    other.continue_as(other.continuation())
    with pytest.raises(NotContinuableError, match="invalid_event"):
        other.passed(invalid)


def test_token_ids_without_text_are_answered_again() -> None:
    """A character of several tokens that has not been sent would be lost in the prompt."""
    transcript = transcript_of(COMPLETE, chat=False)
    first, second, third = events_of({**COMPLETE, IDS_FIELD: True}, chat=False)[:3]
    text = json.loads(third[6:])["choices"][0]["text"].encode()
    for event in (first, second, third.replace(b'"text":"' + text, b'"text":"')):
        transcript.passed(event)
    rest = transcript.continuation()
    assert (rest.num_sent, rest.max_tokens) == (2, 18)
    assert json.loads(rest.body)["prompt"][-2:] == parsed(COMPLETE, chat=False).answer.token_ids()[:2]


def test_stop_strings_continue_by_text() -> None:
    """An engine holds text back that may begin a stop string: its tokens are known, its text is not."""
    data = {**COMPLETE, "stop": ["xyz"]}
    transcript = transcript_of(data, chat=False)
    for event in events_of({**data, IDS_FIELD: True}, chat=False)[:4]:
        transcript.passed(event)
    rest = transcript.continuation()
    body = json.loads(rest.body)
    assert body["prompt"] == COMPLETE["prompt"] + parsed(data, chat=False).answer.text(0, 4)[:-2]
    assert (rest.num_sent, body["max_tokens"], body["stop"]) == (3, 17, ["xyz"])


def test_a_chat_continues_as_a_completion_of_token_ids() -> None:
    """Sampling parameters are kept; what only a chat has is left out; without a limit, the model's counts."""
    data = {**TALK, "temperature": 0.5, "seed": 3, "chat_template_kwargs": {"a": 1}, "logprobs": False}
    transcript = transcript_of(data, chat=True)
    for event in events_of({**data, IDS_FIELD: True}, chat=True)[:5]:
        transcript.passed(event)
    rest = transcript.continuation()
    body = json.loads(rest.body)
    assert (rest.path, rest.num_sent) == (b"/v1/completions", 4)
    assert (body["temperature"], body["seed"], body["stream"]) == (0.5, 3, True)
    assert "messages" not in body
    assert not {"chat_template_kwargs", "logprobs"} & set(body)
    assert body["max_tokens"] == SERVED.max_model_len - len(body["prompt"])


@pytest.mark.parametrize(
    ("chat", "fields", "reason"),
    [
        (False, {"n": 2}, "several_answers"),
        (False, {"logprobs": 3}, "logprobs"),
        (True, {"logprobs": True}, "logprobs"),
        (False, {"echo": True}, "prompt"),
        (True, {"echo": True}, "prompt"),
        (False, {"prompt": ["a", "b"]}, "several_prompts"),
        (True, {"response_format": {"type": "json_object"}}, "structured_output"),
        (True, {"structured_outputs": {"regex": "a"}}, "structured_output"),
        (True, {"tools": [{"type": "function"}]}, "tools"),
        (True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "media"),
        (True, {"tools": [{"type": "function"}], "tool_choice": "none"}, ""),
        (True, {"response_format": {"type": "text"}}, ""),
        (False, {"prompt": [1, 2, 3], "n": 1, "seed": 7}, ""),
    ],
)
def test_requests_that_cannot_be_continued_say_why(chat: bool, fields: dict[str, Any], reason: str) -> None:
    """The rest of such an answer would not be that of one engine."""
    assert why_not_continuable({**(TALK if chat else COMPLETE), **fields}, chat=chat) == reason


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        ({"tool_calls": [{"index": 0}]}, "tools"),
        ({"reasoning": "Let me see"}, "reasoning"),
        ({"content": "Let"}, ""),
    ],
)
def test_what_has_been_sent_may_forbid_it(delta: dict[str, Any], reason: str) -> None:
    """A call of a tool and a chain of thought are read by the engine's parsers, which would not see their start."""
    transcript = transcript_of(TALK, chat=True)
    event = {"id": "x", "choices": [{"index": 0, "delta": delta, "token_ids": [5]}], "prompt_token_ids": [1, 2]}
    transcript.passed(b"data: " + json.dumps(event).encode() + b"\n\n")
    if not reason:
        assert json.loads(transcript.continuation().body)["prompt"] == [1, 2, 5]
        return
    with pytest.raises(NotContinuableError, match=reason):
        transcript.continuation()


def chat_event(**delta: Any) -> bytes:
    """An event of a chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [5]}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


def test_an_answer_that_begins_again_may_reason() -> None:
    """Nothing of it was sent, so that the next engine's parsers see the whole."""
    transcript = transcript_of(TALK, chat=True)
    transcript.passed(chat_event(role="assistant", content=""))
    transcript.continue_as(transcript.continuation())
    choice = json.loads(transcript.passed(chat_event(reasoning="Let me see"))[6:])["choices"][0]
    assert (choice["delta"], choice["token_ids"]) == ({"reasoning": "Let me see"}, None)
    with pytest.raises(NotContinuableError, match="reasoning"):
        transcript.continuation()


def test_the_rest_of_a_text_is_text() -> None:
    """The next engine's parser may take it for reasoning, because it does not see that this has ended."""
    transcript = transcript_of({**TALK, "stop": ["."]}, chat=True)
    transcript.passed(chat_event(content="The sea"))
    transcript.continue_as(transcript.continuation())
    choice = json.loads(transcript.passed(chat_event(reasoning=" is deep"))[6:])["choices"][0]
    assert choice["delta"] == {"content": " is deep"}
    assert json.loads(transcript.continuation().body)["messages"][-1]["content"] == "The sea is deep"


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_an_end_that_did_not_come_is_written(missing: int) -> None:
    """The last token has been sent; the reason, the usage or [DONE] has not."""
    data = {**COMPLETE, "stream_options": {"include_usage": True}}
    events = events_of({**data, IDS_FIELD: True}, chat=False)
    transcript = transcript_of(data, chat=False)
    if missing == 3:  # the engine sends the last token with the reason
        events[-3] = events[-3].replace(b'"length"', b"null")
    received = b"".join(map(transcript.passed, events[: len(events) - min(missing, 2)])) + (transcript.end() or b"")
    last = read(received)[-1]
    assert sum("usage" in event for event in read(received)) == 1
    num_prompt = len(parsed(data, chat=False).prompt)
    assert counts(last) == [num_prompt, 20, num_prompt + 20]
    assert [event["choices"][0]["finish_reason"] for event in read(received) if event["choices"]][-1] == "length"


def test_an_answer_that_misses_tokens_has_no_end() -> None:
    """It has to continue."""
    transcript = transcript_of(COMPLETE, chat=False)
    transcript.passed(events_of({**COMPLETE, IDS_FIELD: True}, chat=False)[0])
    assert transcript.end() is None


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (b'data: {"choices":[{"text":"a"}]}\n\n', -1),
        (b'data: {"choices":[{"text":"\\"error\\": no"}]}\n\n', -1),
        (b'data: {"error": {"message": "dead"}}\n\n', 0),
        (b'data: {"choices":[]}\n\ndata: {"error": {"message": "dead"}}\n\ndata: [DONE]\n\n', 22),
        (b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n', 0),
        (b'data: {"choices":[{"text":"abort","finish_reason":"stop"}]}\n\n', -1),
    ],
)
def test_failures_that_engines_report(events: bytes, expected: int) -> None:
    """An error event, and an answer that the engine aborts; an answer may speak of either."""
    assert failure_in(events) == expected


def test_a_prompt_that_continues_an_answer_is_answered_with_the_rest() -> None:
    """The emulated engine says what one engine alone would have said, wherever it is cut."""
    whole = parsed(COMPLETE, chat=False)
    ids = whole.answer.token_ids()
    for num in (1, 2, 7, len(ids) - 1):
        rest = parsed({**COMPLETE, "prompt": [*whole.prompt, *ids[:num]], "max_tokens": 20 - num}, chat=False)
        assert rest.answer.token_ids() == ids[num:]
