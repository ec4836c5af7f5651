"""The HTTP proxy before a mirrored engine: bytes pass unchanged, and completions are observed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from prometheus_client import CollectorRegistry

from predictor.mirror.events import RequestArrived
from services.http.application import JSON, REQUEST_ID, Application, Call, Endpoint, Scope, while_client_stays
from services.http.client import HttpClient
from services.http.connection import ConnectError, Connection
from services.http.endpoints import ENDPOINTS, UNPLACED, EngineEndpoint
from services.http.errors import ApiError
from services.http.headers import Headers, request_head
from services.http.json_body import reply_json
from services.http.json_fields import LONGEST_NAME
from services.http.origin import Origin
from services.http.prompt_tokens import PromptSizes
from services.http.proxying import is_event_stream, without_hops
from services.http.reply_format import ReplyFormat
from services.http.sse import StreamReader, ending_of
from services.logs import log_event
from services.predictor_server.settings import MirrorSettings
from services.predictor_server.stream_observer import EventSink, ProxiedRequest, StreamObserver, parse_request

log = logging.getLogger(__name__)

MAX_OTHERS = 256  # concurrent requests that are not mirrored: health, metrics, lists of models
MAX_COUNTING = 32  # prompts that the engine counts at a time
COUNT_TIMEOUT_S = 5.0
BYTES_PER_TOKEN = 4.0
OWN_HEADERS = frozenset((b"date", b"server"))  # of an engine's reply; the proxy's server sets its own
NO_ENCODING = frozenset((b"accept-encoding",))  # a reply that is observed must not be compressed


class Proxy(Application):
    """Forwards every request to one engine, and reports completions, the only admitted calls, to a mirror."""

    name = "sidecar"

    def __init__(
        self,
        settings: MirrorSettings,
        origin: Origin,
        mirror: EventSink,
        count_reply: Callable[[str, int], None],
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Forward to an engine; `count_reply` is called with the path and the status of every reply."""
        super().__init__(max_concurrency=settings.max_concurrency, limits=settings.http, registry=registry)
        self._settings = settings
        self._origin = origin
        self._mirror = mirror
        self._count_reply = count_reply
        self._client = HttpClient()
        self._sizes = PromptSizes(BYTES_PER_TOKEN)
        self._counts_prompts = settings.counts_prompts
        self._num_others = 0
        self._num_names = 0
        self._counting: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Close the idle connections."""
        for task in self._counting:
            task.cancel()
        self._client.close()

    def request_id_of(self, call: Call) -> str:  # noqa: ARG002
        """Add no request id to replies: the engine's reply has its own."""
        return ""

    def endpoint_of(self, call: Call) -> Endpoint:
        """Observe completions, and forward everything else."""
        return self._complete if _is_mirrored(call) else self._forward

    def on_end(self, call: Call, path: str, status: int) -> None:  # noqa: ARG002
        """Count a reply."""
        self._count_reply(call.scope["path"] if _is_mirrored(call) else "other", status)

    # Completions.

    async def _complete(self, call: Call) -> None:
        with self.admitted():
            body = await self.body_of(call, self._settings.max_body_bytes)
            endpoint = ENDPOINTS[call.scope["path"]]
            request = parse_request(endpoint, body, call.header(b"content-type") or b"")
            await while_client_stays(self._observe(call, body, endpoint, request), call.receive)

    async def _observe(self, call: Call, body: bytes, endpoint: EngineEndpoint, request: ProxiedRequest | None) -> None:
        """Report the arrival, forward the request, and report its end, complete or not."""
        headers = without_hops(call.headers, NO_ENCODING)
        observer = (
            self._report_arrival(request, call.headers, endpoint.format)
            if request is not None
            else StreamObserver(self._mirror, names=(), form=endpoint.format)
        )
        try:
            connection = await self._send(b"POST", call.scope, headers, body)
            try:
                if connection.status == 200 and is_event_stream(connection.headers):
                    await self._pass_stream(connection, call, observer)
                else:
                    await self._pass_whole(connection, call, observer)
            finally:
                connection.release()
        finally:
            observer.on_end()
        if request is not None and observer.prompt_tokens:
            self._sizes.learn(request.body, observer.prompt_tokens)

    def _new_name(self, request_id: str) -> str:
        """Return a unique name for a request in events."""
        self._num_names += 1
        return f"{request_id}-{self._num_names:08x}"

    def _report_arrival(self, request: ProxiedRequest, headers: Headers, form: ReplyFormat) -> StreamObserver:
        """Report a request to the mirror, and let the engine count its prompt, if it can."""
        body = request.body
        header = next((value for name, value in headers if name == REQUEST_ID), b"")
        request_id = header.decode("latin-1")[:LONGEST_NAME] or uuid4().hex
        names = tuple(self._new_name(request_id) for _ in range(request.num_requests))
        total = self._sizes.tokens(body)
        sizes = body.prompt_sizes or (1,) * request.num_prompts
        for index, name in enumerate(names):
            prompt, sequence = divmod(index, request.num_samples)
            self._mirror.record(
                RequestArrived(
                    name=name,
                    request_id=request_id,
                    prompt_tokens=max(1, total * sizes[prompt] // sum(sizes)),
                    max_tokens=body.max_tokens,
                    known_tokens=request.known_tokens,
                    tag=request.tag,
                    priority=body.priority or 0,
                    streamed=body.stream,
                    leg=request.leg,
                    token_ids=body.token_ids if self._mirror.reads_tokens and request.is_plain else (),
                    prompt=prompt,
                    sequence=sequence,
                    model=body.model,
                )
            )
        observer = StreamObserver(self._mirror, names, form)
        if self._counts_prompts and request.to_tokenize is not None and len(self._counting) < MAX_COUNTING:
            reads_tokens = self._mirror.reads_tokens and request.is_plain
            counting = asyncio.create_task(self._count_prompt(request.to_tokenize, headers, observer, reads_tokens))
            self._counting.add(counting)
            counting.add_done_callback(self._counting.discard)
        return observer

    async def _count_prompt(
        self, to_tokenize: Any, headers: Headers, observer: StreamObserver, reads_tokens: bool
    ) -> None:
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
            data = reply_json(reply) if connection.status == 200 else {}
            count = data.get("count")
        except (ConnectionError, TimeoutError, ValueError, AttributeError):
            return
        if type(count) is int and count > 0:
            observer.on_prompt_counted(count, _token_ids(data) if reads_tokens else ())

    async def _pass_stream(self, connection: Connection, call: Call, observer: StreamObserver) -> None:
        """Pass a stream on event by event, and report its tokens."""
        reader = StreamReader(observer.form)
        await call.start(connection.status, _reply_headers(connection))
        try:
            while not connection.drained():
                events = reader.feed(await connection.read(self._settings.idle_s))
                if events:
                    observer.on_events(events)
                    await call.write(events)
        except (ConnectionError, TimeoutError) as error:
            raise _engine_error(error) from None
        rest = reader.rest()
        ending = reader.ending()
        observer.on_complete(max(ending.output_tokens, observer.num_tokens), ending.prompt_tokens)
        await call.end(rest)

    async def _pass_whole(self, connection: Connection, call: Call, observer: StreamObserver) -> None:
        """Pass a reply on that is in one piece."""
        try:
            body = await connection.read_all(self._settings.idle_s, self._settings.max_answer_bytes)
        except (ConnectionError, TimeoutError) as error:
            raise _engine_error(error) from None
        if connection.status == 200:
            ending = ending_of(body, observer.form)
            observer.on_complete(ending.output_tokens or observer.least_tokens, ending.prompt_tokens)
        headers = [pair for pair in _reply_headers(connection) if pair[0] != b"content-length"]
        await call.reply(connection.status, headers, body)

    # Other requests.

    async def _forward(self, call: Call) -> None:
        if self._num_others >= MAX_OTHERS:
            raise ApiError(429, f"{self._num_others} requests are under way, which is the limit")
        self._num_others += 1
        try:
            body = await self.body_of(call, self._settings.max_body_bytes)
            await while_client_stays(self._pass(call, body), call.receive)
        finally:
            self._num_others -= 1

    async def _pass(self, call: Call, body: bytes) -> None:
        method = call.scope["method"]
        # the reply to a HEAD has a length and no body, which no parser accepts; the server drops the body of a GET
        sent_as = b"GET" if method == "HEAD" else method.encode()
        connection = await self._send(sent_as, call.scope, without_hops(call.headers), body)
        try:
            await call.start(connection.status, _reply_headers(connection))
            while not connection.drained():
                if piece := await connection.read(self._settings.idle_s):
                    await call.write(piece)
            await call.end()
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


def _is_mirrored(call: Call) -> bool:
    endpoint = ENDPOINTS.get(call.scope["path"])
    return endpoint is not None and endpoint.kind != UNPLACED and call.scope["method"] == "POST"


def _engine_error(error: Exception) -> ApiError:
    """Return the error for a client whose request the engine did not serve."""
    if isinstance(error, TimeoutError):
        return ApiError(504, f"the engine did not reply in time: {error}")
    if isinstance(error, ConnectError):
        return ApiError(503, f"the engine cannot be reached: {error}")
    return ApiError(502, f"the engine failed: {error}")


def _token_ids(data: Any) -> tuple[int, ...]:
    """Return the tokens of a reply to /tokenize; none where it has something else."""
    tokens = data.get("tokens")
    return tuple(tokens) if isinstance(tokens, list) and all(type(one) is int for one in tokens) else ()


def _reply_headers(connection: Connection) -> Headers:
    """Return the engine's headers for the client, with the body's length."""
    length = [pair for pair in connection.headers if pair[0] == b"content-length"]
    return [*without_hops(connection.headers, OWN_HEADERS), *length]
