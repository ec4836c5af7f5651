"""The HTTP proxy before a mirrored engine: bytes pass unchanged, and completions are observed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from predictor.mirror.events import RequestArrived
from services.http.application import REQUEST_ID, ClientLeftError, Receive, Send, receive_body, while_client_stays
from services.http.client import ConnectError, Connection, Headers, HttpClient, Origin, request_head
from services.http.errors import ApiError
from services.http.openai_body import LONGEST_NAME
from services.http.prompt_tokens import PromptSizes
from services.http.proxying import without_hops
from services.http.sse import StreamReader, ending_of
from services.logs import log_event
from services.predictor_server.settings import MirrorSettings
from services.predictor_server.stream_observer import EventSink, ProxiedRequest, StreamObserver, parse_request

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]

MIRRORED_PATHS = {"/v1/completions": False, "/v1/chat/completions": True}  # and whether they are chats
MAX_OTHERS = 256  # concurrent requests that are not mirrored: health, metrics, lists of models
MAX_COUNTING = 32  # prompts that the engine counts at a time
COUNT_TIMEOUT_S = 5.0
BYTES_PER_TOKEN = 4.0
CLIENT_LEFT = 499  # nginx's status for it, in metrics only
OWN_HEADERS = frozenset((b"date", b"server"))  # of an engine's reply; the proxy's server sets its own
NO_ENCODING = frozenset((b"accept-encoding",))  # a reply that is observed must not be compressed
JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(slots=True)
class ProxiedReply:
    """A reply to a client, as far as it has been sent."""

    send: Send
    status: int = 0
    ended: bool = False

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes, *, last: bool = False) -> None:
        """Send a piece of the body."""
        self.ended = last
        await self.send({"type": "http.response.body", "body": piece, "more_body": not last})

    async def fail(self, error: ApiError, *, as_event: bool) -> None:
        """Send an error: as the reply, or as the last event of a stream that has started."""
        if self.status == 0:
            body = error.body()
            await self.start(error.status, [*error.headers(), (b"content-length", b"%d" % len(body))])
            await self.write(body, last=True)
        elif not self.ended and as_event:
            await self.write(error.event(), last=True)


class Proxy:
    """An ASGI application that forwards every request to one engine, and reports completions to a mirror."""

    def __init__(
        self, settings: MirrorSettings, origin: Origin, mirror: EventSink, count_reply: Callable[[str, int], None]
    ) -> None:
        """Forward to an engine; `count_reply` is called with the path and the status of every reply."""
        self.draining = False
        self._settings = settings
        self._origin = origin
        self._mirror = mirror
        self._count_reply = count_reply
        self._client = HttpClient()
        self._sizes = PromptSizes(BYTES_PER_TOKEN)
        self._counts_prompts = settings.counts_prompts
        self._completions: set[asyncio.Task[Any]] = set()
        self._num_others = 0
        self._counting: set[asyncio.Task[None]] = set()
        self._cut_off = False

    def __len__(self) -> int:
        """Return the number of completions under way."""
        return len(self._completions)

    def cut_off(self) -> None:
        """Cancel all completions under way."""
        self._cut_off = True
        for task in self._completions:
            task.cancel()

    def close(self) -> None:
        """Close the idle connections."""
        for task in self._counting:
            task.cancel()
        self._client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request; an error becomes a reply."""
        if scope["type"] != "http":
            return
        reply = ProxiedReply(send)
        path = scope["path"]
        is_mirrored = path in MIRRORED_PATHS and scope["method"] == "POST"
        status = 0
        try:
            await (self._complete if is_mirrored else self._forward)(scope, receive, reply)
        except ApiError as error:
            await reply.fail(error, as_event=is_mirrored)
        except asyncio.CancelledError:
            if not self._cut_off:
                raise
            cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
            await reply.fail(ApiError(503, "the sidecar is shutting down"), as_event=is_mirrored)
        except ClientLeftError:
            status = CLIENT_LEFT
        self._count_reply(path if is_mirrored else "other", status or reply.status)

    # Completions.

    async def _complete(self, scope: Scope, receive: Receive, reply: ProxiedReply) -> None:
        if self.draining:
            raise ApiError(503, "the sidecar is shutting down")
        if len(self._completions) >= self._settings.max_concurrency:
            raise ApiError(429, f"{len(self._completions)} completions are under way, which is the limit")
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._completions.add(task)
        try:
            body = await receive_body(scope["headers"], receive, self._settings.max_body_bytes)
            request = parse_request(body, chat=MIRRORED_PATHS[scope["path"]])
            await while_client_stays(self._observe(scope, body, request, reply), receive)
        finally:
            self._completions.discard(task)

    async def _observe(self, scope: Scope, body: bytes, request: ProxiedRequest | None, reply: ProxiedReply) -> None:
        """Report the arrival, forward the request, and report its end, complete or not."""
        headers = without_hops(scope["headers"], NO_ENCODING)
        observer = (
            self._report_arrival(request, scope["headers"])
            if request is not None
            else StreamObserver(self._mirror, names=())
        )
        try:
            connection = await self._send(b"POST", scope, headers, body)
            try:
                if connection.status == 200 and _is_event_stream(connection.headers):
                    await self._pass_stream(connection, reply, observer)
                else:
                    await self._pass_whole(connection, reply, observer)
            finally:
                connection.release()
        finally:
            observer.on_end()
        if request is not None and observer.prompt_tokens:
            self._sizes.learn(request.body, observer.prompt_tokens)

    def _report_arrival(self, request: ProxiedRequest, headers: Headers) -> StreamObserver:
        """Report a request to the mirror, and let the engine count its prompt, if it can."""
        body = request.body
        header = next((value for name, value in headers if name == REQUEST_ID), b"")
        request_id = header.decode("latin-1")[:LONGEST_NAME] or uuid4().hex
        names = tuple(self._mirror.new_name(request_id) for _ in range(request.num_requests))
        prompt_tokens = max(1, self._sizes.tokens(body) // request.num_prompts)
        for name in names:
            self._mirror.record(
                RequestArrived(
                    name=name,
                    request_id=request_id,
                    prompt_tokens=prompt_tokens,
                    max_tokens=body.max_tokens,
                    known_tokens=request.known_tokens,
                    tag=request.tag,
                    priority=body.priority or 0,
                    streamed=body.stream and request.num_requests == 1,
                )
            )
        observer = StreamObserver(self._mirror, names)
        if self._counts_prompts and request.to_tokenize is not None and len(self._counting) < MAX_COUNTING:
            counting = asyncio.create_task(self._count_prompt(request.to_tokenize, headers, observer))
            self._counting.add(counting)
            counting.add_done_callback(self._counting.discard)
        return observer

    async def _count_prompt(self, to_tokenize: Any, headers: Headers, observer: StreamObserver) -> None:
        """Let the engine count a prompt; the estimate stays where it does not."""
        body = json.dumps(to_tokenize).encode()
        authorization = [pair for pair in headers if pair[0] == b"authorization"]
        head = request_head(b"POST", self._origin, b"/tokenize", [*authorization, *JSON], len(body))
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                connection = await self._client.send(self._origin, head, body, COUNT_TIMEOUT_S)
                try:
                    reply = await connection.read_all(COUNT_TIMEOUT_S, self._settings.max_answer_bytes)
                finally:
                    connection.release()
            if connection.status in (404, 405):
                self._counts_prompts = False
                log_event(log, logging.INFO, "prompt lengths are estimated: the engine has no /tokenize")
            count = json.loads(reply)["count"] if connection.status == 200 else None
        except (ConnectionError, TimeoutError, ValueError, KeyError, TypeError):
            return
        if type(count) is int and count > 0:
            observer.on_prompt_counted(count)

    async def _pass_stream(self, connection: Connection, reply: ProxiedReply, observer: StreamObserver) -> None:
        """Pass a stream on event by event, and report its tokens."""
        reader = StreamReader()
        await reply.start(connection.status, _reply_headers(connection))
        try:
            while not connection.drained():
                events = reader.feed(await connection.read(self._settings.idle_s))
                if events:
                    observer.on_events(events)
                    await reply.write(events)
        except (ConnectionError, TimeoutError) as error:
            raise _engine_error(error) from None
        rest = reader.rest()
        ending = reader.ending()
        observer.on_complete(max(ending.output_tokens, observer.num_tokens), ending.prompt_tokens)
        await reply.write(rest, last=True)

    async def _pass_whole(self, connection: Connection, reply: ProxiedReply, observer: StreamObserver) -> None:
        """Pass a reply on that is in one piece."""
        try:
            body = await connection.read_all(self._settings.idle_s, self._settings.max_answer_bytes)
        except (ConnectionError, TimeoutError) as error:
            raise _engine_error(error) from None
        if connection.status == 200:
            ending = ending_of(body)
            observer.on_complete(ending.output_tokens, ending.prompt_tokens)
        headers = [pair for pair in _reply_headers(connection) if pair[0] != b"content-length"]
        await reply.start(connection.status, [*headers, (b"content-length", b"%d" % len(body))])
        await reply.write(body, last=True)

    # Other requests.

    async def _forward(self, scope: Scope, receive: Receive, reply: ProxiedReply) -> None:
        if self._num_others >= MAX_OTHERS:
            raise ApiError(429, f"{self._num_others} requests are under way, which is the limit")
        self._num_others += 1
        try:
            body = await receive_body(scope["headers"], receive, self._settings.max_body_bytes)
            await while_client_stays(self._pass(scope, body, reply), receive)
        finally:
            self._num_others -= 1

    async def _pass(self, scope: Scope, body: bytes, reply: ProxiedReply) -> None:
        method = scope["method"]
        # the reply to a HEAD has a length and no body, which no parser accepts; the server drops the body of a GET
        sent_as = b"GET" if method == "HEAD" else method.encode()
        connection = await self._send(sent_as, scope, without_hops(scope["headers"]), body)
        try:
            await reply.start(connection.status, _reply_headers(connection))
            while not connection.drained():
                if piece := await connection.read(self._settings.idle_s):
                    await reply.write(piece)
            await reply.write(b"", last=True)
        except (ConnectionError, TimeoutError) as error:
            raise _engine_error(error) from None
        finally:
            connection.release()

    async def _send(self, method: bytes, scope: Scope, headers: Headers, body: bytes) -> Connection:
        query: bytes = scope["query_string"]
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        target = path + b"?" + query if query else path
        head = request_head(method, self._origin, target, headers, len(body))
        try:
            return await self._client.send(self._origin, head, body, self._settings.idle_s)
        except (ConnectionError, TimeoutError) as error:
            raise _engine_error(error) from None


def _engine_error(error: Exception) -> ApiError:
    """Return the error for a client whose request the engine did not serve."""
    if isinstance(error, TimeoutError):
        return ApiError(504, f"the engine did not reply in time: {error}")
    if isinstance(error, ConnectError):
        return ApiError(503, f"the engine cannot be reached: {error}")
    return ApiError(502, f"the engine failed: {error}")


def _reply_headers(connection: Connection) -> Headers:
    """Return the engine's headers for the client, with the body's length."""
    length = [pair for pair in connection.headers if pair[0] == b"content-length"]
    return [*without_hops(connection.headers, OWN_HEADERS), *length]


def _is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
