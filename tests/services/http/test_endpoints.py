"""What is read from requests and replies of all endpoints."""

from __future__ import annotations

import io
import json
import wave
from typing import Any

import pytest

from protos.block.v1 import common_pb2
from services.http.audio_body import TOKENS_PER_S
from services.http.endpoints import ENDPOINTS, GENERATE, PREFILL_ONLY, UNPLACED, announced_endpoint
from services.http.openai_body import OpenAIRequest
from services.http.prompt_tokens import PromptSizes
from services.http.reply_format import MESSAGES_FORMAT, POOLING_FORMAT, RESPONSES_FORMAT
from services.http.sse import StreamReader, ending_of

STOP, LENGTH, FAILED = (
    common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_FAILED,
)  # fmt: skip
JSON_TYPE = b"application/json"


def read(path: str, **fields: Any) -> OpenAIRequest:
    """Read a body."""
    return ENDPOINTS[path].read(json.dumps({"model": "tiny", **fields}).encode(), JSON_TYPE)


def form(*parts: tuple[str, bytes, str]) -> tuple[bytes, bytes]:
    """Write a form; parts have a name, a value and the name of a file, or none."""
    lines = []
    for name, value, file in parts:
        named = f'; filename="{file}"' if file else ""
        lines += [b"--XyZ", f'Content-Disposition: form-data; name="{name}"{named}'.encode(), b"", value]
    return b"\r\n".join([*lines, b"--XyZ--", b""]), b"multipart/form-data; boundary=XyZ"


def wav(seconds: float, rate: int = 8000) -> bytes:
    """Write silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(bytes(2 * round(seconds * rate)))
    return file.getvalue()


# Requests.


def test_a_response_is_read_as_the_chat_that_it_becomes() -> None:
    """Instructions and input are its prompt, whether the input is a text or a list of items."""
    plain = read("/v1/responses", input="Hello there", instructions="Be brief", max_output_tokens=7, stream=True)
    parts = [{"type": "input_text", "text": "Hello"}, {"type": "input_text", "text": "there"}]
    items = read("/v1/responses", input=[{"role": "user", "content": parts}], instructions="Be brief")
    assert plain.prompt == b"system\nBe brief\nuser\nHello there"
    assert items.prompt == b"system\nBe brief\nuser\nHello\nthere"
    assert (plain.max_tokens, plain.stream, plain.num_messages, plain.is_kept) == (7, True, 2, True)
    assert plain.conversation == {
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello there"}]
    }
    assert plain.why_not_continuable == "responses"


def test_a_response_with_more_than_text_is_not_rendered() -> None:
    """Its text counts, and what a chat template makes of it is not known."""
    image = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    call = {"type": "function_call_output", "call_id": "a", "output": "42 degrees"}
    assert read("/v1/responses", input=[image]).conversation is None
    found = read("/v1/responses", input=[call], previous_response_id="resp_1", store=False, request_id="mine")
    assert (found.response_id, found.is_kept, found.names_itself) == ("resp_1", False, True)
    assert b"42 degrees" in found.prompt


def test_a_message_is_read_as_the_chat_that_it_becomes() -> None:
    """The system prompt is its first message; results of tools count."""
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "42 degrees"}]}
    found = read("/v1/messages", system=[{"type": "text", "text": "Be brief"}], max_tokens=9,
                 messages=[{"role": "user", "content": "Hello"}])  # fmt: skip
    assert found.prompt == b"system\nBe brief\nuser\nHello"
    assert (found.max_tokens, found.num_messages, found.operation) == (9, 2, "chat")
    assert found.conversation is not None
    other = read("/v1/messages", max_tokens=9, messages=[{"role": "user", "content": [result]}])
    assert other.prompt == b"user\n42 degrees"
    assert other.conversation is None


@pytest.mark.parametrize(
    ("path", "fields", "num_prompts", "num_bytes", "num_tokens"),
    [
        ("/v1/embeddings", {"input": "four"}, 1, 4, None),
        ("/v1/embeddings", {"input": ["one", "three"]}, 2, 9, None),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1, 0, 3),
        ("/v1/embeddings", {"input": [[1, 2], [3, 4, 5]]}, 2, 0, 5),
        ("/v2/embed", {"texts": ["one", "three"]}, 2, 9, None),
        ("/classify", {"input": ["one"]}, 1, 3, None),
        ("/pooling", {"messages": [{"role": "user", "content": "Hello"}]}, 1, 10, None),
        ("/v1/rerank", {"query": "abc", "documents": ["one", "three", {"text": "xy"}]}, 3, 16 + 2 * 3, None),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}, 2, 7, None),
    ],
)
def test_inputs_without_an_answer(
    path: str, fields: dict[str, Any], num_prompts: int, num_bytes: int, num_tokens: int | None
) -> None:
    """Each input counts, and a query with each document; nothing is generated."""
    found = read(path, **fields)
    assert (found.num_prompts, found.prompt_bytes, found.prompt_tokens) == (num_prompts, num_bytes, num_tokens)
    assert (found.prefill_only, found.max_tokens, found.undivided) == (True, 1, True)


def test_a_long_query_of_many_documents_is_not_copied() -> None:
    """Only its length counts once for each document, and not without limit."""
    found = read("/rerank", query="x" * 100_000, documents=["y"] * 100_000)
    assert found.prompt_bytes == 2**31
    assert len(found.prompt) < 200_000
    assert PromptSizes(4.0).tokens(found) < 2**32


def test_audio_counts_by_its_length() -> None:
    """Of a WAV file it is in its head; of another file it is estimated from its size."""
    body, kind = form(("model", b"tiny", ""), ("stream", b"true", ""), ("file", wav(3.0), "a.wav"))
    found = ENDPOINTS["/v1/audio/transcriptions"].read(body, kind)
    assert (found.model, found.stream, found.is_object, found.operation) == ("tiny", True, False, "transcription")
    assert found.prompt_tokens == pytest.approx(3 * TOKENS_PER_S, abs=1)
    body, kind = form(("model", b"tiny", ""), ("file", b"\xff" * 32_000, "a.mp3"))
    assert ENDPOINTS["/v1/audio/translations"].read(body, kind).prompt_tokens == 2 * TOKENS_PER_S


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": 5}, "input"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": ["x"]}, "input[0]"),
        ("/v1/responses", {"input": "x", "instructions": 3}, "instructions"),
        ("/v1/responses", {"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "previous_response_id": 4}, "previous_response_id"),
        ("/v1/messages", {"messages": []}, "messages"),
        ("/v1/messages", {"messages": ["x"]}, "messages[0]"),
        ("/v1/messages", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/v1/messages", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "system": 3}, "system"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [None]}, "input"),
        ("/v2/embed", {"images": 5}, "input"),
        ("/v1/rerank", {"query": "x"}, "documents"),
        ("/v1/rerank", {"documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/audio/speech", {"input": 3}, "input"),
        ("/tokenize", {"model": 3}, "model"),
    ],
)
def test_bad_bodies_name_their_field(path: str, fields: dict[str, Any], field: str) -> None:
    """The message starts with the field as the client wrote it."""
    with pytest.raises(ValueError, match=rf"^{field.replace('[', '.').replace(']', '.')}: "):
        read(path, **fields)


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ([("model", b"tiny", "")], b"application/json", "multipart/form-data"),
        ([("model", b"x" * 20_000, "")], None, "model: is longer"),
        ([(f"f{number}", b"x", "") for number in range(65)], None, "at most 64 fields"),
        ([("vllm_xargs", b"[" * 10_000, "")], None, "vllm_xargs: .*nested deeper than"),
    ],
)
def test_bad_forms_are_refused(parts: list[tuple[str, bytes, str]], kind: bytes | None, message: str) -> None:
    """A form that cannot be read has no model."""
    body, own = form(*parts)
    with pytest.raises(ValueError, match=message):
        ENDPOINTS["/v1/audio/transcriptions"].read(body, kind or own)
    with pytest.raises(ValueError, match="last boundary"):
        ENDPOINTS["/v1/audio/transcriptions"].read(b'--XyZ\r\nContent-Disposition: form-data; name="a"\r\n\r\nb', own)


@pytest.mark.parametrize(
    ("name", "value"), [("kv_transfer_params", b"{}"), ("vllm_xargs", rb'{"kv\u005ftransfer_params": 1}')]
)
def test_forms_that_name_kv_blocks_are_seen(name: str, value: bytes) -> None:
    """However the name is written."""
    body, kind = form(("model", b"tiny", ""), (name, value, ""), ("file", b"x", "a.mp3"))
    assert ENDPOINTS["/v1/audio/transcriptions"].read(body, kind).has_kv_transfer_params


def test_the_table_and_other_paths() -> None:
    """Every path has a kind; a path that only engines know is forecast by its texts."""
    assert {one.kind for one in ENDPOINTS.values()} == {GENERATE, PREFILL_ONLY, UNPLACED}
    found = announced_endpoint("/v1/new").read(b'{"model": "m", "text": "abcd", "max_tokens": 3}', JSON_TYPE)
    assert (found.model, found.prompt_bytes, found.max_tokens) == ("m", 4, 3)


# Replies.


def named(name: str, **fields: Any) -> bytes:
    """Write an event with a name."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, separators=(',', ':'))}\n\n".encode()


MESSAGE = (
    named("message_start", message={"usage": {"input_tokens": 0, "output_tokens": 0}}),
    named("content_block_start", index=0),
    named("content_block_delta", delta={"text": 'event: content_block_delta\ndata: "stop_reason":"end_turn"'}),
    named("content_block_delta", delta={"text": "b"}),
    named("content_block_stop", index=0),
    named("message_delta", delta={"stop_reason": "max_tokens"},
          usage={"input_tokens": 5, "cache_read_input_tokens": 12, "cache_creation_input_tokens": 4, "output_tokens": 2}),
    named("message_stop"),
)  # fmt: skip
RESPONSE = (
    named("response.created", response={"id": "resp_1", "status": "in_progress", "usage": None}),
    named("response.in_progress", response={"id": "resp_1", "status": "in_progress"}),
    named("response.output_text.delta", delta="a"),
    named("response.output_text.delta", delta="b\n\ndata: [DONE]"),
    named("response.completed", response={"output": [{"text": "x" * 9000, "status": "completed"}],
          "status": "incomplete", "usage": {"input_tokens": 21, "input_tokens_details": {"cached_tokens": 16},
          "output_tokens": 2, "output_tokens_details": {"tool_output_tokens": 7}}}),
)  # fmt: skip


@pytest.mark.parametrize(("events", "form"), [(MESSAGE, MESSAGES_FORMAT), (RESPONSE, RESPONSES_FORMAT)])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_streams_with_named_events(events: tuple[bytes, ...], form: Any, size: int) -> None:
    """Tokens, usage and the end are read, however the stream is cut into pieces; cached tokens are of the prompt."""
    reader, whole = StreamReader(form), b"".join(events)
    passed = b"".join(reader.feed(whole[at : at + size]) for at in range(0, len(whole), size))
    assert passed + reader.rest() == whole
    ending = reader.ending()
    assert (ending.finish_reason, ending.output_tokens, ending.prompt_tokens) == (LENGTH, 2, 21)
    assert reader.num_data == 2
    assert not reader.is_cut()


@pytest.mark.parametrize(("events", "form"), [(MESSAGE, MESSAGES_FORMAT), (RESPONSE, RESPONSES_FORMAT)])
def test_streams_that_end_early_are_cut(events: tuple[bytes, ...], form: Any) -> None:
    """Without its last event an answer is not whole; an error is its end."""
    reader = StreamReader(form)
    for event in events[:-1]:
        reader.feed(event)
        assert reader.is_cut()
    assert reader.ending().output_tokens == 2
    reader.feed(named("error", error={"message": "out of memory"}))
    assert not reader.is_cut()
    assert reader.ending().finish_reason == FAILED


def test_a_response_has_begun_when_the_engine_has_computed() -> None:
    """Its first two events come before that, so that it can still be sent elsewhere."""
    assert not RESPONSES_FORMAT.has_begun(b"")
    assert not RESPONSES_FORMAT.has_begun(b"".join(RESPONSE[:2]))
    assert RESPONSES_FORMAT.has_begun(b"".join(RESPONSE[:3]))
    assert MESSAGES_FORMAT.has_begun(MESSAGE[0])


@pytest.mark.parametrize(
    ("form", "body", "expected"),
    [
        (RESPONSES_FORMAT, {"status": "completed", "usage": {"input_tokens": 3, "output_tokens": 4}}, (STOP, 4, 3)),
        (RESPONSES_FORMAT, {"status": "incomplete", "usage": {"input_tokens": 3, "output_tokens": 4}}, (LENGTH, 4, 3)),
        (MESSAGES_FORMAT, {"stop_reason": "end_turn", "usage": {"input_tokens": 3, "output_tokens": 4}}, (STOP, 4, 3)),
        (POOLING_FORMAT, {"data": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}, (STOP, 0, 3)),
        (POOLING_FORMAT, {"meta": {"billed_units": {"input_tokens": 3}}}, (STOP, 0, 3)),
    ],
)
def test_replies_in_one_piece(form: Any, body: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """Usage and the reason are read where each family of endpoints has them."""
    ending = ending_of(json.dumps(body).encode(), form)
    assert (ending.finish_reason, ending.output_tokens, ending.prompt_tokens) == expected
