"""The HTTP surface of an emulated engine: an ASGI application with vLLM 0.32's paths."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from services.emulator.connections import connection_of, write_chunk
from services.emulator.driver import Driver
from services.emulator.faults import Faults, faults_from
from services.emulator.jobs import Job
from services.emulator.metrics import Exposition
from services.emulator.openai import CHAT, COMPLETION, LONGEST_ID, Served, ask_from, parsed, prompt_of
from services.emulator.refusals import VllmError, bad_value, unavailable
from services.emulator.replies import CompletionReply, failed
from services.emulator.tokens import VOCABULARY, text_of, token_text
from services.logs import log_event

log = logging.getLogger(__name__)

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

VERSION = "0.32.0+block.emulator"
JSON, EVENTS, METRICS = b"application/json", b"text/event-stream; charset=utf-8", b"text/plain; version=1.0.0"


class LeftError(Exception):
    """The client has left before its request was whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request: where it came from, what it says, and the id by which it goes."""

    scope: Scope
    receive: Receive
    send: Send
    headers: Mapping[str, str]
    request_id: str

    async def answer(
        self, body: bytes, *, status: int = 200, kind: bytes | None = JSON, more: tuple[Header, ...] = ()
    ) -> None:
        """Answer in one piece."""
        headers = [(b"content-length", b"%d" % len(body)), *more]
        await self.start(status, headers, kind)
        await self.send({"type": "http.response.body", "body": body})

    async def start(self, status: int, headers: list[Header], kind: bytes | None) -> None:
        """Begin an answer."""
        every = [(b"x-request-id", self.request_id.encode("latin-1"))]
        if kind is not None:
            every.append((b"content-type", kind))
        await self.send({"type": "http.response.start", "status": status, "headers": [*every, *headers]})


class App:
    """Answers for one engine."""

    def __init__(self, driver: Driver, served: Served, exposition: Exposition, *, most_body_bytes: int) -> None:
        """Stand before an engine; `paths` says what is answered."""
        self.driver = driver
        self._served = served
        self._exposition = exposition
        self._most_body_bytes = most_body_bytes
        self._faults = Faults()
        self._created_s = int(time.time())
        self._driving: asyncio.Task[None] | None = None
        self.paths: dict[str, dict[str, Callable[[Call], Awaitable[None]]]] = {
            "/v1/completions": {"POST": self._complete},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/admin/fault": {"GET": self._show_faults, "POST": self._order_faults},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run along with the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._route(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._driving = asyncio.create_task(self.driver.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._driving.cancel()
        with suppress(asyncio.CancelledError):
            await self._driving
        self.driver.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        call = Call(
            scope=scope,
            receive=receive,
            send=send,
            headers=headers,
            request_id=headers.get("x-request-id", "")[:LONGEST_ID] or secrets.token_hex(16),
        )
        methods = self.paths.get(scope["path"])
        if methods is None:
            await call.answer(b'{"detail":"Not Found"}', status=404)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method not in methods:
            allowed = (b"allow", ", ".join(methods).encode())
            await call.answer(b'{"detail":"Method Not Allowed"}', status=405, more=(allowed,))
            return
        try:
            await methods[method](call)
        except VllmError as error:
            # what is left of a body that is too large is not read
            more = ((b"connection", b"close"),) if error.status == 413 else ()
            await call.answer(error.body(), status=error.status, more=more)
        except LeftError:
            pass

    async def _complete(self, call: Call) -> None:
        await self._generate(call, COMPLETION)

    async def _chat(self, call: Call) -> None:
        await self._generate(call, CHAT)

    async def _generate(self, call: Call, kind: str) -> None:
        if self._faults.refuse:
            raise unavailable("The engine refuses requests, as it was told to.")
        data = await self._json(call)
        job = self.driver.submit(ask_from(kind, data, call.headers, call.request_id, self._served))
        leaving = asyncio.create_task(self._abort_when_gone(call, job))
        try:
            if job.ask.stream:
                await self._stream(call, job)
            else:
                await self._answer_whole(call, job)
        finally:
            leaving.cancel()
            self.driver.abort(job)

    async def _stream(self, call: Call, job: Job) -> None:
        reply, connection = CompletionReply(job.ask, int(time.time())), connection_of(call.scope)
        num_tokens = job.ask.answer.num_tokens

        def push() -> bool:
            """Send events that are neither the first nor the last, without waking this task."""
            num_ready = job.num_ready
            if num_ready >= num_tokens or not write_chunk(connection, reply.events(job.num_sent, num_ready)):
                return False
            job.num_sent = num_ready
            return True

        await call.start(200, [], EVENTS)  # as vLLM does, before the first token
        try:
            while job.num_sent < num_tokens:
                if not await job.more(push if job.num_sent else None):  # the client left
                    return
                body = reply.events(job.num_sent, job.num_ready, job.cached_tokens)
                if job.num_sent == 0:
                    body = reply.first() + body
                job.num_sent = job.num_ready
                await call.send({"type": "http.response.body", "body": body, "more_body": job.num_sent < num_tokens})
        except VllmError as error:
            await call.send({"type": "http.response.body", "body": failed(error)})

    async def _answer_whole(self, call: Call, job: Job) -> None:
        num_tokens = job.ask.answer.num_tokens
        await job.more(lambda: job.num_ready < num_tokens)
        if job.num_ready == num_tokens:  # else the client left
            await call.answer(CompletionReply(job.ask, int(time.time())).whole(job.cached_tokens))

    async def _abort_when_gone(self, call: Call, job: Job) -> None:
        """Wait until the client leaves, or all has been said."""
        while (await call.receive())["type"] != "http.disconnect":
            pass
        self.driver.abort(job)

    async def _models(self, call: Call) -> None:
        card = {
            "id": self._served.model, "object": "model", "created": self._created_s, "owned_by": "vllm",
            "root": self._served.model, "parent": None, "max_model_len": self._served.max_model_len, "permission": [],
        }  # fmt: skip
        await call.answer(_json({"object": "list", "data": [card]}))

    async def _health(self, call: Call) -> None:
        is_well = self.driver.failure is None and not self._faults.refuse
        await call.answer(b"", status=200 if is_well else 503, kind=None)

    async def _version(self, call: Call) -> None:
        await call.answer(_json({"version": VERSION}))

    async def _load(self, call: Call) -> None:
        await call.answer(_json({"server_load": self.driver.num_jobs}))

    async def _metrics(self, call: Call) -> None:
        await call.answer(self._exposition.text(self.driver.gauges()), kind=METRICS)

    async def _tokenize(self, call: Call) -> None:
        ids, wants_texts = prompt_of(await self._json(call))
        texts = [token_text(token) for token in ids] if wants_texts else None
        limit = self._served.max_model_len
        await call.answer(_json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}))

    async def _detokenize(self, call: Call) -> None:
        data = await self._json(call)
        ids = data.get("tokens") if isinstance(data, dict) else None
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < VOCABULARY for token in ids):
            raise bad_value("tokens must be a list of token ids.", "tokens")
        await call.answer(_json({"prompt": text_of(ids)}))

    async def _show_faults(self, call: Call) -> None:
        _refuse_strangers(call)
        await call.answer(_json(asdict(self._faults)))

    async def _order_faults(self, call: Call) -> None:
        _refuse_strangers(call)
        try:
            self._faults = faults_from(await self._json(call))
        except VllmError:
            raise
        except ValueError as error:
            raise bad_value(str(error)) from None
        log_event(log, logging.WARNING, "faults ordered", **asdict(self._faults))
        self.driver.pace.slow = self._faults.slow
        self.driver.hang(hangs=self._faults.hang)
        await call.answer(_json(asdict(self._faults)))
        if self._faults.crash:
            os.kill(os.getpid(), signal.SIGKILL)

    async def _json(self, call: Call) -> Any:
        """Read and parse a body that says it is JSON."""
        kind = call.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise VllmError("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
        return parsed(await self._body(call))

    async def _body(self, call: Call) -> bytes:
        said = call.headers.get("content-length", "")
        if said.isdigit() and int(said[:20]) > self._most_body_bytes:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await call.receive()
            if message["type"] == "http.disconnect":
                raise LeftError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> VllmError:
        return VllmError(f"The body is larger than {self._most_body_bytes} bytes.", status=413)


def _refuse_strangers(call: Call) -> None:
    """Let only this machine give orders."""
    client = call.scope.get("client")
    try:
        is_local = client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise VllmError("Faults can be ordered from the engine's own machine only.", status=403)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
