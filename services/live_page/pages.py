"""Serves the live page at /ui: its files, its stream of events, and single decisions with their candidates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from functools import cache, partial
from importlib import resources
from typing import Any, Protocol
from urllib.parse import parse_qs

from google.protobuf.json_format import MessageToDict

from protos.block.v1 import common_pb2
from services.explanations import status_name
from services.http.application import JSON, Application, Call, ClientLeftError, Endpoint, while_client_stays
from services.http.errors import ApiError
from services.http.headers import Headers
from services.rpc.errors import INTERNAL, BusyError, status_of
from services.rpc.messages import indicators_from

PAGE = "/ui"
FILES = {  # by path; they contain no data
    PAGE: ("index.html", b"text/html; charset=utf-8"),
    **{
        f"{PAGE}/{name}": (name, b"text/javascript; charset=utf-8")
        for name in (
            "page.js", "feed.js", "state.js", "dom.js", "drawing.js", "cluster.js", "decisions.js", "accuracy.js",
            "slos.js", "fleet.js",
        )
    },
    f"{PAGE}/icon.svg": ("icon.svg", b"image/svg+xml"),
    f"{PAGE}/page.css": ("page.css", b"text/css; charset=utf-8"),
}  # fmt: skip
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
SAFE: Headers = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
EVENTS: Headers = [(b"content-type", b"text/event-stream"), (b"x-content-type-options", b"nosniff"),
                   (b"cache-control", b"no-store")]  # fmt: skip
SILENT_S = 1.0  # after which a comment is sent, and the end of the server noticed
STUCK_S = 10.0  # after which a page that takes no bytes is left


class FrameReader(Protocol):
    """What one page reads."""

    def frames(self) -> AsyncGenerator[bytes]:
        """Yield frames, each an object of JSON, the first one with the whole state."""


class FrameSource(Protocol):
    """What the page shows: a placement driver's tail, that of remote schedulers, or a recording."""

    def watched(self) -> AbstractContextManager[FrameReader]:
        """Watch while the block runs; BusyError where too many do."""

    async def explain(self, request_id: str) -> common_pb2.Decision:
        """Return a decision with its candidates; UnknownNameError where it is not known."""


class LivePage:
    """The page's endpoints for an application."""

    def __init__(
        self,
        source: FrameSource,
        *,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """Show a source; streams end when the server drains. The application checks who may see it."""
        self._source = source
        self._is_draining = is_draining

    @property
    def routes(self) -> Mapping[str, Mapping[str, Endpoint]]:
        """The endpoints by path and method."""
        files = {path: {"GET": partial(_reply_file, name, kind)} for path, (name, kind) in FILES.items()}
        return {**files, f"{PAGE}/tail": {"GET": self._tail}, f"{PAGE}/decision": {"GET": self._decision}}

    async def _tail(self, call: Call) -> None:
        await _without_body(call)
        if call.scope["method"] == "HEAD":
            await call.reply(200, EVENTS, b"")
            return
        try:
            with self._source.watched() as reader:
                await call.start(200, EVENTS)
                await while_client_stays(self._pass_on(reader, call), call.receive)
        except BusyError as error:
            raise ApiError.of(error) from None
        except ClientLeftError:
            pass  # how every page ends

    async def _pass_on(self, reader: FrameReader, call: Call) -> None:
        async with aclosing(reader.frames()) as frames:
            coming = asyncio.ensure_future(anext(frames, None))
            try:
                while not self._is_draining():
                    await asyncio.wait([coming], timeout=SILENT_S)
                    if not coming.done():
                        await _written(call, b":\n\n")
                        continue
                    frame = coming.result()
                    if frame is None:
                        break
                    await _written(call, b"data: " + frame + b"\n\n")
                    coming = asyncio.ensure_future(anext(frames, None))
            finally:
                coming.cancel()
                await asyncio.wait([coming])
        await call.end()

    async def _decision(self, call: Call) -> None:
        query = parse_qs(call.scope["query_string"].decode("latin-1"))
        request_id = query.get("request_id", [""])[0]
        if not request_id:
            raise ApiError(400, "request_id: is missing")
        try:
            message = await self._source.explain(request_id)
        except Exception as error:
            if status_of(error) is INTERNAL:
                raise
            raise ApiError.of(error) from None
        body = json.dumps(explanation(message), separators=(",", ":")).encode()
        await call.reply(200, [*JSON, (b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")], body)


def live_page_routes(source: FrameSource, app: Application) -> Mapping[str, Mapping[str, Endpoint]]:
    """Return the page's endpoints for an application."""
    return LivePage(source, is_draining=lambda: app.draining).routes


def explanation(message: common_pb2.Decision) -> dict[str, Any]:
    """Describe a decision with its candidates; infinite numbers are texts, as in protobuf's JSON."""
    found = MessageToDict(message, preserving_proto_field_name=True)
    candidates = []
    for one in message.candidates:
        candidate = MessageToDict(one, preserving_proto_field_name=True)
        candidate["fate"] = status_name(one)
        if one.HasField("indicators"):
            age_s = one.indicators.age_s
            values = {name: str(value) if abs(value) == float("inf") else value
                      for name, value in indicators_from(one.indicators).items()}  # fmt: skip
            candidate["indicators"] = {**values, "age_s": age_s}
        candidates.append(candidate)
    found["candidates"] = candidates
    found["basis"] = common_pb2.DecisionBasis.Name(message.basis).removeprefix("DECISION_BASIS_").lower()
    return found


async def _reply_file(name: str, kind: bytes, call: Call) -> None:
    await call.reply(200, [(b"content-type", kind), *SAFE], _file(name))


@cache
def _file(name: str) -> bytes:
    return resources.files(__package__).joinpath("static", name).read_bytes()


async def _written(call: Call, piece: bytes) -> None:
    """Send a piece; ClientLeftError where the client does not read, whose place another page can have."""
    try:
        async with asyncio.timeout(STUCK_S):
            await call.write(piece)
    except TimeoutError:
        raise ClientLeftError from None


async def _without_body(call: Call) -> None:
    """Receive the empty body of a GET, so that what comes next is the client's leaving."""
    while True:
        message = await call.receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
