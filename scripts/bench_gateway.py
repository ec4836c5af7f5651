"""What the gateway adds to a request: processor time and time to first token, against engines reached directly.

Four stand-in engines that answer at once or at an engine's pace, a stand-in scheduler that sends requests to them in
turn, over real gRPC, and the gateway are processes of their own. Prompts have 2 KB, responses are streams of 16 events.
Everything is on loopback.

- `router_cpu_ms_per_request`: processor time (user and system) of the gateway's process, over all requests of the runs
  with engines that answer at once, 16 concurrently; every request is scheduled, streamed and released.
- `added_ttft_ms`: 16 concurrently, engines at an engine's pace (first event after 40 ms, then one every 8 to 12 ms,
  drawn per request, so that requests do not start together), time to the first event through the gateway, minus the
  same directly, both in this run, alternating.
- `requests_per_s`: the throughput with 1 and 16 concurrent requests; the load and the stand-ins use the same cores.

Direct and routed runs alternate for several rounds; a number is the median over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import uvloop

from scripts.bench_requests import FIRST_MS, GAPS_MS, PLACE, PROMPT_BYTES, request_body, text_of
from scripts.load_client import LoadSample, load, load_through, quantile
from scripts.processes import Running, block_serving, stand_in
from scripts.report import report
from services.http.client import HttpClient

NUM_ENGINES = 4
ROUNDS = 5
WARM_UP = 200


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--targets", action="store_true", help="requests have targets, which the gateway measures")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of everything")
    parser.add_argument("--requests", type=int, default=1500, help="per round with engines that answer at once")
    parser.add_argument("--paced-requests", type=int, default=300, help="per round with engines at an engine's pace")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        engines = [stack.enter_context(stand_in("engine")) for _ in range(NUM_ENGINES)]
        scheduler = stack.enter_context(stand_in("scheduler", *(engine.url for engine in engines)))
        gateway = stack.enter_context(block_serving("gateway", "--scheduler", f"{PLACE}:{scheduler.port}"))
        cases = cases_of(arguments.requests, arguments.paced_requests, has_targets=arguments.targets)
        results = uvloop.run(measured(engines, gateway, cases, arguments.rounds))
    report("gateway", results, as_json=arguments.json)


@dataclass(kw_only=True)
class Case:
    """A number of requests with a concurrency, and the samples of each round."""

    name: str
    bodies: list[bytes]
    num: int
    at_a_time: int
    direct: list[LoadSample] = field(default_factory=list)
    routed: list[LoadSample] = field(default_factory=list)

    def requests(self) -> list[bytes]:
        """Draw the requests of a round: the same in every round."""
        return random.Random(0).choices(self.bodies, k=self.num)


def cases_of(num: int, num_paced: int, *, has_targets: bool) -> list[Case]:
    """Return all cases."""
    prompt = text_of(random.Random(0), PROMPT_BYTES)
    at_once = [request_body(prompt, has_targets=has_targets)]
    paced = [request_body(prompt, FIRST_MS, gap_ms, has_targets=has_targets) for gap_ms in GAPS_MS]
    return [
        Case(name="c1", bodies=at_once, num=max(1, num // 3), at_a_time=1),
        Case(name="c16", bodies=at_once, num=num, at_a_time=16),
        Case(name="paced", bodies=paced, num=num_paced, at_a_time=16),
    ]


async def measured(engines: list[Running], gateway: Running, cases: list[Case], rounds: int) -> list[dict[str, object]]:
    """Run all cases, direct and through the gateway in turn, so that both see the same machine."""
    urls = [engine.url for engine in engines]
    client = HttpClient()
    warm_up = Case(name="warm-up", bodies=cases[0].bodies, num=WARM_UP, at_a_time=16)
    for case in (warm_up, *rounds * cases):
        case.direct.append(await load(client, urls, case.requests(), case.at_a_time))
        case.routed.append(await load_through(client, [gateway], case.requests(), case.at_a_time))
    client.close()
    return list(results_of({case.name: case for case in cases}))


def results_of(cases: dict[str, Case]) -> Iterator[dict[str, object]]:
    """Summarise the samples as named numbers."""
    for name, case in (("", cases["c16"]), (".paced", cases["paced"]), (".c1", cases["c1"])):
        yield median(f"router_cpu_ms_per_request{name}", "ms", case, [sample.cpu_ms() for sample in case.routed])
    paced = cases["paced"]
    for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        direct = [quantile(sample.ttft_ms, fraction) for sample in paced.direct]
        routed = [quantile(sample.ttft_ms, fraction) for sample in paced.routed]
        added = [through - straight for through, straight in zip(routed, direct, strict=True)]
        for what, values in (("added", added), ("direct", direct), ("gateway", routed)):
            yield median(f"{what}_ttft_ms.{name}", "ms", paced, values)
    for case in (cases["c1"], cases["c16"]):
        for way, samples in (("direct", case.direct), ("gateway", case.routed)):
            rates = [sample.rate() for sample in samples]
            yield median(f"requests_per_s.{way}.{case.name}", "requests/s", case, rates)
            times = [quantile(sample.e2e_ms, 0.5) for sample in samples]
            yield median(f"e2e_ms.{way}.{case.name}.p50", "ms", case, times)


def median(name: str, unit: str, case: Case, values: list[float]) -> dict[str, object]:
    """Return one result, the median of the rounds; `n` is the number of requests in all rounds."""
    return {"name": name, "value": statistics.median(values), "unit": unit, "n": case.num * len(values)}


if __name__ == "__main__":
    main()
