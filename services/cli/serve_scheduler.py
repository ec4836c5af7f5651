"""`block serve scheduler`: decides which instance serves a request."""

from __future__ import annotations

import click

from services.cli.settings_options import SettingValues, server_of, settings_options
from services.instances.settings import InstanceSourceSettings
from services.logs import LogSettings
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from services.security.settings import EngineAccessSettings, TlsSettings
from services.settings import PORTS, CommandSettings, SettingsPart
from services.tracing.otlp import TracingSettings

SETTINGS = CommandSettings(
    "scheduler",
    SettingsPart(ServerSettings, defaults={"port": PORTS["scheduler"]}),
    LogSettings,
    TlsSettings,
    EngineAccessSettings,
    InstanceSourceSettings,
    SchedulerSettings,
    TracingSettings,
)


@click.command()
@settings_options(SETTINGS)
def scheduler(given: SettingValues) -> None:
    """Serve the scheduler, which decides the instance of each request (gRPC service block.v1.Scheduler)."""
    from services.scheduler_server import serve

    server = server_of(given)
    instances = given.make(InstanceSourceSettings)
    serve(given.make(SchedulerSettings), server, instances.source(), instances.poll_s, given.make(TracingSettings))
