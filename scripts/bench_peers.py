"""The gateway beside other routers: processor time per request, added time to first token, requests per second.

All routers run at the same time before the same four stand-in engines. One client sends requests to each of them in
turn, round after round; the reference is the same client with the engines directly, in the same rounds. Prompts have
2 KB: the first half is one of 16 that requests share, the second differs. Everything is on loopback, and the load and
the stand-ins use the same cores.

- `cpu_ms_per_request.{router}`: processor time (user and system) of all of a router's processes, with engines that
  answer at once and `--at-a-time` concurrent requests; a scheduler is part of its router, sidecars are not.
- `cpu_ms_per_request.{router}.paced`: the same with engines at an engine's pace (first event after 40 ms, then 15 more,
  one every 8 to 12 ms), 16 concurrent requests that do not start together: each event is forwarded by itself.
- `added_ttft_ms.{router}.p50|p99`: at an engine's pace, time to the first event, minus the same without a router.
- `requests_per_s.{router}`: the throughput with engines that answer at once; `direct` is without a router.

A number is the median over the rounds. Block's rows use stand-ins for sidecars that answer at once. vllm-router is
installed from PyPI if it is missing; a router that cannot be run, or fails, is skipped and listed with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import uvloop

from scripts import peers
from scripts.bench_requests import FIRST_MS, GAPS_MS, PLACE, PROMPT_BYTES, request_body, text_of
from scripts.load_client import LoadSample, load, load_through, quantile
from scripts.processes import BLOCK, Running, block_serving, instance_flags, sidecars_running, stand_in
from scripts.report import report
from services.http.client import HttpClient

NUM_ENGINES = 4
ROUNDS = 5
WARM_UP = 400  # requests, before all rounds
PACED_AT_A_TIME, PACED_S = 16, 0.2  # the duration of such a request
NUM_SHARED = 16  # first halves of prompts
DEADLINE_MS = "1000"  # long, so that no sidecar misses it because the machine is busy
REST_S = 0.1  # between two routers
DIRECT = "direct"
NOTHING = "-"
HEADINGS = (
    ("CPU ms/request", "cpu_ms_per_request.{}", "{:.2f}"),
    ("the same, paced", "cpu_ms_per_request.{}.paced", "{:.2f}"),
    ("added TTFT P50, ms", "added_ttft_ms.{}.p50", "{:.2f}"),
    ("P99, ms", "added_ttft_ms.{}.p99", "{:.2f}"),
    ("requests/s", "requests_per_s.{}", "{:,.0f}"),
)


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of everything")
    parser.add_argument("--requests", type=int, default=3000, help="per round with engines that answer at once")
    parser.add_argument("--paced-requests", type=int, default=400, help="per round with engines at an engine's pace")
    parser.add_argument("--at-a-time", type=int, default=32, help="requests to engines that answer at once")
    parser.add_argument("--engines-per-sidecar", type=int, default=16)
    parser.add_argument("--row", action="append", choices=list(ROWS), help="Repeatable; the usual ones by default.")
    parser.add_argument("--install", action="store_true", help="Install peers again if they are installed.")
    parser.add_argument(
        "--production-stack", default="", metavar="SOURCE", help="Its router's source tree, or a wheel."
    )
    arguments = parser.parse_args()
    with ExitStack() as stack:
        engines = [stack.enter_context(stand_in("engine")).url for _ in range(NUM_ENGINES)]
        world = World(engines=engines, arguments=arguments)
        names = arguments.row or [name for name, row in ROWS.items() if row.usual]
        ways = [way_through(name, world, stack) for name in names]
        direct = Way(name=DIRECT)
        uvloop.run(measured(world, direct, ways))
    results = list(results_of(direct, [way for way in ways if not way.failure]))
    skipped = {way.name: way.failure for way in ways if way.failure}
    if arguments.json:
        report("peers", results, as_json=True, versions=world.versions, skipped=skipped)
        return
    for line in table_of(results, [way.name for way in ways if not way.failure]):
        print(line)
    print()
    for name, version in world.versions.items():
        print(f"{name}: version {version}")
    for name, failure in skipped.items():
        print(f"{ROWS[name].title}: skipped, {failure}")


# Routers.


@dataclass(kw_only=True)
class World:
    """The engines and options with which routers are started, and the versions of the routers."""

    engines: Sequence[str]
    arguments: argparse.Namespace
    versions: dict[str, str] = field(default_factory=dict)

    def installing(self, peer: str) -> bool:
        """Return whether a peer is to be installed again: at most once."""
        return self.arguments.install and peer not in self.versions


Start = Callable[[World], AbstractContextManager[list[Running]]]


@dataclass(frozen=True, kw_only=True)
class RouterRow:
    """A router with a policy; the first of its processes receives the requests."""

    title: str
    start: Start
    usual: bool = True
    gateway: bool = False  # Block's, which reports when nothing is left to do in the background


def with_scheduler(policy: str) -> Start:
    """Return the start of a gateway and a scheduler with a policy."""

    @contextmanager
    def start(world: World) -> Iterator[list[Running]]:
        with ExitStack() as stack:
            sidecars = stack.enter_context(sidecars_running(NUM_ENGINES, world.arguments.engines_per_sidecar))
            flags = ["--policy", policy, "--sidecar-deadline-ms", DEADLINE_MS]
            scheduler = stack.enter_context(
                block_serving("scheduler", *flags, *instance_flags(sidecars, world.engines))
            )
            yield [stack.enter_context(block_serving("gateway", "--scheduler", f"{PLACE}:{scheduler.port}")), scheduler]

    return start


def in_process(policy: str) -> Start:
    """Return the start of a gateway that decides in its process."""

    @contextmanager
    def start(world: World) -> Iterator[list[Running]]:
        known = gateway_help()
        if "--decide " not in known:
            raise peers.UnavailableError("block serve gateway does not know --decide")
        with ExitStack() as stack:
            sidecars = stack.enter_context(sidecars_running(NUM_ENGINES, world.arguments.engines_per_sidecar))
            flags = ["--decide", "in-process", "--policy", policy, *instance_flags(sidecars, world.engines)]
            if "--sidecar-deadline-ms " in known:
                flags += ["--sidecar-deadline-ms", DEADLINE_MS]
            yield [stack.enter_context(block_serving("gateway", *flags))]

    return start


def gateway_help() -> str:
    """Return the gateway's help, which has the flags that it knows."""
    return subprocess.run([BLOCK, "serve", "gateway", "--help"], capture_output=True, text=True, check=True).stdout


def vllm_router(policy: str) -> Start:
    """Return the start of vllm-router."""

    @contextmanager
    def start(world: World) -> Iterator[list[Running]]:
        version = peers.install_rust_router(again=world.installing(peers.RUST_ROUTER))
        world.versions[peers.RUST_ROUTER] = version
        with peers.rust_router_before(world.engines, policy) as running:
            yield [running]

    return start


def production_stack(policy: str) -> Start:
    """Return the start of production-stack's router."""

    @contextmanager
    def start(world: World) -> Iterator[list[Running]]:
        again = world.installing(peers.PRODUCTION_STACK)
        version = peers.install_production_stack(world.arguments.production_stack, again=again)
        world.versions[peers.PRODUCTION_STACK] = version
        with peers.production_stack_before(world.engines, policy) as running:
            yield [running]

    return start


ROWS = {
    "scheduler-lmetric": RouterRow(title="gateway + scheduler, lmetric", start=with_scheduler("lmetric"), gateway=True),
    "scheduler-block": RouterRow(
        title="gateway + scheduler, block", start=with_scheduler("block"), gateway=True, usual=False
    ),
    "in-process-lmetric": RouterRow(title="gateway in-process, lmetric", start=in_process("lmetric"), gateway=True),
    "in-process-block": RouterRow(title="gateway in-process, block", start=in_process("block"), gateway=True),
    "vllm-router-round_robin": RouterRow(title="vllm-router, round_robin", start=vllm_router("round_robin")),
    "vllm-router-random": RouterRow(title="vllm-router, random", start=vllm_router("random"), usual=False),
    "vllm-router-power_of_two": RouterRow(
        title="vllm-router, power_of_two", start=vllm_router("power_of_two"), usual=False
    ),
    "vllm-router-cache_aware": RouterRow(title="vllm-router, cache_aware (default)", start=vllm_router("cache_aware")),
    "production-stack-roundrobin": RouterRow(
        title="production-stack, roundrobin", start=production_stack("roundrobin")
    ),
    "production-stack-prefixaware": RouterRow(
        title="production-stack, prefixaware", start=production_stack("prefixaware")
    ),
}


@dataclass(kw_only=True)
class Way:
    """A way to the engines, through a router or direct: its samples of each round, or the reason of its failure."""

    name: str
    router: list[Running] = field(default_factory=list)
    failure: str = ""
    at_once: list[LoadSample] = field(default_factory=list)
    paced: list[LoadSample] = field(default_factory=list)


def way_through(name: str, world: World, stack: ExitStack) -> Way:
    """Start a router; record the failure if it cannot be started."""
    try:
        return Way(name=name, router=stack.enter_context(ROWS[name].start(world)))
    except (peers.UnavailableError, RuntimeError, OSError, subprocess.SubprocessError) as failed:
        return Way(name=name, failure=one_line(failed))


def one_line(failed: Exception) -> str:
    """Return an error message as one line."""
    return " ".join(str(failed).split()) or type(failed).__name__


# Measuring.


async def measured(world: World, direct: Way, ways: Sequence[Way]) -> None:
    """Send the load in turns, so that all ways see the same machine; a way that fails is skipped from then on."""
    arguments, prompts, client = world.arguments, Prompts(), HttpClient()
    warm_up = prompts.requests(WARM_UP)
    for way in (direct, *ways):
        await sent(client, world, way, warm_up, arguments.at_a_time)
    for _ in range(arguments.rounds):
        at_once, paced = prompts.requests(arguments.requests), prompts.paced_requests(arguments.paced_requests)
        for way in (direct, *ways):
            way.at_once += await sent(client, world, way, at_once, arguments.at_a_time)
        for way in (direct, *ways):
            way.paced += await sent(client, world, way, paced, PACED_AT_A_TIME, spread_s=PACED_S)
    client.close()


async def sent(
    client: HttpClient, world: World, way: Way, bodies: Sequence[bytes], at_a_time: int, *, spread_s: float = 0.0
) -> list[LoadSample]:
    """Send requests one way; return no sample if it fails or has failed."""
    if way.failure:
        return []
    await asyncio.sleep(REST_S)
    if way.name == DIRECT:
        return [await load(client, world.engines, bodies, at_a_time, spread_s=spread_s)]
    gateway = ROWS[way.name].gateway
    try:
        return [await load_through(client, way.router, bodies, at_a_time, spread_s=spread_s, gateway=gateway)]
    except (RuntimeError, OSError) as failed:
        ended = [part.process.returncode for part in way.router if part.process.poll() is not None]
        way.failure = one_line(failed) + "".join(f"; it ended with status {status}" for status in ended)
        return []


class Prompts:
    """Draws requests: the first half of a prompt is shared with others, the second is not."""

    def __init__(self) -> None:
        """Make the texts that are drawn from."""
        self._rng = random.Random(0)
        self._first_halves = [text_of(self._rng, PROMPT_BYTES // 2) for _ in range(NUM_SHARED)]
        self._text = text_of(self._rng, 100 * PROMPT_BYTES)

    def requests(self, num: int) -> list[bytes]:
        """Draw requests that are answered at once."""
        return [request_body(self._prompt()) for _ in range(num)]

    def paced_requests(self, num: int) -> list[bytes]:
        """Draw requests that are answered at an engine's pace."""
        return [request_body(self._prompt(), FIRST_MS, self._rng.choice(GAPS_MS)) for _ in range(num)]

    def _prompt(self) -> str:
        start = self._rng.randrange(len(self._text) - PROMPT_BYTES // 2)
        return self._rng.choice(self._first_halves) + self._text[start : start + PROMPT_BYTES // 2]


def results_of(direct: Way, ways: Sequence[Way]) -> Iterator[dict[str, object]]:
    """Summarise the samples as named numbers."""
    for fraction, part in FRACTIONS.items():
        times = [quantile(sample.ttft_ms, part) for sample in direct.paced]
        yield median(f"ttft_ms.{DIRECT}.{fraction}", "ms", direct.paced, times)
    yield median(f"requests_per_s.{DIRECT}", "requests/s", direct.at_once, [one.rate() for one in direct.at_once])
    for way in ways:
        name, at_once, paced = way.name, way.at_once, way.paced
        yield median(f"cpu_ms_per_request.{name}", "ms", at_once, [sample.cpu_ms() for sample in at_once])
        yield median(f"cpu_ms_per_request.{name}.paced", "ms", paced, [sample.cpu_ms() for sample in paced])
        for fraction, part in FRACTIONS.items():
            pairs = zip(paced, direct.paced, strict=True)
            added = [quantile(through.ttft_ms, part) - quantile(straight.ttft_ms, part) for through, straight in pairs]
            yield median(f"added_ttft_ms.{name}.{fraction}", "ms", paced, added)
        yield median(f"requests_per_s.{name}", "requests/s", at_once, [sample.rate() for sample in at_once])


FRACTIONS = {"p50": 0.5, "p99": 0.99}


def median(name: str, unit: str, samples: Sequence[LoadSample], values: Sequence[float]) -> dict[str, object]:
    """Return one result, the median of the rounds; `n` is the number of requests in all rounds."""
    num = sum(len(sample.e2e_ms) for sample in samples)
    return {"name": name, "value": statistics.median(values), "unit": unit, "n": num}


def table_of(results: Sequence[dict[str, object]], names: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown table with a row for each router."""
    values = {result["name"]: result["value"] for result in results}
    yield "| router | " + " | ".join(heading for heading, _, _ in HEADINGS) + " |"
    yield "|---" + len(HEADINGS) * "|---:" + "|"
    for name in (DIRECT, *names):
        title = ROWS[name].title if name in ROWS else "engines, directly"
        cells = [
            form.format(values[key.format(name)]) if key.format(name) in values else NOTHING
            for _, key, form in HEADINGS
        ]
        yield f"| {title} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
