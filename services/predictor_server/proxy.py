"""The way to an engine that shows nothing: its HTTP, passed on byte for byte, and noted in passing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from predictor.mirror.in_flight_request import Arrival
from services.http.application import REQUEST_ID, ClientLeftError, Receive, Send, receive_body, while_client_stays
from services.http.client import ConnectError, Connection, Headers, HttpClient, Origin, request_head
from services.http.errors import ApiError
from services.http.openai_body import LONGEST_NAME
from services.http.prompt_tokens import PromptSizes
from services.http.proxying import without_hops
from services.http.sse import StreamReader, ending_of
from services.logs import log_event
from services.predictor_server.mirror import MirroredEngine
from services.predictor_server.proxied_request import ProxiedRequest, proxied_request_from
from services.predictor_server.settings import MirrorSettings
from services.predictor_server.stream_observer import StreamObserver

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]

MIRRORED = {"/v1/completions": False, "/v1/chat/completions": True}  # and whether they are chats
MOST_OTHERS = 256  # requests under way that are not mirrored: health, metrics, lists of models
MOST_COUNTED = 32  # prompts that are being counted
COUNT_S = 5.0
BYTES_PER_TOKEN = 4.0
CLIENT_LEFT = 499  # nginx's status for it, in metrics only
OURS = frozenset((b"date", b"server"))  # of an engine's reply
NO_ENCODING = frozenset((b"accept-encoding",))  # what is mirrored must be readable
JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(slots=True)
class ProxiedReply:
    """What has been told to the client so far."""

    send: Send
    status: int = 0
    ended: bool = False

    async def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer."""
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, piece: bytes, *, last: bool = False) -> None:
        """Send more of it."""
        self.ended = last
        await self.send({"type": "http.response.body", "body": piece, "more_body": not last})

    async def refuse(self, refused: ApiError, *, as_event: bool) -> None:
        """Say what went wrong: as the answer, or as the last event of a stream; any other answer just ends."""
        if self.status == 0:
            body = refused.body()
            await self.begin(refused.status, [*refused.headers(), (b"content-length", b"%d" % len(body))])
            await self.go_on(body, last=True)
        elif not self.ended and as_event:
            await self.go_on(refused.event(), last=True)


class Proxy:
    """An ASGI application: everything goes to one engine; completions are mirrored."""

    def __init__(
        self, settings: MirrorSettings, origin: Origin, mirror: MirroredEngine, counted: Callable[[str, int], None]
    ) -> None:
        """Stand before an engine; `counted` hears of every answer's path and status."""
        self.draining = False
        self._settings = settings
        self._origin = origin
        self._mirror = mirror
        self._counted = counted
        self._client = HttpClient()
        self._sizes = PromptSizes(BYTES_PER_TOKEN)
        self._counts_prompts = settings.counts_prompts
        self._under_way: set[asyncio.Task[Any]] = set()
        self._num_others = 0
        self._counting: set[asyncio.Task[None]] = set()
        self._cut_off = False

    def __len__(self) -> int:
        """How many completions are under way."""
        return len(self._under_way)

    def cut_off(self) -> None:
        """End all that is under way."""
        self._cut_off = True
        for task in self._under_way:
            task.cancel()

    def close(self) -> None:
        """Close the connections that are kept."""
        for task in self._counting:
            task.cancel()
        self._client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on; what goes wrong is an answer too."""
        if scope["type"] != "http":
            return
        reply = ProxiedReply(send)
        path = scope["path"]
        mirrored = path in MIRRORED and scope["method"] == "POST"
        status = 0
        try:
            await (self._complete if mirrored else self._pass)(scope, receive, reply)
        except ApiError as refused:
            await reply.refuse(refused, as_event=mirrored)
        except asyncio.CancelledError:
            if not self._cut_off:
                raise
            cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
            await reply.refuse(ApiError(503, "the sidecar is going away"), as_event=mirrored)
        except ClientLeftError:
            status = CLIENT_LEFT
        self._counted(path if mirrored else "other", status or reply.status)

    # What is mirrored.

    async def _complete(self, scope: Scope, receive: Receive, reply: ProxiedReply) -> None:
        if self.draining:
            raise ApiError(503, "the sidecar is going away")
        if len(self._under_way) >= self._settings.max_concurrency:
            raise ApiError(429, f"{len(self._under_way)} requests are under way, as many as may be")
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._under_way.add(task)
        try:
            body = await receive_body(scope["headers"], receive, self._settings.max_body_bytes)
            asked = proxied_request_from(body, chat=MIRRORED[scope["path"]])
            await while_client_stays(self._see_through(scope, body, asked, reply), receive)
        finally:
            self._under_way.discard(task)

    async def _see_through(self, scope: Scope, body: bytes, asked: ProxiedRequest | None, reply: ProxiedReply) -> None:
        """Note the arrival, pass the request on, and note the end, whichever it is."""
        headers = without_hops(scope["headers"], NO_ENCODING)
        notes = (
            self._announced(asked, scope["headers"])
            if asked is not None
            else StreamObserver(mirror=self._mirror, names=())
        )
        try:
            connection = await self._sent(b"POST", scope, headers, body)
            try:
                if connection.status == 200 and _is_event_stream(connection.headers):
                    await self._stream(connection, reply, notes)
                else:
                    await self._whole(connection, reply, notes)
            finally:
                connection.release()
        finally:
            notes.end()
        if asked is not None and notes.prompt_tokens:
            self._sizes.learn(asked.ask, notes.prompt_tokens)

    def _announced(self, asked: ProxiedRequest, headers: Headers) -> StreamObserver:
        """Tell the mirror of a request; have its prompt counted, unless that is known."""
        ask = asked.ask
        told = next((value for name, value in headers if name == REQUEST_ID), b"").decode("latin-1")[:LONGEST_NAME]
        arrival = Arrival(
            request_id=told or uuid4().hex,
            prompt_tokens=max(1, self._sizes.tokens(ask) // asked.num_prompts),
            max_tokens=ask.max_tokens,
            known_tokens=asked.known_tokens,
            tag=asked.tag,
            priority=ask.priority or 0,
            streamed=ask.stream and asked.num_requests == 1,
        )
        notes = StreamObserver(
            mirror=self._mirror, names=tuple(self._mirror.arrived(arrival) for _ in range(asked.num_requests))
        )
        if self._counts_prompts and asked.to_tokenize is not None and len(self._counting) < MOST_COUNTED:
            counting = asyncio.create_task(self._count(asked.to_tokenize, headers, notes))
            self._counting.add(counting)
            counting.add_done_callback(self._counting.discard)
        return notes

    async def _count(self, question: Any, headers: Headers, notes: StreamObserver) -> None:
        """Have the engine count a prompt; an estimate will do where it does not."""
        body = json.dumps(question).encode()
        passed = [pair for pair in headers if pair[0] == b"authorization"]
        head = request_head(b"POST", self._origin, b"/tokenize", [*passed, *JSON], len(body))
        try:
            async with asyncio.timeout(COUNT_S):
                connection = await self._client.send(self._origin, head, body, COUNT_S)
                try:
                    answer = await connection.read_all(COUNT_S, self._settings.max_answer_bytes)
                finally:
                    connection.release()
            if connection.status in (404, 405):
                self._counts_prompts = False
                log_event(log, logging.INFO, "prompts are estimated, as the engine does not count them")
            count = json.loads(answer)["count"] if connection.status == 200 else None
        except (ConnectionError, TimeoutError, ValueError, KeyError, TypeError):
            return
        if type(count) is int and count > 0:
            notes.count(count)

    async def _stream(self, connection: Connection, reply: ProxiedReply, notes: StreamObserver) -> None:
        """Pass a stream on as it comes, and note its tokens."""
        reader = StreamReader()
        await reply.begin(connection.status, _headers_back(connection))
        try:
            while not connection.drained():
                events = reader.feed(await connection.read(self._settings.idle_s))
                if events:
                    notes.tokens(events)
                    await reply.go_on(events)
        except (ConnectionError, TimeoutError) as error:
            raise _unanswered(error) from None
        rest = reader.rest()
        ending = reader.ending()
        notes.told(max(ending.output_tokens, notes.count_so_far), ending.prompt_tokens)
        await reply.go_on(rest, last=True)

    async def _whole(self, connection: Connection, reply: ProxiedReply, notes: StreamObserver) -> None:
        """Pass an answer on that is in one piece."""
        try:
            body = await connection.read_all(self._settings.idle_s, self._settings.max_answer_bytes)
        except (ConnectionError, TimeoutError) as error:
            raise _unanswered(error) from None
        if connection.status == 200:
            ending = ending_of(body)
            notes.told(ending.output_tokens, ending.prompt_tokens)
        headers = [pair for pair in _headers_back(connection) if pair[0] != b"content-length"]
        await reply.begin(connection.status, [*headers, (b"content-length", b"%d" % len(body))])
        await reply.go_on(body, last=True)

    # What is only passed on.

    async def _pass(self, scope: Scope, receive: Receive, reply: ProxiedReply) -> None:
        if self._num_others >= MOST_OTHERS:
            raise ApiError(429, f"{self._num_others} requests are under way, as many as may be")
        self._num_others += 1
        try:
            body = await receive_body(scope["headers"], receive, self._settings.max_body_bytes)
            await while_client_stays(self._passed(scope, body, reply), receive)
        finally:
            self._num_others -= 1

    async def _passed(self, scope: Scope, body: bytes, reply: ProxiedReply) -> None:
        method = scope["method"]
        # the answer to a HEAD has a length and no body, which no parser knows; the server leaves the body out
        asked_as = b"GET" if method == "HEAD" else method.encode()
        connection = await self._sent(asked_as, scope, without_hops(scope["headers"]), body)
        try:
            await reply.begin(connection.status, _headers_back(connection))
            while not connection.drained():
                if piece := await connection.read(self._settings.idle_s):
                    await reply.go_on(piece)
            await reply.go_on(b"", last=True)
        except (ConnectionError, TimeoutError) as error:
            raise _unanswered(error) from None
        finally:
            connection.release()

    async def _sent(self, method: bytes, scope: Scope, headers: Headers, body: bytes) -> Connection:
        query: bytes = scope["query_string"]
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        target = path + b"?" + query if query else path
        head = request_head(method, self._origin, target, headers, len(body))
        try:
            return await self._client.send(self._origin, head, body, self._settings.idle_s)
        except (ConnectionError, TimeoutError) as error:
            raise _unanswered(error) from None


def _unanswered(error: Exception) -> ApiError:
    """Put into words that the engine did not answer."""
    if isinstance(error, TimeoutError):
        return ApiError(504, f"the engine is too late: {error}")
    status = 503 if isinstance(error, ConnectError) else 502
    return ApiError(
        status, f"the engine cannot be reached: {error}" if status == 503 else f"the engine failed: {error}"
    )


def _headers_back(connection: Connection) -> Headers:
    """Pass an engine's headers on, its answer's length too."""
    length = [pair for pair in connection.headers if pair[0] == b"content-length"]
    return [*without_hops(connection.headers, OURS), *length]


def _is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
