"""The HTTP surface of an emulated engine: vLLM 0.32's paths, and faults on request."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

from predictor.config import EngineConfig
from predictor.request import SERVE
from predictor.suggestions import require_known
from services.emulator.adapters import ServedAdapters
from services.emulator.audio import TranscriptReply
from services.emulator.driver import Driver
from services.emulator.errors import DetailError, VllmError, bad_value, not_fetched, unavailable
from services.emulator.grammars import GrammarCompiler
from services.emulator.jobs import Job
from services.emulator.kv_transfers import Fetch
from services.emulator.messages import MessagesReply
from services.emulator.openai import LONGEST_ID, ParsedRequest, Served, remote_blocks_in, request_from
from services.emulator.other_apis import OtherApis
from services.emulator.ranks import RankDrivers, at_rank
from services.emulator.replies import CompletionReply, ReplyWriter
from services.emulator.request_bodies import CHAT, COMPLETION, MESSAGE, RESPONSE, TRANSCRIPT, parsed
from services.emulator.responses import ResponsesReply, ResponseStore
from services.emulator.several import SeveralResponses
from services.emulator.side_channel import TransferError
from services.emulator.transfer_params import RemoteBlocks
from services.http.application import JSON, Application, Call, Endpoint, while_client_stays
from services.http.data_parallel import rank_in
from services.http.endpoints import errors_of
from services.http.error_shape import ErrorShape
from services.http.guarded_protocol import GuardedProtocol
from services.http.headers import Headers
from services.http.limits import HttpLimits
from services.logs import log_event

log = logging.getLogger(__name__)

SURFACE = "0.32.0"  # the version of vLLM whose HTTP surface this is
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
METRICS: Headers = [(b"content-type", b"text/plain; version=1.0.0")]
CONNECTION = "block.connection"  # an ASGI extension
LARGEST_FACTOR = 1e6
# vLLM's own of heads; connections are the gateways' affair
LIMITS = HttpLimits(
    max_header_bytes=4 * 2**20, max_headers=256, max_connections=2**16, max_connections_per_client=2**16
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of an engine: a factor of its steps' times, no steps at all, no new requests, sudden death."""

    slow: float = 1.0
    hang: bool = False
    refuse: bool = False
    crash: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if isinstance(self.slow, bool) or not isinstance(self.slow, int | float):
            raise ValueError(f"slow: must be a number, not {self.slow!r}")
        if not (math.isfinite(self.slow) and 0 < self.slow <= LARGEST_FACTOR):
            raise ValueError(f"slow: must lie above 0 and at most at {LARGEST_FACTOR:g}, not {self.slow}")
        for name in ("hang", "refuse", "crash"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: must be true or false, not {getattr(self, name)!r}")


def version_of(config: EngineConfig) -> str:
    """Return the version that an emulated engine reports: that of its scheduler's rules."""
    return f"{(config.vllm_version or SURFACE).partition('+')[0]}+block.emulator"


FAULT_NAMES = tuple(spec.name for spec in fields(Faults))


def faults_from(data: Any) -> Faults:
    """Read faults; those that are not named are switched off."""
    if not isinstance(data, Mapping):
        raise ValueError(f"fault: must be an object with some of {', '.join(FAULT_NAMES)}")
    require_known(data, FAULT_NAMES, "fault")
    return Faults(**data)


class MetricsText(Protocol):
    """Writes an engine's metrics."""

    def text(self) -> bytes:
        """Return the present values in Prometheus' text format."""


class ConnectionProtocol(GuardedProtocol):
    """The protocol, with the connection added to the scope: see `write_chunk`."""

    def on_message_begin(self) -> None:
        """Add the connection to the scope."""
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: {"protocol": self}}


def write_chunk(connection: GuardedProtocol, data: bytes) -> bool:
    """Write a piece of a chunked reply without waking its task; False where the client reads slowly, or is gone.

    A turn of the event loop for each token costs more than the token itself.
    """
    if connection.flow.write_paused or connection.transport.is_closing():
        return False
    connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


class Emulator(Application):
    """Serves one emulated engine."""

    error = VllmError
    name = "engine"

    def __init__(  # noqa: PLR0913 - these are its parts
        self,
        driver: Driver | RankDrivers,
        served: Served,
        exposition: MetricsText,
        *,
        max_body_bytes: int,
        adapters: ServedAdapters | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Serve the engine of a driver."""
        super().__init__(limits=LIMITS)
        self._grammars = GrammarCompiler(0.0) if grammars is None else grammars
        self.driver = driver
        self.served = served
        self._exposition = exposition
        self._adapters = adapters or ServedAdapters(served.model)
        self.max_body_bytes = max_body_bytes
        self._faults = Faults()
        self._created_s = int(time.time())
        self.responses = ResponseStore()
        self._others = OtherApis(self)
        self.routes = {
            "/v1/completions": {"POST": self._complete},
            "/v1/chat/completions": {"POST": self._chat},
            **self._others.routes,
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics},
            **(
                {
                    "/v1/load_lora_adapter": {"POST": self._load_adapter},
                    "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
                }
                if self._adapters.is_enabled
                else {}
            ),
            "/admin/fault": {"GET": self._show_faults, "POST": self._set_faults},
        }

    def request_id_of(self, call: Call) -> str:
        """Return the id that the client gives its request, cut to vLLM's length."""
        return super().request_id_of(call)[:LONGEST_ID]

    def endpoint_of(self, call: Call) -> Endpoint:
        """Find what serves a path, which may contain the id of a response."""
        return self._others.by_id(call) or super().endpoint_of(call)

    def errors_of(self, path: str) -> ErrorShape:
        """Return the shape of the errors of a path."""
        return errors_of(path)

    def not_found(self, path: str) -> VllmError:  # noqa: ARG002
        """Make the error for a path that is not served."""
        return DetailError(404, "Not Found")

    def not_allowed(self, path: str, method: str, allowed: list[str]) -> VllmError:  # noqa: ARG002
        """Make the error for a method that a path does not take."""
        return DetailError(405, "Method Not Allowed", allowed=allowed)

    # Completions.

    async def _complete(self, call: Call) -> None:
        await self._generate(call, COMPLETION)

    async def _chat(self, call: Call) -> None:
        await self._generate(call, CHAT)

    async def _generate(self, call: Call, kind: str) -> None:
        self.require_serving()
        data = await self.json_of(call)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers}
        try:
            request = request_from(kind, data, headers, call.request_id, self.served)
            request = at_rank(request, self._rank_in(call))
            self.driver.require_room(request)
        except VllmError:
            self._free_remote(remote_blocks_in(data))
            raise
        await self.serve(call, request)

    def _rank_in(self, call: Call) -> int | None:
        """Read the data-parallel rank that a request names; the check is vLLM's."""
        rank = rank_in(call.headers)
        if rank is not None and not 0 <= rank < self.driver.num_ranks:
            raise bad_value(f"data_parallel_rank {rank} is out of range [0, {self.driver.num_ranks}).")
        return rank

    def require_serving(self) -> None:
        """Refuse a request while the fault `refuse` is set."""
        if self._faults.refuse:
            raise unavailable("The engine refuses requests: the fault `refuse` is set.")

    async def serve(self, call: Call, request: ParsedRequest) -> None:
        """Serve a checked request while its client stays."""
        with self.admitted():
            await while_client_stays(self._serve(call, request), call.receive)

    async def _serve(self, call: Call, request: ParsedRequest) -> None:
        arrived_s = None
        if delay_s := self._grammars.delay_s(request.grammar):
            arrived_s = self.driver.clock.now_s()
            await asyncio.sleep(delay_s)
        if request.choices:
            await SeveralResponses(request, self.driver, EVENTS).serve(call, arrived_s)
            return
        fetch = None
        if request.remote is not None:
            request, fetch = await self._with_blocks(call, request, request.remote)
        job = self.driver.submit(request, fetch, arrived_s=arrived_s)
        try:
            await (self._stream(call, job) if request.stream else self._reply_whole(call, job))
        finally:
            self.driver.abort(job)

    async def _with_blocks(
        self, call: Call, request: ParsedRequest, remote: RemoteBlocks
    ) -> tuple[ParsedRequest, Fetch | None]:
        """Have the other engine confirm that it holds a request's blocks; without them, fail or compute the prompt."""
        connector = self.driver.connector
        assert connector is not None  # or no request would name blocks
        try:
            return request, await connector.fetches.open(remote)
        except TransferError:
            if connector.recomputes:
                return replace(request, leg=SERVE, remote=None), None
            if request.stream:
                await call.start(200, EVENTS)
            raise not_fetched() from None
        except asyncio.CancelledError:
            self._free_remote(remote)
            raise

    def _free_remote(self, remote: RemoteBlocks | None) -> None:
        """Let another engine free the blocks of a request that is not served here, as vLLM does."""
        if remote is not None and self.driver.connector is not None:
            self.driver.connector.fetches.free(remote)

    async def _stream(self, call: Call, job: Job) -> None:
        reply = self._reply(job.request)
        connection = call.scope["extensions"][CONNECTION]["protocol"]
        num_tokens = job.request.answer.num_tokens

        def push() -> bool:
            """Send events that are neither the first nor the last, without waking this task."""
            num_ready = job.num_ready
            if num_ready >= num_tokens or not write_chunk(connection, reply.events(job.num_sent, num_ready)):
                return False
            job.num_sent = num_ready
            return True

        await call.start(200, EVENTS)  # as vLLM does, before the first token
        if early := reply.at_once():
            await call.write(early)
        while job.num_sent < num_tokens:
            if not await job.more(push if job.num_sent else None):
                return
            body = reply.events(job.num_sent, job.num_ready, job.cached_tokens)
            if job.num_sent == 0:
                body = reply.first() + body
            job.num_sent = job.num_ready
            await (call.write(body) if job.num_sent < num_tokens else call.end(body))

    async def _reply_whole(self, call: Call, job: Job) -> None:
        num_tokens = job.request.answer.num_tokens
        await job.more(lambda: job.num_ready < num_tokens)
        if job.num_ready == num_tokens:
            reply = self._reply(job.request).whole(job.cached_tokens, job.kv_transfer_params)
            await call.reply(200, JSON, reply)

    def _reply(self, request: ParsedRequest) -> ReplyWriter:
        created_s = int(time.time())
        if request.kind == RESPONSE:
            return ResponsesReply(request, created_s, self.responses)
        if request.kind == MESSAGE:
            return MessagesReply(request)
        return (
            TranscriptReply(request, created_s) if request.kind == TRANSCRIPT else CompletionReply(request, created_s)
        )

    # Everything else.

    async def _models(self, call: Call) -> None:
        card = {
            "id": self.served.model, "object": "model", "created": self._created_s, "owned_by": "vllm",
            "root": self.served.model, "parent": None, "max_model_len": self.served.max_model_len, "permission": [],
        }  # fmt: skip
        cards = [card, *self._adapters.cards(self._created_s)]
        await call.reply(200, JSON, _json({"object": "list", "data": cards}))

    async def _load_adapter(self, call: Call) -> None:
        name = self._adapters.load(await self.json_of(call))
        self.driver.load_adapter(name)
        await call.reply(200, TEXT, f"Success: LoRA adapter '{name}' added successfully.".encode())

    async def _unload_adapter(self, call: Call) -> None:
        name = self._adapters.unload(await self.json_of(call))
        await call.reply(200, TEXT, f"Success: LoRA adapter '{name}' removed successfully.".encode())

    async def _health(self, call: Call) -> None:
        is_healthy = self.driver.failure is None and not self._faults.refuse
        await call.reply(200 if is_healthy else 503, [], b"")

    async def _version(self, call: Call) -> None:
        await call.reply(200, JSON, _json({"version": version_of(self.driver.engine.config)}))

    async def _load(self, call: Call) -> None:
        await call.reply(200, JSON, _json({"server_load": self.driver.num_jobs}))

    async def _metrics(self, call: Call) -> None:
        await call.reply(200, METRICS, self._exposition.text())

    async def _show_faults(self, call: Call) -> None:
        _require_local(call)
        await call.reply(200, JSON, _json(asdict(self._faults)))

    async def _set_faults(self, call: Call) -> None:
        _require_local(call)
        try:
            self._faults = faults_from(await self.json_of(call))
        except ValueError as error:
            raise bad_value(str(error)) from None
        log_event(log, logging.WARNING, "faults set", **asdict(self._faults))
        self.driver.slow(self._faults.slow)
        self.driver.hang(hangs=self._faults.hang)
        await call.reply(200, JSON, _json(asdict(self._faults)))
        if self._faults.crash:
            os.kill(os.getpid(), signal.SIGKILL)

    async def json_of(self, call: Call) -> Any:
        """Receive and parse a body of type JSON."""
        kind = (call.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise VllmError(400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
        return parsed(await self.body_of(call, self.max_body_bytes))


def _require_local(call: Call) -> None:
    """Refuse clients on other machines."""
    client = call.scope.get("client")
    try:
        is_local = client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise VllmError(403, "Faults can be set from the engine's own machine only.")


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
