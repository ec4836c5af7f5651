"""`block serve predictor`: the sidecar of an engine, or of all engines of a node."""

from __future__ import annotations

import socket
from dataclasses import replace

import click

from predictor.config import EngineConfig
from predictor.mirror.engine_kinds import VLLM
from services.cli.engine_options import ENGINE_CONFIG, profile_named
from services.cli.settings_options import SettingValues, server_of, settings_options
from services.logs import LogSettings
from services.predictor_server.settings import MirrorSettings, NodeSettings, SidecarSettings
from services.rpc.settings import ServerSettings
from services.security.settings import EngineAccessSettings, TlsSettings
from services.settings import PORTS, CommandSettings, SettingsPart

MEBIBYTE = 2**20
SETTINGS = CommandSettings(
    "predictor",
    SettingsPart(ServerSettings, defaults={"port": PORTS["predictor"]}),
    LogSettings,
    TlsSettings,
    EngineAccessSettings,
    NodeSettings,
    SidecarSettings,
    SettingsPart(MirrorSettings, defaults={"port": PORTS["engine_proxy"]}),
    replace(ENGINE_CONFIG, help="Of a mirrored engine: {}", unset="the engine's own"),
)


@click.command()
@settings_options(SETTINGS)
def predictor(given: SettingValues) -> None:
    """Serve forecasts for an engine, or for several (gRPC service block.v1.Predictor).

    An engine that exports its state is read (--state-file). Any other engine is mirrored: with --engine-url alone the
    sidecar is a proxy in front of the engine; clients and the schedulers' list of instances use the proxy's address.
    With a --profile of the engine its forecasts are better; without one the step times are learnt from its traffic.

    One process can serve all engines of a node (--engine, once for each): a scheduler then queries all of them in one
    call.
    """
    from predictor.generic_estimate import generic_profile
    from predictor.indicators import warm_indicators
    from services.predictor_server.server import serve
    from services.warmup import warm_up

    server = server_of(given)
    node = given.make(NodeSettings)
    engines = sidecars_of(given, node, server)
    profile = profile_named(node.profile) if node.profile else None
    if profile is None and engines[0].mirror is not None:
        profile = generic_profile()
    warm_up()
    warm_indicators()
    serve(engines, server, profile)


def sidecars_of(given: SettingValues, node: NodeSettings, server: ServerSettings) -> list[SidecarSettings]:
    """Make the settings of each engine that the process follows."""
    instance_id, state_file, engine_url = (given[name] for name in ("instance_id", "state_file", "engine_url"))
    if node.engines:
        if instance_id or state_file or engine_url:
            raise ValueError("engine: goes without instance_id, state_file and engine_url")
        if given["kv_events"]:
            raise ValueError("kv_events: goes with one mirrored engine, not with engine")
        return [given.make(SidecarSettings, **_engine_from_flag(text)) for text in node.engines]
    if not state_file and not engine_url:
        raise ValueError("state_file: is missing, and so is engine_url: an engine is read, or mirrored, or neither")
    mirror = None
    if state_file and given["kv_events"]:
        raise ValueError("kv_events: goes without state_file: an engine that exports its state shows its cached blocks")
    if not state_file:
        if not node.profile and given["engine_kind"] == VLLM:
            raise ValueError("profile: is missing, and an engine that exports no state names none")
        mirror = given.make(
            MirrorSettings,
            engine_url=engine_url,
            host=given["proxy_host"] or server.host,
            engine=given.given(EngineConfig),
            max_concurrency=server.max_concurrency,
            max_body_bytes=server.max_message_mib * MEBIBYTE,
            drain_s=server.drain_s,
            tls=server.tls,
        )
    return [given.make(SidecarSettings, instance_id=instance_id or socket.gethostname(), mirror=mirror)]


def _engine_from_flag(text: str) -> dict[str, str]:
    """Read ID=STATE_FILE[,ENGINE_URL]."""
    instance_id, equals, rest = text.partition("=")
    state_file, _, engine_url = rest.partition(",")
    if not (equals and instance_id.strip() and state_file.strip()):
        raise ValueError(f"engine: {text!r} must be ID=STATE_FILE or ID=STATE_FILE,ENGINE_URL")
    return {"instance_id": instance_id.strip(), "state_file": state_file.strip(), "engine_url": engine_url.strip()}
