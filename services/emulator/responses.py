"""/v1/responses of vLLM 0.32: replies whole or as typed events, kept for later requests, and in the background."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from services.emulator.answers import LENGTH
from services.emulator.driver import Driver
from services.emulator.errors import VllmError, bad_value
from services.emulator.jobs import Job
from services.emulator.openai import ParsedRequest, Served, request_from
from services.emulator.ranks import RankDrivers
from services.emulator.request_bodies import CHAT, RESPONSE
from services.http.responses_body import messages_of_response

MAX_STORED = 4096
# Fields that a chat has, too.
SHARED = ("model", "stream", "stop", "temperature", "ignore_eos", "priority", "vllm_xargs", "seed", "include_stop_str_in_output")  # fmt: skip  # noqa: E501
COMPLETED, INCOMPLETE, CANCELLED, QUEUED, FAILED = "completed", "incomplete", "cancelled", "queued", "failed"


@dataclass(slots=True)
class StoredResponse:
    """A response, and the conversation up to its end."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    job: Job | None = None  # in the background


class ResponseStore:
    """The last responses by id."""

    def __init__(self) -> None:
        """Keep none yet."""
        self._stored: dict[str, StoredResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self, data: Any, headers: Mapping[str, str], served: Served) -> ParsedRequest:
        """Check a request, and make its answer."""
        if not isinstance(data, dict):
            raise bad_value("Input should be a valid dictionary")
        try:
            messages, _ = messages_of_response(data)
        except ValueError as error:
            raise bad_value(str(error), str(error).partition(":")[0]) from None
        earlier = data.get("previous_response_id")
        if earlier is not None:
            messages = [*self.find(str(earlier)).messages, *messages]
        chat = {name: data[name] for name in SHARED if name in data}
        chat |= {"messages": messages, "max_completion_tokens": data.get("max_output_tokens")}
        response_id = data.get("request_id") or f"resp_{uuid4().hex}"
        request = request_from(CHAT, chat, headers, str(response_id), served)
        extra = {**data, "messages": messages}
        return replace(request, kind=RESPONSE, engine_name=f"{response_id}_0", extra=extra)

    def find(self, response_id: str) -> StoredResponse:
        """Return a response."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise VllmError(404, f"Response with id '{response_id}' not found.", kind="NotFoundError")
        return stored

    def keep(self, request: ParsedRequest, body: dict[str, Any], job: Job | None = None) -> None:
        """Keep a response, unless its request asks for the opposite."""
        if request.extra.get("store") is False:
            return
        text = request.answer.text(0, request.answer.num_tokens)
        messages = [*request.extra["messages"], {"role": "assistant", "content": text}]
        if len(self._stored) >= MAX_STORED:
            del self._stored[next(iter(self._stored))]
        self._stored[request.request_id] = StoredResponse(body, messages, job)

    def begin(self, driver: Driver | RankDrivers, request: ParsedRequest) -> dict[str, Any]:
        """Begin a response in the background; return what it is now."""
        reply = ResponsesReply(request, int(time.time()), self)
        job = driver.submit(request)
        queued = reply.body(QUEUED, [])
        self.keep(request, queued, job)
        task = asyncio.create_task(self._finish(driver, job, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return queued

    async def _finish(self, driver: Driver | RankDrivers, job: Job, reply: ResponsesReply) -> None:
        num_tokens = job.request.answer.num_tokens
        try:
            await job.more(lambda: job.num_ready < num_tokens)
            stored = self._stored.get(job.request.request_id)
            if stored is not None and job.num_ready == num_tokens:
                stored.body = reply.finished(job.cached_tokens)
        except VllmError:
            self.find(job.request.request_id).body["status"] = FAILED
        finally:
            driver.abort(job)

    def cancel(self, response_id: str, driver: Driver | RankDrivers) -> dict[str, Any]:
        """End a response that is under way in the background."""
        stored = self.find(response_id)
        if stored.job is None or stored.body["status"] != QUEUED:
            raise bad_value("Cannot cancel a synchronous response.", "response_id")
        stored.body = {**stored.body, "status": CANCELLED}
        driver.abort(stored.job)
        return stored.body


class ResponsesReply:
    """Writes one response."""

    def __init__(self, request: ParsedRequest, created_s: int, store: ResponseStore) -> None:
        """Start with the first event."""
        self._request, self._answer, self._store = request, request.answer, store
        self._created_s = created_s
        self._sequence = 0
        self._item_id = f"msg_{uuid4().hex[:16]}"

    def at_once(self) -> bytes:
        """Return the events that come before the engine begins."""
        body = self.body("in_progress", [])
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def first(self) -> bytes:
        """Return the events before the first token."""
        item = {"id": self._item_id, "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added", content_index=0, item_id=self._item_id, output_index=0, part=part
        )

    def events(self, start: int, end: int, cached_tokens: int = 0) -> bytes:
        """Return the events of tokens from `start` to before `end`; after the last one, also the stream's end."""
        where = {"content_index": 0, "item_id": self._item_id, "output_index": 0}
        texts = (self._answer.text(place, place + 1) for place in range(start, end))
        events = [self._event("response.output_text.delta", **where, delta=text, logprobs=[]) for text in texts]
        if end >= self._answer.num_tokens:
            text = self._answer.text(0, self._answer.num_tokens)
            (item,) = self._output()
            events += (
                self._event("response.output_text.done", **where, text=text, logprobs=[]),
                self._event("response.content_part.done", **where, part=item["content"][0]),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event("response.completed", response=self.finished(cached_tokens)),
            )
        return b"".join(events)

    def whole(self, cached_tokens: int, _: dict[str, Any] | None = None, /) -> bytes:
        """Return the response in one piece."""
        return _json(self.finished(cached_tokens))

    def finished(self, cached_tokens: int) -> dict[str, Any]:
        """Return the response at its end, and keep it."""
        status = INCOMPLETE if self._answer.finish_reason == LENGTH else COMPLETED
        body = self.body(status, self._output(), cached_tokens)
        self._store.keep(self._request, body)
        return body

    def _output(self) -> list[dict[str, Any]]:
        text = self._answer.text(0, self._answer.num_tokens)
        content: list[dict[str, Any]] = [{"annotations": [], "text": text, "type": "output_text", "logprobs": None}]
        return [{"id": self._item_id, "content": content, "role": "assistant", "status": COMPLETED, "type": "message"}]

    def body(self, status: str, output: list[dict[str, Any]], cached_tokens: int = 0) -> dict[str, Any]:
        """Write the response as it is now."""
        request, extra = self._request, self._request.extra
        num_prompt, num_tokens = len(request.prompt), self._answer.num_tokens
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": num_prompt + num_tokens,
        }
        return {
            "id": request.request_id, "created_at": self._created_s,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "instructions": extra.get("instructions"), "metadata": extra.get("metadata"), "model": request.model,
            "object": "response", "output": output, "parallel_tool_calls": True,
            "temperature": extra.get("temperature") or 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0,
            "background": bool(extra.get("background")), "max_output_tokens": request.max_tokens,
            "max_tool_calls": None, "previous_response_id": extra.get("previous_response_id"), "prompt": None,
            "reasoning": None, "service_tier": "auto", "status": status, "text": None, "top_logprobs": None,
            "truncation": "disabled", "usage": usage if output else None, "user": extra.get("user"),
        }  # fmt: skip

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        data = _json({**fields, "sequence_number": number, "type": name})
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
