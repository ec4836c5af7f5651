"""`block up`: the whole system on this machine."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from predictor.profile import load_profile, profile_names
from services.cli.engine_options import profile_named
from services.logs import LEVELS, configure

if TYPE_CHECKING:
    from services.cluster.settings import VllmSettings


@click.command()
@click.option("--config", "-c", metavar="TOML", default=None, help="Tables [cluster], [engine], [predictor], … .")
@click.option("--instances", "-n", type=int, default=None, help="Engines, each with a sidecar. [default: 4]")
@click.option("--provision", metavar="MIN-MAX", default=None, help="So many instances as a provisioner finds needed.")
@click.option("--schedulers", type=int, default=None, help="Schedulers for each policy. [default: 1]")
@click.option("--policy", multiple=True, help="One or more; each has a gateway of its own. [default: block]")
@click.option("--port", type=int, default=None, help="Of the first gateway. [default: 8000]")
@click.option("--profile", "-p", default=None, help="Latency profile of the engines, by name or JSON file.")
@click.option("--speed", type=float, default=None, help="Engine seconds per second, of emulated engines.")
@click.option("--vllm", metavar="MODEL", default=None, help="Serve this model by vLLM instead of emulating engines.")
@click.option("--vllm-command", metavar="PATH", default=None, help="The executable. [default: vllm]")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
@click.argument("arguments", nargs=-1, metavar="[-- VLLM_ARGUMENTS]")
def up(
    config: str | None,
    *,
    profile: str | None,
    speed: float | None,
    vllm: str | None,
    vllm_command: str | None,
    log_level: str,
    arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run engines, sidecars, a tagger, schedulers and gateways until Ctrl-C; what dies is started again.

    Engines are emulated, or with --vllm real: each on accelerators of its own, or on cores of its own where there are
    none, with our plug-in, which is to be installed beside vLLM. What comes after -- are vllm serve's own arguments.
    """
    from services.cluster.settings import ClusterSettings, profile_in_file, settings_from_file

    configure(log_level, "text")
    given = settings_from_file(config) if config else {}
    flags["policies"] = flags.pop("policy") or None
    given.update({name: value for name, value in flags.items() if value is not None})
    real = vllm_settings(config, vllm, vllm_command, arguments)
    if real is None:
        given["engine_flags"] = engine_flags(profile, speed)
    else:
        if speed is not None:
            raise ValueError("speed: is of emulated engines only")
        if profile is not None:
            profile_named(profile)
        elif config is None or not profile_in_file(config):
            profile = profile_for(real.model)
        given["sidecar_flags"] = () if profile is None else ("--profile", profile)
    settings = ClusterSettings(**given, vllm=real, tables_file=config, log_level=log_level)
    asyncio.run(run_until_told(settings))


def vllm_settings(
    config: str | None, model: str | None, command: str | None, arguments: tuple[str, ...]
) -> VllmSettings | None:
    """Say what vLLM is to serve, by flags and by the file's table [vllm]; None where engines are emulated."""
    from services.cluster.settings import VllmSettings, vllm_from_file

    table = vllm_from_file(config) if config else {}
    if model is not None:
        table["model"] = model
    if "model" not in table:
        if table or command or arguments:
            raise ValueError("vllm: is missing, the model that vLLM is to serve")
        return None
    if command is not None:
        table["command"] = command
    table["arguments"] = (*table.get("arguments", ()), *arguments)
    return VllmSettings(**table)


def profile_for(model: str) -> str:
    """Find the shipped profile of a model; where it is measured on several GPUs only the user can tell."""
    found = [name for name in profile_names() if load_profile(name).model == model]
    if len(found) == 1:
        return found[0]
    which = f"there are {', '.join(found)}" if found else f"none is known for {model}"
    raise ValueError(f"profile: {which}; say --profile NAME|FILE (block profile measure makes one)")


def engine_flags(profile: str | None, speed: float | None) -> tuple[str, ...]:
    """Spell what every engine is told."""
    named = {"--profile": profile, "--speed": speed}
    return tuple(word for flag, value in named.items() if value is not None for word in (flag, str(value)))


async def run_until_told(settings: Any) -> None:
    """Start everything, say where it is, and end it on SIGTERM or SIGINT."""
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
            for policy, url in cluster.gateway_urls.items():
                print(f"{policy}: {url}/v1", file=sys.stderr)
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
