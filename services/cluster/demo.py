"""The same traffic by several policies on one emulated cluster, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, pstdev
from typing import Annotated, Any

import numpy as np

from predictor.request import Slo
from services.cluster import ClusterSettings, running
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from services.settings import A30_PROFILE, Option
from simulator.load_plan import Planned, Timing, planned, synthetic
from simulator.load_report import RequestResult, summary

MODEL = "demo"
POLICIES = ("block", "round_robin", "random")
# about ShareGPT's lengths: medians and spreads
PROMPT_TOKENS, OUTPUT_TOKENS = "lognormal:110:1.3", "lognormal:230:0.9"
MAX_TOKENS = 600  # of a prompt or a response: a few very long ones would take most of the time
TIMEOUT_S = 120.0
WARM_UP = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """The cluster and its traffic; times and rates are the engines', which run `speed` times as fast as the clock."""

    instances: Annotated[int, Option("Number of emulated engines.", short="-n")] = 4
    rate: Annotated[float, "Requests per second of engine time."] = 14.0
    seconds: Annotated[float, "Duration of the traffic for each policy, in seconds of engine time."] = 36.0
    speed: Annotated[float, "Engine seconds per second."] = 3.0
    profile: Annotated[
        str, Option("Latency profile of the engines: a shipped one, or a JSON file.", short="-p", metavar="NAME|FILE")
    ] = A30_PROFILE
    policies: Annotated[tuple[str, ...], Option("Policy to compare. Repeatable.", name="policy")] = POLICIES
    seed: Annotated[int, "Seed of the traffic."] = 1

    def __post_init__(self) -> None:
        """Refuse traffic that would not end."""
        for name, most in (("rate", 1000.0), ("seconds", 3600.0), ("speed", 100.0)):
            if not 0 < getattr(self, name) <= most:
                raise ValueError(f"{name}: must be above 0 and at most {most:g}, not {getattr(self, name)}")
        cluster_of(self)


def plan_of(settings: DemoSettings) -> list[Planned]:
    """Draw the traffic, which is the same for every policy."""
    generator = np.random.default_rng(settings.seed)
    num = max(1, round(settings.rate * settings.seconds))
    drawn = synthetic(num, PROMPT_TOKENS, OUTPUT_TOKENS, generator)
    timed = planned(drawn, Timing(kind="poisson", rate=settings.rate), generator)
    return [_shortened(one) for one in timed]


def _shortened(one: Planned) -> Planned:
    return replace(
        one, prompt_tokens=min(one.prompt_tokens, MAX_TOKENS), output_tokens=min(one.output_tokens, MAX_TOKENS)
    )


def cluster_of(settings: DemoSettings) -> ClusterSettings:
    """Make the settings of the cluster."""
    return ClusterSettings(
        instances=settings.instances,
        policies=settings.policies,
        port=0,
        engine_flags=(
            "--profile", settings.profile, "--speed", str(settings.speed), "--served-model-name", MODEL,
            "--no-export-contents",
        ),
        scheduler_flags=("--forecast-always", "--seed", str(settings.seed), "--sidecar-deadline-ms", "500"),
    )  # fmt: skip


async def compare(
    settings: DemoSettings,
    ended: Callable[[str, RequestResult], None],
    opened: Callable[[Mapping[str, str]], None],
    then: Callable[[dict[str, dict[str, Any]]], bool],
) -> None:
    """Start a cluster, send the traffic by each policy in turn, and summarise the results of each.

    `opened` gets the gateways' URLs by policy, `then` the results; if it returns true, the cluster stays up, and the
    traffic goes on by the first policy until the caller is cancelled.
    """
    plan = plan_of(settings)
    form = RequestFormat(model=MODEL, time_scale=settings.speed)
    totals = {}
    async with running(cluster_of(settings)) as cluster:
        opened(cluster.gateway_urls)
        for url in cluster.gateway_urls.values():  # first requests take longer
            await run_plan(plan[:WARM_UP], origin_of(url), form, LoadLimits(timeout_s=TIMEOUT_S), lambda _: None)
        for policy, url in cluster.gateway_urls.items():
            results = await run_plan(
                plan, origin_of(url), form, LoadLimits(timeout_s=TIMEOUT_S), partial(ended, policy)
            )
            totals[policy] = summary(results, Slo())
        url = next(iter(cluster.gateway_urls.values()))
        while then(totals):
            await run_plan(plan, origin_of(url), form, LoadLimits(timeout_s=TIMEOUT_S), lambda _: None)


def table(totals: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Format the comparison as the lines of a table."""
    yield f"{'':14}{'TTFT':>18}{'e2e':>20}{'predicted e2e':>22}{'requests by':>16}"
    figures = f"{'p50':>9}{'p99':>9}{'mean':>10}{'p99':>10}"
    yield f"{'policy':14}{figures}{'median error':>14}{'bias':>8}{'instance':>16}{'failed':>8}"
    for policy, total in totals.items():
        error = (total["forecast_error"] or {}).get("e2e_s")
        predicted = f"{100 * error['median']:>12.1f} %{100 * error['bias']:>+6.1f} %" if error else f"{'none':>22}"
        yield (
            f"{policy:14}{_seconds(total, 'ttft_s', 'p50'):>9}{_seconds(total, 'ttft_s', 'p99'):>9}"
            f"{_seconds(total, 'e2e_s', 'mean'):>10}{_seconds(total, 'e2e_s', 'p99'):>10}{predicted}"
            f"{_spread(list(total['instances'].values())):>16}{total['num_failed']:>8}"
        )


def _seconds(total: Mapping[str, Any], name: str, figure: str) -> str:
    return "none" if total[name] is None else f"{total[name][figure]:.2f} s"


def _spread(counts: Sequence[int]) -> str:
    return f"{fmean(counts):.0f} ± {pstdev(counts):.0f}" if counts else "none"
