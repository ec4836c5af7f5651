"""The process of an emulated engine."""

from __future__ import annotations

import errno
import gc
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.profile import Profile
from predictor.request import Request
from services.emulator.answers import AnswerLengths
from services.emulator.app import VERSION, App
from services.emulator.clock import EngineClock
from services.emulator.connections import Protocol
from services.emulator.contents import Names
from services.emulator.driver import Driver
from services.emulator.exporter import EngineStateExporter
from services.emulator.metrics import EngineMetrics, Exposition
from services.emulator.openai import Served
from services.emulator.pace import Pace
from services.emulator.settings import EmulatorSettings
from services.logs import log_event

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 5  # as vLLM's


def serve(settings: EmulatorSettings, config: EngineConfig, profile: Profile) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is under way."""
    listener = bind(settings.host, settings.port)
    try:
        warm(config, profile)
        app = application(settings, config, profile)
    except BaseException:
        listener.close()
        raise
    gc.collect()
    gc.freeze()  # what is there by now stays; the collector need not look at it again and again
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    port = listener.getsockname()[1]
    running = server(app, settings.drain_s)

    def stop(*_: object) -> None:
        running.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):  # before uvicorn takes them, and when it passes them on at its end
        signal.signal(number, stop)
    listener.listen(BACKLOG)
    log_event(
        log, logging.INFO, "serving", server="engine", host=settings.host, port=port, state_file=settings.state_file
    )
    running.run(sockets=[listener])
    log_event(log, logging.INFO, "stopped", server="engine")


def application(settings: EmulatorSettings, config: EngineConfig, profile: Profile) -> App:
    """Put an engine and all that stands before it together."""
    engine = Engine(config, profile.step_time)
    clock = EngineClock(settings.speed)
    lengths = AnswerLengths(median_tokens=settings.output_median, spread=settings.output_spread, seed=settings.seed)
    served = Served(model=settings.model, max_model_len=config.max_model_len, lengths=lengths)
    metrics = EngineMetrics(max_model_len=config.max_model_len, speed=settings.speed)
    about = {"model": settings.model, "profile": profile.name, "source": f"vllm {VERSION}"}

    def exporter(names: Names | None) -> EngineStateExporter:
        told = names if settings.export_contents else None
        try:
            return EngineStateExporter(settings.state_file, engine, clock, names=told, about=about)
        except OSError as error:
            raise ValueError(f"state_file: {settings.state_file}: {error.strerror or error}") from None

    driver = Driver(
        engine,
        clock,
        Pace(settings.noise, settings.seed),
        metrics,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        exporter_with=exporter if settings.state_file else None,
    )
    exposition = Exposition(metrics, engine.config, settings.model)
    return App(driver, served, exposition, most_body_bytes=settings.max_body_bytes)


def server(app: Callable[..., Any], drain_s: float) -> uvicorn.Server:
    """Make the HTTP server."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Protocol,
            lifespan="on",
            access_log=False,
            log_config=None,
            proxy_headers=False,  # or a header could claim to come from this machine
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """Take an address, or say why that cannot be; nobody can connect before it is listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"host: {host!r} is no address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"host: {host!r} is no address of this machine") from None
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
        raise ValueError(f"port: {port} on {host} {reason}") from None
    return listener


def warm(config: EngineConfig, profile: Profile) -> None:
    """Compile, or load, every kernel that serving needs, before anybody waits for it."""
    engine = Engine(config, profile.step_time)
    for number in range(2):
        engine.add(Request(request_id=str(number), prompt_tokens=1, output_tokens=2))
    engine.advance(0.0)
    engine.abort("0")
    engine.advance()
