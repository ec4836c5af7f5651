"""`block serve engine`: an emulated engine behind vLLM's HTTP surface."""

from __future__ import annotations

import click

from predictor.mirror.engine_kinds import SGLANG
from services.cli.engine_options import ENGINE_CONFIG, EngineModelSettings, engine_of
from services.cli.settings_options import SettingValues, settings_options, tls_of
from services.emulator.settings import STATE_FOLDER, EmulatorSettings
from services.logs import LogSettings
from services.security.settings import TlsSettings
from services.settings import CommandSettings

SETTINGS = CommandSettings("engine", EmulatorSettings, LogSettings, TlsSettings, EngineModelSettings, ENGINE_CONFIG)


@click.command()
@settings_options(SETTINGS)
def engine(given: SettingValues) -> None:
    """Emulate an engine behind vLLM's HTTP API, with the step times of a latency profile.

    The length of a response is what the request asks for (max_tokens with ignore_eos, or the header
    x-block-output-tokens); other requests draw theirs from a seeded distribution. POST /admin/fault, from this machine
    only, injects faults: {"slow": FACTOR}, {"hang": true}, {"refuse": true}, {"crash": true}; {} ends them.

    With --engine-kind sglang it is an emulated SGLang: its local scheduler, metrics and /server_info.

    With --kv-role the engine serves prefill and decode legs (kv_transfer_params) as vLLM with its NIXL connector.
    """
    from services.emulator.server import serve, with_adapters

    given.make(LogSettings).apply()
    given.warn_of_former_names()
    profile, config = engine_of(given, sglang=given["engine_kind"] == SGLANG)
    state_file = given["state_file"]
    if state_file is None:
        name = given["name"] or f"engine-{given['port']}"
        state_file = f"{STATE_FOLDER}/{name}.state"
    settings = given.make(
        EmulatorSettings,
        model=given["served_model_name"] or profile.model,
        state_file="" if state_file == "none" else state_file,
        tls=tls_of(given),
    )
    serve(settings, with_adapters(config, enabled=settings.enable_lora), profile)
