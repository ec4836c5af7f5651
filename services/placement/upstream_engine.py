"""Requests to engines' OpenAI endpoints, and their streams of events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.json_format import MessageToDict

from protos.block.v1 import common_pb2, scheduler_pb2
from services.http.client import HttpClient
from services.http.connection import Connection, ReadInterruptedError
from services.http.data_parallel import with_rank
from services.http.engine_arguments import arguments_of, with_arguments
from services.http.headers import Headers, request_head
from services.http.json_body import reply_json
from services.http.kv_transfer import PrefilledPrompt, decode_body
from services.http.openai_body import KV_TRANSFER_PARAMS, OpenAIRequest, conversation_texts, read_body
from services.http.origin import origin_of
from services.http.paths import CHAT, COMPLETIONS
from services.http.proxying import OK, SERVER_ERROR
from services.http.sse import DONE, StreamReader, data_of
from services.instances.instance import Instance

MAX_ERROR_BYTES = 64 * 1024
RETRIABLE = (408, 409, 425, 429)  # client errors that another engine may not return

OTHER_FIELDS = {
    "model": "request.model",
    "prompt": "prompt",
    "messages": "messages",
    "max_tokens": "request.max_tokens",
    "max_completion_tokens": "request.max_tokens",
    "min_tokens": "request.min_tokens",
    "ignore_eos": "request.ignore_eos",
    "priority": "request.priority",
    "n": "request.num_sequences",
}
FIXED = {"stream", "stream_options", "best_of", "use_beam_search", "echo", KV_TRANSFER_PARAMS}
ERROR = "error"  # the reason of an answer that ended in a failure of its engine


INTERRUPTED = b""  # no event


class EngineError(ConnectionError):
    """The engine, or the connection to it, failed."""


class ReportedError(EngineError):
    """The engine reports that it failed with the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """The content of one event of an engine's stream."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    index: int = 0  # of the response
    usage: Mapping[str, Any] | None = None

    def is_answer(self) -> bool:
        """Return whether it contains a part of the answer, or its end."""
        return bool(self.text or self.token_ids or self.finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as any engine receives it."""

    path: bytes
    body: dict[str, Any]
    request_id: str
    prompt: bytes  # as text, for the tagger
    output_tokens: int | None = None  # of an emulated answer
    trace_headers: tuple[tuple[bytes, bytes], ...] = ()

    def read(self) -> OpenAIRequest:
        """Return the values that placing it needs."""
        return read_body(self.body_for(()), chat=self.path == CHAT)

    def headers(self) -> Headers:
        """Return the headers."""
        headers: Headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
        if self.request_id.isascii():
            headers.append((b"x-request-id", self.request_id.encode()))
        if self.output_tokens is not None:
            headers.append((b"x-block-output-tokens", b"%d" % self.output_tokens))
        return [*headers, *self.trace_headers]

    def with_facts(
        self, request: common_pb2.Request, waited_s: float = 0.0, *, is_demoted: bool, passes_priority: bool
    ) -> EngineRequest:
        """Add the final class, targets, weight and ids, for vLLM with the plug-in, and an objective's priority.

        What `vllm_xargs` says itself has precedence, unless the request is demoted. The priority is added only with
        `passes_priority`: engines that do not order by priority may refuse it.
        """
        own = self.body.get("vllm_xargs") or {}
        if not isinstance(own, Mapping):
            raise ValueError(f"parameters.vllm_xargs: must be an object, not {own!r:.40}")
        arguments = with_arguments(own, request, waited_s) if is_demoted else {**arguments_of(request, waited_s), **own}
        added: dict[str, Any] = {"priority": request.priority} if request.priority and passes_priority else {}
        if arguments != own:
            added["vllm_xargs"] = arguments
        return replace(self, body={**self.body, **added}) if added else self

    def body_for(self, models: tuple[str, ...]) -> bytes:
        """Write the body; a request without a model gets the engine's own."""
        body = self.body if "model" in self.body or not models else {**self.body, "model": models[0]}
        return json.dumps(body).encode()


def engine_request_from(message: scheduler_pb2.GenerateRequest) -> EngineRequest:
    """Read a request; errors name the field as it is on the wire."""
    request = message.request
    parameters = _plain(MessageToDict(message.parameters)) if message.HasField("parameters") else {}
    for name in parameters:
        if name in OTHER_FIELDS:
            raise ValueError(f"parameters.{name}: is set by {OTHER_FIELDS[name]}")
        if name in FIXED:
            raise ValueError(f"parameters.{name}: cannot be set here")
    xargs = parameters.get("vllm_xargs")  # which `read` checks
    if isinstance(xargs, Mapping) and KV_TRANSFER_PARAMS in xargs:
        raise ValueError(f"parameters.vllm_xargs.{KV_TRANSFER_PARAMS}: cannot be set here")
    path, prompt_fields, prompt = _input(message)
    return EngineRequest(
        path=path,
        body={
            **parameters,
            **_settings(request),
            **prompt_fields,
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
    if request.num_sequences > 1:
        settings["n"] = request.num_sequences
    if request.priority:  # the client's own; engines that do not order by priority may refuse any other than 0
        settings["priority"] = request.priority
    return settings


def _input(message: scheduler_pb2.GenerateRequest) -> tuple[bytes, dict[str, Any], bytes]:
    """Return the path, the input's part of the body, and the prompt as text."""
    kind = message.WhichOneof("input")
    if kind == "prompt" and message.prompt:
        return COMPLETIONS, {"prompt": message.prompt}, message.prompt.encode()
    if kind == "prompt_token_ids" and message.prompt_token_ids.ids:
        return COMPLETIONS, {"prompt": list(message.prompt_token_ids.ids)}, b""
    if kind == "messages" and message.messages:
        messages: Any = _plain(MessageToDict(message.messages))
        return CHAT, {"messages": messages}, "\n".join(conversation_texts(messages)).encode()
    if kind == "prompts":
        return COMPLETIONS, {"prompt": _prompts(message.prompts)}, "\n".join(message.prompts.texts).encode()
    wanted = "input: is missing: prompt, prompt_token_ids, messages or prompts"
    raise ValueError(wanted if kind is None else f"{kind}: is empty")


def _prompts(prompts: scheduler_pb2.Prompts) -> list[str] | list[list[int]]:
    """Return several prompts, which are texts or token ids."""
    texts, ids = list(prompts.texts), [list(one.ids) for one in prompts.token_ids]
    if texts and ids:
        raise ValueError("prompts: must be texts or token_ids, not both")
    if not texts and not ids:
        raise ValueError("prompts: is empty; give at least one prompt")
    return texts or ids


def _plain(value: Any) -> Any:
    """Turn whole floats into integers: protobuf's JSON has only floats, and engines refuse `"top_k": 3.0`."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


async def stream_answer(  # noqa: PLR0913 - what an engine is sent, and how
    client: HttpClient,
    instance: Instance,
    request: EngineRequest,
    waits_s: tuple[float, float],
    *,
    prompt: PrefilledPrompt | None = None,
    sent: Callable[[float], None] = lambda _: None,
    received: Callable[[bytes], None] = lambda _: None,
    opened: Callable[[Connection], None] = lambda _: None,
) -> AsyncGenerator[StreamChunk]:
    """Send a request to an engine and yield its answer; closing the generator closes the connection.

    `waits_s` are the timeouts of the first piece and of each later one. With a prompt that another engine computed, it
    is a decode leg. `sent` gets the time at which the request had been written, `received` every event, `opened` the
    connection; where a wait for more is interrupted, an empty chunk comes. EngineError and TimeoutError where the
    engine fails, ValueError where it refuses the request.
    """
    first_s, idle_s = waits_s
    origin = origin_of(instance.engine_url)
    body = request.body_for(instance.models)
    if prompt is not None:
        body = decode_body(body, prompt)
    headers = with_rank(request.headers(), instance.data_parallel_rank)
    head = request_head(b"POST", origin, request.path, headers, len(body))
    connection = await client.send(origin, head, body, first_s)
    try:
        sent(connection.sent_s)
        opened(connection)
        if connection.status != OK:
            raise error_of(connection.status, await connection.read_all(idle_s, MAX_ERROR_BYTES))
        async for event in _events(connection, first_s, idle_s):
            if event == INTERRUPTED:
                yield StreamChunk()
                continue
            chunk = _chunk(event)
            received(event)
            if chunk is not None:
                yield chunk
    finally:
        connection.release()


def error_of(status: int, body: bytes) -> Exception:
    """Read the error that an engine returns."""
    try:
        reply = reply_json(body)
        error = reply.get("error", reply)
        text = str(error.get("message", "")) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        text = body[:200].decode("utf-8", "replace")
    message = f"the engine returned {status}: {text[:300]}"
    if 400 <= status < SERVER_ERROR and status not in RETRIABLE:  # it blames the request
        return ValueError(message)
    return ReportedError(message) if status == SERVER_ERROR else EngineError(message)


async def _events(connection: Connection, first_s: float, idle_s: float) -> AsyncIterator[bytes]:
    """Yield the data of a stream's events, up to [DONE]."""
    reader = StreamReader()
    wait_s = first_s
    while True:
        try:
            piece = await connection.read(wait_s)
        except ReadInterruptedError:
            yield INTERRUPTED
            continue
        if not piece:
            break
        wait_s = idle_s
        for data in data_of(reader.feed(piece)):
            if data == DONE:
                while await connection.read(idle_s):  # to its end, so that the connection can be used again
                    pass
                return
            yield data
    raise EngineError("the stream ended before its [DONE]")


def _chunk(event: bytes) -> StreamChunk | None:
    """Read one event; None where it contains nothing of the answer."""
    try:
        data = reply_json(event)
        if "error" in data:
            error = data["error"]
            raise ReportedError(
                f"the engine reported: {error.get('message', error) if isinstance(error, dict) else error}"[:300]
            )
        choices, usage = data.get("choices") or [], data.get("usage")
        if not choices:
            return StreamChunk(usage=usage) if usage else None
        choice = choices[0]
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        if choice.get("finish_reason") == ERROR and not text:
            raise ReportedError("the engine ended the answer with an error")
        return StreamChunk(
            text=text or "",
            token_ids=tuple(choice.get("token_ids") or ()),
            finish_reason=choice.get("finish_reason") or "",
            index=max(0, int(choice.get("index") or 0)),
            usage=usage,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise EngineError("an event is invalid") from None
