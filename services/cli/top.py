"""`block top`: what a running cluster does, again and again."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence

import click

from services.cli.caller_key import api_key_option
from services.cli.scheduler_client import scheduler_option
from services.cli.tls_options import tls_options
from services.security.own_key import OwnKey
from services.settings import PORTS

SORTS = ("name", "waiting", "running", "kv", "drain", "requests")
CLEAR, HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


@click.command()
@scheduler_option
@click.option(
    "--metrics",
    metavar="URL",
    multiple=True,
    default=(f"http://127.0.0.1:{PORTS['gateway']}",),
    show_default=True,
    help="Server of /metrics: a gateway, or a scheduler's --metrics-port. Repeatable.",
)
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    help="Time between two readings, over which rates are counted, in seconds.",
)
@click.option("--sort", type=click.Choice(SORTS), default="name", show_default=True, help="Order of the instances.")
@click.option("--once", is_flag=True, help="Print one reading and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per reading, each on a line.")
@api_key_option
@tls_options
def top(
    *,
    scheduler: tuple[str, ...],
    metrics: tuple[str, ...],
    interval_s: float,
    sort: str,
    once: bool,
    as_json: bool,
    key: OwnKey,
) -> None:
    """Show the instances of a running cluster: requests, KV cache, forecasts, decisions per second.

    Instances are those of the first scheduler that replies, as their sidecars see them: requests that run, wait and are
    reserved, the KV cache, prompt tokens to compute, the predicted time until all requests have ended, real over
    predicted step time, and the mean error of forecasts. Rates and latencies are those since the reading before, from
    the metrics. Ctrl-C ends it.
    """
    from services.http.origin import origin_of
    from services.instances.instance import require_address

    for address in scheduler:
        require_address("scheduler", address)
    for url in metrics:
        try:
            origin_of(url)
        except ValueError as error:
            raise ValueError(f"metrics: {error}") from None
    try:
        asyncio.run(_run(scheduler, metrics, interval_s, sort, key, once=once, as_json=as_json))
    except KeyboardInterrupt:
        click.echo()


async def _run(
    schedulers: Sequence[str],
    metrics: Sequence[str],
    interval_s: float,
    sort: str,
    key: OwnKey,
    *,
    once: bool,
    as_json: bool,
) -> None:
    from services.top.table import lines_of
    from services.top.watching import watching

    async with watching(schedulers, metrics, key) as watch:
        reading = await watch.first(interval_s)
        if once and not reading.instances and reading.problems:
            raise click.ClickException("; ".join(reading.problems))
        in_place = sys.stdout.isatty() and not (once or as_json)
        if in_place:
            click.echo(CLEAR, nl=False)
        while True:
            if as_json:
                click.echo(json.dumps(reading.json(), allow_nan=False))
            elif in_place:
                size = shutil.get_terminal_size()
                lines = [line[: size.columns] for line in lines_of(reading, sort, size.lines - 1)]
                click.echo(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW, nl=False)
            else:
                click.echo("\n".join([*lines_of(reading, sort), ""][: None if not once else -1]))
            if once:
                return
            await asyncio.sleep(interval_s)
            reading = await watch.read()
