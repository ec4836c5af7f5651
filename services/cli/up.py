"""`block up`: the whole system on this machine."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import click

from services.log_lines import LEVELS, configure


@click.command()
@click.option("--config", "-c", metavar="TOML", default=None, help="Tables [cluster], [engine], [predictor], … .")
@click.option("--instances", "-n", type=int, default=None, help="Emulated engines, each with a sidecar. [default: 4]")
@click.option("--schedulers", type=int, default=None, help="Schedulers for each policy. [default: 1]")
@click.option("--policy", multiple=True, help="One or more; each has a gateway of its own. [default: block]")
@click.option("--port", type=int, default=None, help="Of the first gateway. [default: 8000]")
@click.option("--profile", "-p", default=None, help="Latency profile of the engines.")
@click.option("--speed", type=float, default=None, help="Engine seconds per second.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
def up(config: str | None, *, profile: str | None, speed: float | None, log_level: str, **flags: Any) -> None:
    """Run engines (emulated), sidecars, a tagger, schedulers and gateways until Ctrl-C; what dies is started again."""
    from services.cluster.settings import ClusterSettings, settings_from_file

    configure(log_level, "text")
    given = settings_from_file(config) if config else {}
    flags["policies"] = flags.pop("policy") or None
    given.update({name: value for name, value in flags.items() if value is not None})
    settings = ClusterSettings(
        **given, tables_file=config, engine_flags=engine_flags(profile, speed), log_level=log_level
    )
    asyncio.run(run_until_told(settings))


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
            await stop.wait()
    except StartError as error:
        raise ValueError(str(error)) from None
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        waiting.cancel()
