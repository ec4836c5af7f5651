"""Engines' OpenAI endpoints: a request as they want it, and their stream of events as it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict

from protos.block.v1 import common_pb2, scheduler_pb2
from services.http.client import Connection, Headers, HttpClient, origin_of, request_head
from services.http.openai_body import OpenAIRequest, read_body
from services.instances import Instance

COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
MOST_ERROR_BYTES = 64 * 1024
MOST_EVENT_BYTES = 2**20
PASSING = (408, 409, 425, 429)  # of the statuses that blame the request, those that another engine may not give

SAID_ELSEWHERE = {
    "model": "request.model",
    "prompt": "prompt",
    "messages": "messages",
    "max_tokens": "request.max_tokens",
    "max_completion_tokens": "request.max_tokens",
    "min_tokens": "request.min_tokens",
    "ignore_eos": "request.ignore_eos",
    "priority": "request.priority",
}
OURS = {"stream", "stream_options", "n", "best_of", "use_beam_search", "echo"}


class EngineError(ConnectionError):
    """The engine, or the way to it, failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """What one event of an engine's stream says."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    usage: Mapping[str, Any] | None = None

    def is_answer(self) -> bool:
        """Tell whether it carries any of the answer, or its end."""
        return bool(self.text or self.token_ids or self.finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as an engine is asked it, whichever engine that will be."""

    path: bytes
    body: dict[str, Any]
    request_id: str
    prompt: bytes  # as text, for the tagger
    output_tokens: int | None = None  # of an emulated answer

    def read(self) -> OpenAIRequest:
        """Tell what placing it needs to know."""
        return read_body(self.body_for(()), chat=self.path == CHAT)

    def body_for(self, models: tuple[str, ...]) -> bytes:
        """Write the body; an engine is asked by its own model's name where the request has none."""
        named = self.body if "model" in self.body or not models else {**self.body, "model": models[0]}
        return json.dumps(named).encode()


def question_from(message: scheduler_pb2.GenerateRequest) -> EngineRequest:
    """Read what is to be asked; what is wrong is named as it is on the wire."""
    request = message.request
    parameters = _plain(MessageToDict(message.parameters)) if message.HasField("parameters") else {}
    for name in parameters:
        if name in SAID_ELSEWHERE:
            raise ValueError(f"parameters.{name}: is said by {SAID_ELSEWHERE[name]}")
        if name in OURS:
            raise ValueError(f"parameters.{name}: cannot be chosen here")
    path, asked, prompt = _input(message)
    return EngineRequest(
        path=path,
        body={
            **parameters,
            **_settings(request),
            **asked,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        request_id=request.request_id,
        prompt=prompt,
        output_tokens=request.output_tokens if request.HasField("output_tokens") else None,
    )


def _settings(request: common_pb2.Request) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if request.model:
        settings["model"] = request.model
    if request.HasField("max_tokens"):
        settings["max_tokens"] = request.max_tokens
    if request.HasField("min_tokens"):
        settings["min_tokens"] = request.min_tokens
    if request.ignore_eos:
        settings["ignore_eos"] = True
    if request.priority:  # engines that do not order by priority refuse any other than 0
        settings["priority"] = request.priority
    return settings


def _input(message: scheduler_pb2.GenerateRequest) -> tuple[bytes, dict[str, Any], bytes]:
    """Read where to ask, what to ask, and its text."""
    kind = message.WhichOneof("input")
    if kind == "prompt" and message.prompt:
        return COMPLETIONS, {"prompt": message.prompt}, message.prompt.encode()
    if kind == "prompt_token_ids" and message.prompt_token_ids.ids:
        return COMPLETIONS, {"prompt": list(message.prompt_token_ids.ids)}, b""
    if kind == "messages" and message.messages:
        messages: Any = _plain(MessageToDict(message.messages))
        return CHAT, {"messages": messages}, "\n".join(_texts(messages)).encode()
    raise ValueError("input: is missing: prompt, prompt_token_ids or messages" if kind is None else f"{kind}: is empty")


def _plain(value: Any) -> Any:
    """Make whole numbers whole again, which protobuf's JSON has as fractions; engines refuse `"top_k": 3.0`."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _texts(messages: list[Any]) -> list[str]:
    """Write a conversation down about as a chat template would."""
    texts: list[str] = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{place}]: must be an object with a role")
        texts.append(message["role"])
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts


async def answer(
    client: HttpClient, instance: Instance, question: EngineRequest, waits_s: tuple[float, float]
) -> AsyncGenerator[StreamChunk]:
    """Ask an engine, and give its answer as it comes; leaving closes the connection, which makes the engine stop.

    It is waited for so long until the first piece, and then for every other. EngineError and TimeoutError where the
    engine fails, ValueError where it refuses the request.
    """
    first_s, idle_s = waits_s
    origin = origin_of(instance.engine_url)
    body = question.body_for(instance.models)
    headers: Headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
    if question.request_id.isascii():
        headers.append((b"x-request-id", question.request_id.encode()))
    if question.output_tokens is not None:
        headers.append((b"x-block-output-tokens", b"%d" % question.output_tokens))
    head = request_head(b"POST", origin, question.path, headers, len(body))
    connection = await client.send(origin, head, body, first_s)
    try:
        if connection.status != 200:
            await _refuse(connection, idle_s)
        async for event in _events(connection, first_s, idle_s):
            piece = _piece(event)
            if piece is not None:
                yield piece
    finally:
        connection.release()


async def _refuse(connection: Connection, within_s: float) -> None:
    """Raise what an engine says instead of answering."""
    body = await connection.read_all(within_s, MOST_ERROR_BYTES)
    try:
        said = json.loads(body)
        error = said.get("error", said)
        text = str(error.get("message", "")) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        text = body[:200].decode("utf-8", "replace")
    blames_request = 400 <= connection.status < 500 and connection.status not in PASSING
    message = f"the engine answers {connection.status}: {text[:300]}"
    raise ValueError(message) if blames_request else EngineError(message)


async def _events(connection: Connection, first_s: float, idle_s: float) -> AsyncIterator[bytes]:
    """Cut a stream of server-sent events into what they say, up to [DONE]."""
    held = b""
    wait_s = first_s
    while piece := await connection.read(wait_s):
        wait_s = idle_s
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                said = line[5:].strip()
                if said == b"[DONE]":
                    while await connection.read(idle_s):  # so that the connection can be used again
                        pass
                    return
                yield said
        if len(held) > MOST_EVENT_BYTES:
            raise EngineError("an event is too long")
    raise EngineError("the stream ended too early")


def _piece(event: bytes) -> StreamChunk | None:
    """Read one event; None where it says nothing of the answer."""
    try:
        said = json.loads(event)
        if "error" in said:
            error = said["error"]
            raise EngineError(
                f"the engine says: {error.get('message', error) if isinstance(error, dict) else error}"[:300]
            )
        choices, usage = said.get("choices") or [], said.get("usage")
        if not choices:
            return StreamChunk(usage=usage) if usage else None
        choice = choices[0]
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        return StreamChunk(
            text=text or "",
            token_ids=tuple(choice.get("token_ids") or ()),
            finish_reason=choice.get("finish_reason") or "",
            usage=usage,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise EngineError("an event makes no sense") from None
