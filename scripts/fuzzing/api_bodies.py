"""The target of the bodies of all endpoints: JSON of every family, and forms."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from scripts.fuzzing.bodies import MESSAGES
from scripts.fuzzing.inputs import NUMBERS, TEXTS, Values, any_json, document, written
from scripts.fuzzing.parsers import Parser
from scripts.fuzzing.targets import require
from services.http.endpoints import ENDPOINTS, announced_endpoint
from services.http.reply_format import MESSAGES_FORMAT, POOLING_FORMAT, RESPONSES_FORMAT
from services.http.sse import StreamReader, ending_of

BOUNDARY = b"XyZ"
FORM = b"multipart/form-data; boundary=" + BOUNDARY
BLOCKS = (
    {"type": "text", "text": "a"}, {"type": "input_text", "text": "a"}, {"type": "tool_result", "content": "a"},
    {"type": "tool_use", "input": {}}, {"type": "input_image", "image_url": "x"}, {"type": "text", "text": None},
)  # fmt: skip
ITEMS = (
    *MESSAGES, {"type": "message", "role": "user", "content": list(BLOCKS)},
    {"type": "function_call_output", "call_id": "a", "output": "b"}, {"role": "user", "content": [BLOCKS[2]]},
)  # fmt: skip
EVENTS = (
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":1}}}\n\n',
    b'event: content_block_delta\ndata: {"delta":{"text":"a"}}\n\n',
    b'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}\n\n',
    b"event: message_stop\ndata: {}\n\n", b'event: error\ndata: {"type":"error"}\n\n', b"data: [DONE]\n\n", b"event: ",
    b'event: response.created\ndata: {"response":{"id":"resp_1"}}\n\n',
    b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n', b"\n", b"\r\n\r\n",
    b'event: response.completed\ndata: {"response":{"status":"incomplete","usage":{"input_tokens":99999999999}}}\n\n',
)  # fmt: skip


def _texts(draw: Random) -> Any:
    kinds = (TEXTS, ({"text": "a"}, {"content": [BLOCKS[0]]}, [1, 2], ["a", "b"], [[1], [2, 3]], 5, None))
    some = [draw.choice(draw.choice(kinds)) for _ in range(draw.randrange(4))]
    return draw.choice((*some, some)) if some else some


def _items(draw: Random) -> Any:
    return draw.choice((draw.choice(TEXTS), [draw.choice(ITEMS) for _ in range(draw.randrange(4))]))


REQUIRED: Values = {"model": lambda draw: draw.choice(TEXTS), "input": lambda draw: draw.choice((_items, _texts))(draw)}
OPTIONAL: Values = {
    **dict.fromkeys(("messages", "system", "instructions", "tools"), _items),
    **dict.fromkeys(
        ("query", "documents", "text_1", "text_2", "queries", "items", "texts", "prompt", "images"), _texts
    ),
    **dict.fromkeys(("max_tokens", "max_output_tokens", "min_tokens", "priority"), lambda draw: draw.choice(NUMBERS)),
    **dict.fromkeys(("stream", "store", "background", "ignore_eos"), lambda draw: draw.random() < 0.5),
    **dict.fromkeys(("previous_response_id", "request_id"), lambda draw: draw.choice(TEXTS)),
    **dict.fromkeys(("reasoning", "thinking", "chat_template_kwargs", "vllm_xargs", "nvext"), any_json),
}


def _form(draw: Random) -> bytes:
    parts = []
    for _ in range(draw.randrange(5)):
        name = draw.choice(("model", "stream", "file", "prompt", "vllm_xargs", "kv_transfer_params", "é\r\n", 'a"b'))
        head = f'Content-Disposition: form-data; name="{name}"'.encode("utf-8", "replace")
        value = draw.choice((b"", b"a", b"RIFF____WAVEfmt " + draw.randbytes(24), draw.randbytes(9), b"[" * 100))
        parts.append(b"--" + BOUNDARY + b"\r\n" + head + b"\r\n\r\n" + value + b"\r\n")
    return b"".join(parts) + draw.choice((b"--" + BOUNDARY + b"--\r\n", b"--" + BOUNDARY, b"", b"\r\n"))


def _drawn(draw: Random) -> bytes:
    kind = draw.random()
    if kind < 0.2:
        return _form(draw)
    if kind < 0.4:
        return b"".join(draw.choice(EVENTS) for _ in range(draw.randrange(8)))
    return written(draw, document(draw, REQUIRED, OPTIONAL))


def _read(data: bytes) -> None:
    for endpoint in (*ENDPOINTS.values(), announced_endpoint("/v1/other")):
        for content_type in (b"application/json", FORM):
            with suppress(ValueError):
                request = endpoint.read(data, content_type)
                require(len(request.prompt) <= 2**20, "more of a prompt is kept than its ends")
                require(request.prompt_bytes <= 2**31, "a prompt counts without limit")
    for form in (RESPONSES_FORMAT, MESSAGES_FORMAT, POOLING_FORMAT):
        reader = StreamReader(form)
        passed = b"".join(reader.feed(data[at : at + 7]) for at in range(0, len(data), 7)) + reader.rest()
        require(passed == data, "a stream does not pass as it came")
        require(reader.ending().output_tokens >= 0, "a stream has less than no tokens")
        form.has_begun(data)
        ending_of(data, form)


@asynccontextmanager
async def open_api_bodies(_: Path) -> AsyncIterator[Parser]:
    """Read requests and replies of every endpoint."""
    fields = b'"model": "tiny", "input": "Say hello", "query": "a", "documents": ["b"]'
    valid = b'{%s, "messages": [{"role": "user", "content": "a"}]}' % fields
    yield Parser(name="api_bodies", draw=_drawn, read=_read, valid=valid)
