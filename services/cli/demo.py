"""`block demo`: compares policies on an emulated cluster, in a minute or two."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from services.cli.engine_options import profile_named
from services.cli.settings_options import SettingValues, settings_options
from services.cli.warm import warmed
from services.cluster.demo import DemoSettings
from services.logs import configure
from services.settings import CommandSettings

if TYPE_CHECKING:
    from simulator.load_report import RequestResult

SETTINGS = CommandSettings("demo", DemoSettings, file="none", environment=())


@click.command()
@settings_options(SETTINGS)
@click.option(
    "--stay", is_flag=True, help="Keep the cluster and its traffic up until Ctrl-C, to look at the live page."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo(given: SettingValues, *, stay: bool, as_json: bool) -> int:
    """Run an emulated cluster, send it the same traffic by each policy, and compare the results.

    All times in the table are in engine time: by default those of Llama-2-7B on an A30.
    """
    from services.cluster import StartError
    from services.cluster.demo import compare, plan_of

    settings = given.make(DemoSettings)
    profile_named(settings.profile)
    configure("error", "text")
    num = len(plan_of(settings))
    warmed()
    print(
        f"starting {settings.instances} emulated engines ({settings.profile}, at {settings.speed:g} times its speed), "
        f"their sidecars, a tagger, and a gateway for each of {len(settings.policies)} policies",
        file=sys.stderr,
    )
    progress = DemoProgress(num)
    start_s = time.monotonic()
    results: dict[str, dict[str, Any]] = {}

    def then(totals: dict[str, dict[str, Any]]) -> bool:
        if not results:
            results.update(totals)
            _report(settings, totals, num, time.monotonic() - start_s, as_json=as_json)
            if stay:
                print("the cluster stays up, and traffic goes on, until Ctrl-C", file=sys.stderr)
        return stay

    try:
        asyncio.run(_until_stopped(compare(settings, progress.ended, _print_pages, then)))
    except StartError as error:
        raise ValueError(str(error)) from None
    except asyncio.CancelledError:
        if not results:
            raise click.Abort from None
    return 0 if all(total["num_ok"] for total in results.values()) else 1


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run until it ends, or is cancelled by SIGINT or SIGTERM; the cluster is then stopped in order."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await task


def _print_pages(gateway_urls: Mapping[str, str]) -> None:
    for policy, url in gateway_urls.items():
        print(f"live page of {policy}: {url}/ui", file=sys.stderr)


def _report(
    settings: DemoSettings, totals: Mapping[str, Mapping[str, Any]], num: int, took_s: float, *, as_json: bool
) -> None:
    from services.cluster.demo import table

    if as_json:
        json.dump({"settings": asdict(settings), "policies": totals}, sys.stdout)
        print(flush=True)
    else:
        print("\n".join(table(totals)), flush=True)
        print(f"{num} requests by each policy, {took_s:.0f} s in all", file=sys.stderr)


class DemoProgress:
    """Prints the progress of each policy: a counter on a terminal, otherwise one line at the end."""

    def __init__(self, num: int) -> None:
        """Take the number of requests of each policy."""
        self._num = num
        self._counts: dict[str, int] = {}

    def ended(self, policy: str, _: RequestResult) -> None:
        """Count a request that has ended."""
        count = self._counts[policy] = self._counts.get(policy, 0) + 1
        last = count == self._num
        if sys.stderr.isatty() and (last or count % 10 == 0):
            print(f"\r{policy}: {count} of {self._num} requests", end="\n" if last else "", file=sys.stderr, flush=True)
        elif last:
            print(f"{policy}: {count} requests completed", file=sys.stderr)
