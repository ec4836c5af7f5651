"""`block serve gateway`: the OpenAI-compatible HTTP server in front of the engines."""

from __future__ import annotations

import os
from dataclasses import replace

import click

from services.cli import serve_scheduler
from services.cli.settings_options import SettingValues, server_of, settings_options
from services.gateway.settings import IN_PROCESS, GatewaySettings
from services.instances.settings import InstanceSourceSettings
from services.logs import LogSettings
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from services.security.exposure import require_keys_beyond_loopback
from services.security.settings import NONE, REQUIRED, EngineAccessSettings, TlsSettings
from services.settings import PORTS, CommandSettings, SettingsPart
from services.tracing.otlp import TracingSettings

MEBIBYTE = 2**20
KEY_VARIABLE = "BLOCK_GATEWAY_API_KEY"
SETTINGS = CommandSettings(
    "gateway",
    SettingsPart(ServerSettings, defaults={"port": PORTS["gateway"]}, without=("health_port",)),
    LogSettings,
    SettingsPart(TlsSettings, defaults={"tls_client_auth": NONE}),
    EngineAccessSettings,
    SettingsPart(GatewaySettings, defaults={"schedulers": (f"127.0.0.1:{PORTS['scheduler']}",)}),
    TracingSettings,
    SettingsPart(InstanceSourceSettings, lent_by=serve_scheduler.SETTINGS, help="In-process: {}"),
    SettingsPart(SchedulerSettings, lent_by=serve_scheduler.SETTINGS, help="In-process: {}"),
)


@click.command()
@settings_options(SETTINGS)
def gateway(given: SettingValues) -> None:
    """Serve the OpenAI API, and send each request to the instance that is chosen for it.

    By default schedulers choose (--scheduler). With --decide in-process the gateway chooses by itself, which saves a
    remote call: it then needs the instances, as `block serve scheduler` does.

    The environment variable BLOCK_GATEWAY_API_KEY may hold an API key, or several with commas, in place of a file.
    """
    from services.gateway.server import InProcessDecisions, serve

    server = server_of(given)
    settings = given.make(
        GatewaySettings, max_body_bytes=server.max_message_mib * MEBIBYTE, max_concurrency=server.max_concurrency
    )
    keys = tuple(key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip())
    server = replace(server, access=replace(server.access, plain_keys=keys))
    require_keys_beyond_loopback(server.host, server.tls, has_keys=bool(keys or server.access.api_key_file))
    decisions = None
    if settings.decide == IN_PROCESS:
        instances = given.make(InstanceSourceSettings)
        rpc = None
        if settings.scheduler_port is not None:
            tls = replace(server.tls, tls_client_auth=REQUIRED)
            rpc = replace(server, port=settings.scheduler_port, metrics_port=None, tls=tls)
        decisions = InProcessDecisions(
            settings=given.make(SchedulerSettings), source=instances.source(), poll_s=instances.poll_s, rpc=rpc
        )
    serve(settings, server, decisions, given.make(TracingSettings))
