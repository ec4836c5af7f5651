"""`block demo`: the system at work, in a minute or two."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from services.cli.engine_options import profile_named
from services.cli.warm import warmed
from services.logs import configure

if TYPE_CHECKING:
    from simulator.load_report import RequestResult


@click.command()
@click.option("--instances", "-n", type=int, default=4, show_default=True, help="Emulated engines.")
@click.option("--rate", type=float, default=14.0, show_default=True, help="Requests per second of engine time.")
@click.option("--seconds", type=float, default=36.0, show_default=True, help="Of traffic for each policy, engine time.")
@click.option("--speed", type=float, default=3.0, show_default=True, help="Engine seconds per second.")
@click.option("--profile", "-p", default="llama-2-7b-a30", show_default=True, help="Latency profile of the engines.")
@click.option("--policy", "policies", multiple=True, help="To compare. [default: block, round_robin, random]")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the traffic.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def demo(*, as_json: bool, policies: tuple[str, ...], **flags: Any) -> int:
    """Run an emulated cluster, send it the same burst of traffic by each policy, and compare.

    All times in the table are the engines' own: those of Llama-2-7B on an A30, unless another profile is named.
    """
    from services.cluster import StartError
    from services.cluster.demo import POLICIES, DemoSettings, compare, plan_of, table

    settings = DemoSettings(policies=policies or POLICIES, **flags)
    profile_named(settings.profile)
    configure("error", "text")
    num = len(plan_of(settings))
    warmed()
    print(
        f"starting {settings.instances} emulated engines ({settings.profile}, at {settings.speed:g} times its speed), "
        f"a sidecar beside each, a tagger, {len(settings.policies)} schedulers and gateways",
        file=sys.stderr,
    )
    progress = DemoProgress(num)
    start_s = time.monotonic()
    try:
        totals = asyncio.run(compare(settings, lambda _: None, progress.ended))
    except StartError as error:
        raise ValueError(str(error)) from None
    if as_json:
        json.dump({"settings": {**flags, "policies": settings.policies}, "policies": totals}, sys.stdout)
        print()
    else:
        print("\n".join(table(totals)))
        print(f"{num} requests by each policy, {time.monotonic() - start_s:.0f} s in all", file=sys.stderr)
    return 0 if all(total["num_ok"] for total in totals.values()) else 1


class DemoProgress:
    """A line per policy, that counts on a terminal and is written once elsewhere."""

    def __init__(self, num: int) -> None:
        """Expect so many requests by each policy."""
        self._num = num
        self._counts: dict[str, int] = {}

    def ended(self, policy: str, _: RequestResult) -> None:
        """Count a request."""
        count = self._counts[policy] = self._counts.get(policy, 0) + 1
        last = count == self._num
        if sys.stderr.isatty() and (last or count % 10 == 0):
            print(f"\r{policy}: {count} of {self._num} requests", end="\n" if last else "", file=sys.stderr, flush=True)
        elif last:
            print(f"{policy}: {count} requests sent and answered", file=sys.stderr)
