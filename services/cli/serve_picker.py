"""`block serve picker`: chooses the endpoints of an Envoy's requests."""

from __future__ import annotations

import click

from services.cli import serve_scheduler
from services.cli.settings_options import SettingValues, server_of, settings_options
from services.endpoint_picker.settings import PickerSettings
from services.instances.settings import InstanceSourceSettings
from services.logs import LogSettings
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from services.security.settings import NONE, TlsSettings
from services.settings import PORTS, CommandSettings, SettingsPart
from services.tracing.otlp import TracingSettings

MEBIBYTE = 2**20
MAX_STREAMS = 8192
SETTINGS = CommandSettings(
    "picker",
    SettingsPart(ServerSettings, defaults={"port": PORTS["picker"], "max_concurrency": MAX_STREAMS}),
    LogSettings,
    SettingsPart(TlsSettings, defaults={"tls_client_auth": NONE}),
    PickerSettings,
    SettingsPart(InstanceSourceSettings, lent_by=serve_scheduler.SETTINGS),
    SettingsPart(SchedulerSettings, lent_by=serve_scheduler.SETTINGS),
    TracingSettings,
)


@click.command()
@settings_options(SETTINGS)
def picker(given: SettingValues) -> None:
    """Serve the endpoint picker, which chooses the engine of each request for a proxy such as Envoy.

    The proxy asks by its external processing protocol (gRPC service envoy.service.ext_proc.v3.ExternalProcessor), as
    the Gateway API Inference Extension has it. Decisions are those of `block serve scheduler`, made in this process:
    settings of its table [scheduler] are read as well.
    """
    from services.endpoint_picker.server import serve

    server = server_of(given, cert_path=given["cert_path"])
    settings = given.make(
        PickerSettings, max_body_bytes=server.max_message_mib * MEBIBYTE, max_streams=server.max_concurrency
    )
    instances = given.make(InstanceSourceSettings)
    decisions, tracing = given.make(SchedulerSettings), given.make(TracingSettings)
    serve(settings, server, decisions, instances.source(), instances.poll_s, tracing=tracing)
