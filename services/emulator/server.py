"""The process of an emulated engine: its parts, its socket, and a shutdown that lets requests finish."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from predictor.config import FETCHING_ROLES, HOLDING_ROLES, EngineConfig
from predictor.data_parallel import DataParallelRank, LockstepRules
from predictor.engine import Engine
from predictor.mirror.engine_kinds import SGLANG
from predictor.profile import Profile
from predictor.request import DECODE, PREFILL, RequestFacts
from services.emulator.adapters import ServedAdapters, modules_from
from services.emulator.answers import AnswerLengths
from services.emulator.app import ConnectionProtocol, Emulator, version_of
from services.emulator.clock import EngineClock, Pace
from services.emulator.content_hashes import ContentHashes
from services.emulator.driver import Driver
from services.emulator.exporter import EngineStateExporter
from services.emulator.grammars import GrammarCompiler
from services.emulator.kv_transfers import EmulatedConnector
from services.emulator.metrics import EngineMetrics, Exposition
from services.emulator.openai import Served
from services.emulator.rank_metrics import RankExposition
from services.emulator.ranks import RankDrivers
from services.emulator.settings import EmulatorSettings
from services.emulator.sglang import sglang_emulator
from services.emulator.speculation import DraftDraws
from services.engine_state.identity import rank_file
from services.http.server import answering, listening
from services.kv_events.publisher import KvEventPublisher
from services.logs import log_event
from services.rpc.server import freeze_imported_objects, stop_signal
from services.security.certificates import certificates_of

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 5  # as in vLLM
FIRST_STEPS_S = 60.0  # longer than a step of any engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEmulator:
    """A running emulated engine and its port."""

    app: Emulator
    port: int


def serve(settings: EmulatorSettings, config: EngineConfig, profile: Profile) -> None:
    """Serve until SIGTERM or SIGINT; then finish the requests under way."""
    with listening(settings.host, settings.port) as listener:
        uvloop.run(_serve_until_signalled(settings, config, profile, listener))


async def _serve_until_signalled(
    settings: EmulatorSettings, config: EngineConfig, profile: Profile, listener: socket.socket
) -> None:
    stop = stop_signal()
    async with serving(settings, config, profile, listener) as running:
        freeze_imported_objects()
        log_event(
            log, logging.INFO, "serving", server="engine", host=settings.host, port=running.port,
            state_file=settings.state_file,
        )  # fmt: skip
        await stop.wait()
    log_event(log, logging.INFO, "stopped", server="engine")


@asynccontextmanager
async def serving(
    settings: EmulatorSettings, config: EngineConfig, profile: Profile, listener: socket.socket
) -> AsyncIterator[RunningEmulator]:
    """Serve on a bound socket while the block runs; then let requests finish, at most `drain_s`."""
    warm(config, profile)
    with ExitStack() as sockets:
        side, connector = None, None
        if config.kv_role:
            host = settings.kv_side_channel_host
            side = sockets.enter_context(listening(host, settings.kv_side_channel_port, "kv_side_channel_port"))
            address = {"host": host, "port": side.getsockname()[1]}
            connector = EmulatedConnector(config, settings.model, version_of(config), **address)
        publishers: list[KvEventPublisher] = []
        for rank in range(settings.data_parallel_size if settings.kv_events.publishes else 0):
            publishers.append(KvEventPublisher(settings.kv_events, rank))
            sockets.callback(publishers[-1].close)
            publishers[-1].start()
        app = application(settings, config, profile, connector, publishers)
        driving = asyncio.create_task(app.driver.run())
        try:
            async with AsyncExitStack() as servers:
                if connector is not None and side is not None:
                    await servers.enter_async_context(answering(connector.side_channel, side, settings.drain_s))
                await servers.enter_async_context(
                    answering(
                        app,
                        listener,
                        settings.drain_s,
                        protocol=ConnectionProtocol,
                        keep_alive_s=KEEP_ALIVE_S,
                        tls=certificates_of(settings.tls).server_context,
                    )
                )
                yield RunningEmulator(app=app, port=listener.getsockname()[1])
        finally:
            driving.cancel()
            with suppress(asyncio.CancelledError):
                await driving
            app.driver.close()


def application(
    settings: EmulatorSettings,
    config: EngineConfig,
    profile: Profile,
    connector: EmulatedConnector | None,
    kv_publishers: Sequence[KvEventPublisher] = (),
) -> Emulator:
    """Combine an engine, its driver and its HTTP surface; each data-parallel rank has a driver of its own."""
    lengths = AnswerLengths(
        median_tokens=settings.output_median, spread=settings.output_spread, seed=settings.output_seed
    )
    adapters = ServedAdapters(settings.model, bool(config.max_loras), modules_from(settings.lora_modules))
    served = Served(
        model=settings.model,
        max_model_len=config.max_model_len,
        lengths=lengths,
        has_connector=connector is not None,
        adapters=adapters.paths,
        max_num_requests=settings.max_num_queued_reqs,
    )
    size = settings.data_parallel_size
    if size > 1 and config.kv_role:
        raise ValueError("data_parallel_size: ranks pass no KV blocks on; leave out kv_role")
    clock = EngineClock(settings.speed)
    rules = LockstepRules() if settings.data_parallel_lockstep else None
    group = f"{socket.gethostname()}:{os.getpid()}"
    made = [
        driver_of(
            settings, config, profile, connector,
            DataParallelRank(rank=rank, size=size, group=group, lockstep=rules),
            clock if rules is not None else EngineClock(settings.speed),
            kv_publishers[rank] if kv_publishers else None,
        )
        for rank in range(size)
    ]  # fmt: skip
    drivers, expositions = [driver for driver, _ in made], [exposition for _, exposition in made]
    grammars = GrammarCompiler(settings.grammar_compile_s / clock.speed)
    limit = settings.max_body_bytes
    if settings.engine_kind == SGLANG:
        if size > 1:
            raise ValueError("data_parallel_size: an emulated SGLang has one rank")
        return sglang_emulator(drivers[0], served, max_body_bytes=limit)
    if size == 1:
        return Emulator(drivers[0], served, expositions[0], max_body_bytes=limit, adapters=adapters, grammars=grammars)
    ranks = RankDrivers(drivers, rules)
    return Emulator(
        ranks, served, RankExposition(expositions), max_body_bytes=limit, adapters=adapters, grammars=grammars
    )


def driver_of(  # noqa: PLR0913, PLR0917 - its parts
    settings: EmulatorSettings,
    config: EngineConfig,
    profile: Profile,
    connector: EmulatedConnector | None,
    rank: DataParallelRank,
    clock: EngineClock,
    kv_publisher: KvEventPublisher | None,
) -> tuple[Driver, Exposition]:
    """Make an engine, or one rank of it, with its state file and its metrics."""
    # a lease is as long on the wall clock as that of any other engine
    engine = Engine(replace(config, kv_lease_s=config.kv_lease_s * clock.speed), profile.step_time)
    metrics = EngineMetrics(max_model_len=config.max_model_len, speed=settings.speed)
    about: dict[str, Any] = {"model": settings.model, "profile": profile.name, "source": f"vllm {version_of(config)}"}
    path = settings.state_file
    if rank.size > 1:
        about["data_parallel"] = rank.table()
        path = rank_file(path, rank.rank) if path else path

    def exporter(contents: ContentHashes | None) -> EngineStateExporter:
        exported = contents if settings.export_contents else None
        try:
            return EngineStateExporter(path, engine, clock, contents=exported, about=about)
        except OSError as error:
            raise ValueError(f"state_file: {path}: {error.strerror or error}") from None

    draws = DraftDraws(engine.config, settings.seed) if engine.config.speculative_method else None
    driver = Driver(
        engine,
        clock,
        Pace(settings.noise, settings.seed + rank.rank),
        metrics,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        connector=connector,
        draws=draws,
        exporter_with=exporter if path else None,
        kv_publisher=kv_publisher,
    )
    for name in modules_from(settings.lora_modules):
        driver.load_adapter(name)
    exposition = Exposition(
        metrics,
        engine.config,
        settings.model,
        connector.counts if connector else None,
        draws.counts if draws else None,
        gauges=driver.gauges,
        rank=rank.rank,
    )
    return driver, exposition


def with_adapters(config: EngineConfig, *, enabled: bool) -> EngineConfig:
    """Return the settings of an engine that serves LoRA adapters, or serves none."""
    if not enabled and config.max_loras:
        raise ValueError(f"max_loras: {config.max_loras} needs enable_lora")
    return replace(config, max_loras=config.max_loras or 1) if enabled else config


def warm(config: EngineConfig, profile: Profile) -> None:
    """Compile, or load, every kernel that serving needs, before a request waits for it."""
    engine = Engine(config, profile.step_time)
    if config.max_loras:
        engine.load_adapter("warm")
    for number in range(2):
        engine.add(RequestFacts(request_id=str(number), prompt_tokens=1, output_tokens=2))
    engine.advance(0.0)
    engine.abort("0")
    engine.advance()
    if config.kv_role in HOLDING_ROLES:
        engine.add(RequestFacts(request_id="held", prompt_tokens=1, leg=PREFILL))
        engine.advance(engine.now_s + FIRST_STEPS_S)
        engine.hold_until("held", engine.now_s + config.kv_lease_s)
        engine.release_held("held")
    if config.kv_role in FETCHING_ROLES:
        engine.add(RequestFacts(request_id="fetched", prompt_tokens=1, leg=DECODE, transfer_s=FIRST_STEPS_S))
        engine.advance(engine.now_s)
        engine.end_fetch("fetched", ok=False)
        engine.advance()
