"""`block serve gateway`: the OpenAI-compatible HTTP server in front of the engines."""

from __future__ import annotations

import os

import click

from services.cli.settings_options import SettingValues, server_of, settings_options
from services.gateway.settings import GatewaySettings
from services.logs import LogSettings
from services.rpc.settings import ServerSettings
from services.settings import PORTS, CommandSettings, SettingsPart

MEBIBYTE = 2**20
KEY_VARIABLE = "BLOCK_GATEWAY_API_KEY"
SETTINGS = CommandSettings(
    "gateway",
    SettingsPart(ServerSettings, defaults={"port": PORTS["gateway"]}),
    LogSettings,
    SettingsPart(GatewaySettings, defaults={"schedulers": (f"127.0.0.1:{PORTS['scheduler']}",)}),
)


@click.command()
@settings_options(SETTINGS)
def gateway(given: SettingValues) -> None:
    """Serve the OpenAI API, and send each request to the instance that the scheduler chooses.

    The environment variable BLOCK_GATEWAY_API_KEY may hold an API key, or several with commas, in place of a file.
    """
    from services.gateway.keys import ApiKeys
    from services.gateway.server import serve

    server = server_of(given)
    settings = given.make(
        GatewaySettings, max_body_bytes=server.max_message_mib * MEBIBYTE, max_concurrency=server.max_concurrency
    )
    keys = os.environ.get(KEY_VARIABLE, "").split(",")
    accepted = ApiKeys(tuple(key.strip() for key in keys if key.strip()))
    if settings.api_key_file:
        accepted = ApiKeys.from_file(settings.api_key_file)
    serve(settings, server, accepted)
