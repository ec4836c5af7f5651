"""The base of our HTTP servers: routing, request ids, errors, disconnects, draining, a limit on concurrency."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

from prometheus_client import CollectorRegistry

from services.http.error_shape import PLAIN_ERRORS, ErrorShape
from services.http.errors import ApiError, HttpError
from services.http.headers import Headers
from services.http.limits import BODY_TIMEOUT, DEFAULT_LIMITS, SETTINGS, HttpLimits, Refusals
from services.http.proxying import is_event_stream
from services.logs import log_event
from services.rpc.errors import message_of, status_of
from services.security.access import EXPIRED_KEY, AccessControl, Caller
from services.security.errors import NotAllowedError, UnauthenticatedError
from services.security.roles import FOR_OPERATORS

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Endpoint = Callable[["Call"], Awaitable[None]]

REQUEST_ID = b"x-request-id"
BODY_S = 60.0  # to receive a body
OTHER = "other"  # the route of a path that is not served
FIRST_BODY_S = 10.0  # of them, in which the rate does not matter
CLIENT_LEFT = 499  # nginx's status for it, in metrics only
JSON: Headers = [(b"content-type", b"application/json")]


class ClientLeftError(Exception):
    """The client disconnected before its reply was complete."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One HTTP request and the reply to it; the reply carries `request_id`, unless that is empty."""

    scope: Scope
    receive: Receive
    send: Send
    request_id: str = ""
    arrived_s: float = field(default_factory=time.monotonic)
    arrived_unix_s: float = field(default_factory=time.time)
    status: int = 0  # of the reply; 0 until it starts
    is_stream: bool = False  # the reply is a stream of events
    caller: Caller | None = None  # of a call whose route needs a role
    added_headers: Headers = field(default_factory=list)  # that every reply to this call has
    has_ended: bool = False
    errors: ErrorShape = PLAIN_ERRORS
    route: str = OTHER  # as metrics name it

    @property
    def headers(self) -> Headers:
        """The request's headers, names in lower case."""
        return cast("Headers", self.scope["headers"])

    def header(self, name: bytes) -> bytes | None:
        """Return the last header of a name."""
        return dict(self.headers).get(name)

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a reply in one piece."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.status, self.is_stream = status, is_event_stream(headers)
        if self.added_headers:
            headers = [*headers, *self.added_headers]
        if self.request_id:
            headers = [*headers, (REQUEST_ID, self.request_id.encode("latin-1"))]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body."""
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, piece: bytes = b"") -> None:
        """Send the last piece of the body."""
        self.has_ended = True
        await self.send({"type": "http.response.body", "body": piece, "more_body": False})

    async def fail(self, error: HttpError) -> None:
        """Send an error: as the reply, or as the last event of a stream; another reply that has started is cut off."""
        if self.status == 0:
            await self.reply(error.status, error.headers(), self.errors.body(error))
        elif self.is_stream and not self.has_ended:
            await self.end(self.errors.event(error))


class Application:
    """An ASGI application. A subclass fills `routes`; an endpoint that takes long runs inside `admitted`.

    A route that ends with `/*` serves all paths below it that have no route of their own.

    `cut_off` ends admitted calls that are still under way when the drain time is over.
    """

    error: type[HttpError] = ApiError  # in which this application reports its own refusals
    name = "server"  # in messages
    unlisted = FOR_OPERATORS  # who may use a route that the table of all routes lacks

    def __init__(
        self,
        *,
        max_concurrency: int | None = None,
        access: AccessControl | None = None,
        limits: HttpLimits = DEFAULT_LIMITS,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Serve no path yet; None sets no limit on concurrency, and checks no caller.

        Refusals are counted in a registry.
        """
        self.draining = False
        self.access = access
        self.limits = limits
        self.refusals = Refusals(registry)
        self.routes: Mapping[str, Mapping[str, Endpoint]] = {}
        self._max_concurrency = max_concurrency
        self._admitted: set[asyncio.Task[Any]] = set()
        self._is_cut_off = False

    def __len__(self) -> int:
        """Return the number of admitted calls that are under way."""
        return len(self._admitted)

    def cut_off(self) -> None:
        """Cancel all admitted calls; each ends with an error that its client can read."""
        self._is_cut_off = True
        for task in self._admitted:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an exception becomes a reply."""
        if scope["type"] != "http":
            return
        call = Call(scope=scope, receive=receive, send=send, request_id=uuid4().hex)
        has_left = False
        try:
            call.errors = self.errors_of(scope["path"])
            call.request_id = self.request_id_of(call)
            endpoint = self.endpoint_of(call)
            call.route = call.route if call.route != OTHER else self.route_of(scope["path"])
            self.authorize(call)
            await endpoint(call)
        except HttpError as error:
            if error.code in SETTINGS:
                self.refusals.note(error.code, (scope.get("client") or ("",))[0])
            await call.fail(error)
        except asyncio.CancelledError:
            if not self._is_cut_off:
                raise
            cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
            await call.fail(self.error(503, self._shutting_down()))
        except ClientLeftError:
            has_left = True
            log_event(log, logging.DEBUG, "client disconnected", request_id=call.request_id)
        except Exception:
            log.exception("call failed", extra={"fields": {"request_id": call.request_id}})
            await call.fail(self.error(500, f"internal error; the {self.name}'s log has more"))
        status = CLIENT_LEFT if has_left else call.status
        if call.caller is not None and self.access is not None:
            self.access.ended(call.caller, call.scope, status)
        self.on_end(call, call.route, status)

    def authorize(self, call: Call) -> None:
        """Check that the caller may use the route, by the table of all routes, where callers are checked."""
        if self.access is not None:
            try:
                call.caller = self.access.admit_http(call.scope, self.unlisted)
            except (UnauthenticatedError, NotAllowedError) as error:
                raise self.access_error(error) from None

    def access_error(self, error: UnauthenticatedError | NotAllowedError) -> HttpError:
        """Make the error for a caller that may not use a route."""
        expired = isinstance(error, UnauthenticatedError) and error.reason == EXPIRED_KEY
        return self.error(status_of(error).http_code, message_of(error), code="expired_api_key" if expired else None)

    def request_id_of(self, call: Call) -> str:
        """Return the id that the client gives its request, else the call's own, which is random."""
        return (call.header(REQUEST_ID) or b"").decode("latin-1") or call.request_id

    def errors_of(self, path: str) -> ErrorShape:  # noqa: ARG002
        """Return the shape of the errors of a path."""
        return PLAIN_ERRORS

    def on_end(self, call: Call, path: str, status: int) -> None:
        """Note the end of a call; `path` is one of the routes, or `other`."""

    def endpoint_of(self, call: Call) -> Endpoint:
        """Find what serves a path and method; a HEAD is served as a GET, and the server leaves its body out."""
        path, method = call.scope["path"], call.scope["method"]
        methods = self.routes.get(self.route_of(path))
        if methods is None:
            raise self.not_found(path)
        endpoint = methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            raise self.not_allowed(path, method, list(methods))
        return endpoint

    def route_of(self, path: str) -> str:
        """Return the route that serves a path: the path itself, or what is above it with `/*`."""
        if path in self.routes:
            return path
        return path[: path.find("/", 1) + 1] + "*" if path.count("/") > 1 else path

    def not_found(self, path: str) -> HttpError:
        """Make the error for a path that is not served."""
        return self.error(404, f"there is nothing at {path[:100]}")

    def not_allowed(self, path: str, method: str, allowed: list[str]) -> HttpError:
        """Make the error for a method that a path does not take."""
        return self.error(405, f"{path} takes {', '.join(allowed)}, not {method[:20]}", allowed=allowed)

    def require_open(self) -> None:
        """Refuse a call while the server drains: for readiness alone, as calls that still arrive are served."""
        if self.draining:
            raise self.error(503, self._shutting_down())

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a call as under way, where the limit allows it, and the time to drain is not over."""
        if self._is_cut_off:
            raise self.error(503, self._shutting_down())
        if self._max_concurrency is not None and len(self._admitted) >= self._max_concurrency:
            raise self.error(429, f"{len(self._admitted)} requests are under way, which is the limit; retry later")
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._admitted.add(task)
        try:
            yield
        finally:
            self._admitted.discard(task)

    async def body_of(self, call: Call, max_bytes: int) -> bytes:
        """Receive the body of a request, up to a limit."""
        return await receive_body(
            call.headers, call.receive, max_bytes, self.error, min_bytes_per_s=self.limits.min_body_bytes_per_s
        )

    def _shutting_down(self) -> str:
        return f"the {self.name} is shutting down"


async def receive_body(
    headers: Headers,
    receive: Receive,
    max_bytes: int,
    error: type[HttpError] = ApiError,
    *,
    min_bytes_per_s: int = DEFAULT_LIMITS.min_body_bytes_per_s,
) -> bytes:
    """Receive a body, up to a limit, in `BODY_S`, and after the first seconds at a minimum rate."""
    too_large = error(413, f"the body may have at most {max_bytes} bytes")
    length = next((value for name, value in headers if name == b"content-length"), b"0")
    if int(length) > max_bytes:  # digits only: the server's parser has checked that
        raise too_large
    start_s = asyncio.get_running_loop().time()
    body, num_bytes = b"", 0
    pieces: list[bytes] = []
    try:
        async with asyncio.timeout_at(start_s + FIRST_BODY_S) as timeout:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientLeftError
                body = message.get("body", b"")
                num_bytes += len(body)
                if num_bytes > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    break
                pieces.append(body)
                timeout.reschedule(start_s + min(BODY_S, FIRST_BODY_S + num_bytes / min_bytes_per_s))
    except TimeoutError:
        raise error(408, f"only {num_bytes} bytes of the body arrived in time", code=BODY_TIMEOUT) from None
    return b"".join((*pieces, body)) if pieces else body


async def while_client_stays(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do work for a client whose body has been received; cancel it with ClientLeftError when the client disconnects."""
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    is_working, has_left = True, False

    def disconnected(_: asyncio.Task[Any]) -> None:
        nonlocal has_left
        if is_working:
            has_left = True
            task.cancel()

    watch: asyncio.Task[Any] = asyncio.create_task(cast("Coroutine[Any, Any, Any]", receive()))
    watch.add_done_callback(disconnected)
    try:
        await work
    except asyncio.CancelledError:
        if not has_left:
            raise
        task.uncancel()
        raise ClientLeftError from None
    finally:
        is_working = False
        watch.cancel()
