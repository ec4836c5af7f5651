"""`block up`: the whole system on this machine."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import click

from services.cli.engine_options import profile_named
from services.cli.settings_options import SettingValues, settings_options
from services.cluster.settings import (
    ClusterSettings,
    VllmSettings,
    profile_in_file,
    settings_from_file,
    vllm_from_file,
)
from services.logs import configure
from services.objectives import objectives_from_file
from services.settings import CommandSettings, SettingsPart

SETTINGS = CommandSettings(
    "cluster",
    SettingsPart(ClusterSettings, deferred=True),
    SettingsPart(VllmSettings, deferred=True, table="vllm"),
    file="command",
    environment=("BLOCK_CLUSTER",),
)


@click.command()
@click.option("--config", "-c", metavar="TOML", default=None, help="Settings file: [cluster], [vllm], [engine], … .")
@settings_options(SETTINGS)
@click.option("--profile", "-p", metavar="NAME|FILE", default=None, help="Latency profile of the engines.")
@click.option("--speed", type=float, default=None, help="Engine seconds per second, of emulated engines.")
@click.argument("arguments", nargs=-1, metavar="[-- VLLM_ARGUMENTS]")
def up(
    given: SettingValues,
    config: str | None,
    profile: str | None,
    speed: float | None,
    arguments: tuple[str, ...],
) -> None:
    """Run engines, sidecars, a tagger and gateways, and schedulers where asked for; restart a process that exits.

    Engines are emulated, or run vLLM with --vllm: each on its own accelerators, or on its own CPU cores where there are
    none. vLLM needs the plug-in deploy/vllm_plugin in its environment. Words after -- are arguments of `vllm serve`.
    """
    flags = given.given(ClusterSettings)
    table = settings_from_file(config) if config else {}
    table.update(flags)
    vllm = vllm_settings(config, given.given(VllmSettings), arguments)
    if vllm is None:
        table["engine_flags"] = engine_flags(profile, speed)
    else:
        if speed is not None:
            raise ValueError("speed: is of emulated engines only")
        if profile is not None:
            profile_named(profile)
        elif config is None or not profile_in_file(config):
            profile = profile_for(vllm.model)
        table["sidecar_flags"] = () if profile is None else ("--profile", profile)
    settings = ClusterSettings(**table, vllm=vllm, tables_file=config)
    if settings.objectives:
        objectives_from_file(settings.objectives)  # refused before anything is started
    configure(settings.log_level, "text")
    asyncio.run(run_until_stopped(settings))


def vllm_settings(config: str | None, flags: dict[str, Any], arguments: tuple[str, ...]) -> VllmSettings | None:
    """Combine the flags with the file's table [vllm]; None where engines are emulated."""
    table = vllm_from_file(config) if config else {}
    table.update(flags)
    if "model" not in table:
        if table or arguments:
            raise ValueError("vllm: is missing, the model that vLLM is to serve")
        return None
    table["arguments"] = (*table.get("arguments", ()), *arguments)
    return VllmSettings(**table)


def profile_for(model: str) -> str:
    """Find the shipped profile of a model; one that was measured on several GPUs must be named by the user."""
    from predictor.profile import load_profile, profile_names

    found = [name for name in profile_names() if load_profile(name).model == model]
    if len(found) == 1:
        return found[0]
    which = f"there are {', '.join(found)}" if found else f"none is known for {model}"
    raise ValueError(f"profile: {which}; give --profile NAME|FILE (block profile measure makes one)")


def engine_flags(profile: str | None, speed: float | None) -> tuple[str, ...]:
    """Write the flags of every engine."""
    named = {"--profile": profile, "--speed": speed}
    return tuple(word for flag, value in named.items() if value is not None for word in (flag, str(value)))


async def run_until_stopped(settings: ClusterSettings) -> None:
    """Start the cluster, print its addresses, and stop it on SIGTERM or SIGINT."""
    from services.cluster import StartError, running

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.current_task()
    waiting = asyncio.create_task(stop.wait())
    waiting.add_done_callback(lambda _: starting.cancel() if starting and not started else None)
    started = False
    try:
        async with running(settings) as cluster:
            started = True
            if cluster.security is not None:
                url = next(iter(cluster.gateway_urls.values()))
                folder, ca_file = cluster.security.folder, cluster.security.ca_file
                client = f"--tls-ca {ca_file} --tls-cert {folder}/client.crt --tls-key {folder}/client.key"
                print(f"TLS: curl --cacert {ca_file} {url}/v1/models", file=sys.stderr)
                print(f"TLS of commands: block top {client}", file=sys.stderr)
            for policy, url in cluster.gateway_urls.items():
                print(f"{policy}: {url}/v1", file=sys.stderr)
                print(f"live page of {policy}: {url}/ui", file=sys.stderr)
            for policy, addresses in cluster.scheduler_addresses.items():
                print(f"scheduler of {policy}: block explain REQUEST_ID --scheduler {addresses[0]}", file=sys.stderr)
            for policy, urls in cluster.operator_urls.items():
                flags = " ".join(f"--operator {url}" for url in urls)
                print(f"instances of {policy}: block drain NAME {flags}", file=sys.stderr)
            if settings.instance_range is None and not settings.mirror:
                print(f"engines: block observe --state-file {cluster.folder}/NAME.state", file=sys.stderr)
            if cluster.provisioner_address:
                print(f"provisioner: block provision status --address {cluster.provisioner_address}", file=sys.stderr)
            await stop.wait()
    except StartError as error:
        raise ValueError(str(error)) from None
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        waiting.cancel()
