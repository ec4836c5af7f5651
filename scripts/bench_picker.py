"""What the endpoint picker costs behind an Envoy, beside the gateway: processor time, and added time to first token.

Four stand-in engines, their stand-in sidecars, the gateway that decides in its own process, the picker and Envoy with
deploy/envoy/override_host.yaml are processes of their own, on loopback; gateway and picker have the same policy and the
same instances. Prompts have 2 KB, responses are streams of 16 events. The ways take turns in every round:

- `direct`: to the engines in turn
- `gateway`: through the gateway
- `envoy`: through Envoy, which asks no picker and sends requests to the engines in turn
- `picker`: through Envoy, which asks the picker and shows it requests and responses
- `requests_only`: the same, where Envoy does not show the bodies of responses (response_body_mode: NONE)

Results, each the median over the rounds: `cpu_ms.WAY` is the processor time (user and system) per request of gateway,
Envoy or picker, with engines that answer at once and 16 requests at a time; `cpu_ms.WAY.paced` the same with engines at
an engine's pace, whose events come one by one, the first after 40 ms; `added_ttft_ms.WAY.p50` (and p90) the time to the
first event minus that of `direct` in the same round, with engines at that pace; `requests_per_s.WAY` what 16 concurrent
requests get through, on the cores that all processes share.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import uvloop

from scripts.bench_requests import FIRST_MS, GAPS_MS, PROMPT_BYTES, request_body, text_of
from scripts.envoy import envoy_running
from scripts.load_client import LoadSample, all_released, load, quantile
from scripts.processes import Running, block_serving, instance_flags, sidecars_running, stand_in
from scripts.report import report
from services.http.client import HttpClient

NUM_ENGINES = 4
AT_A_TIME = 16
WARM_UP = 200
NO_PICKER = {
    f"{way}_{part}_mode: {mode}": f"{way}_{part}_mode: {without}"
    for way in ("request", "response")
    for part, mode, without in (
        ("header", "SEND", "SKIP"), ("body", "FULL_DUPLEX_STREAMED", "NONE"), ("trailer", "SEND", "SKIP"),
    )
}  # fmt: skip

NO_RESPONSES = {one: other for one, other in NO_PICKER.items() if one.startswith(("response_body", "response_trailer"))}


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=1500, help="per round and way, with engines that answer at once"
    )
    parser.add_argument("--paced-requests", type=int, default=300, help="per round and way, with engines at a pace")
    parser.add_argument("--policy", default="block")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        ways = list(ways_of(stack, arguments.policy))
        results = uvloop.run(measured(ways, arguments.rounds, arguments.requests, arguments.paced_requests))
    report("picker", results, as_json=arguments.json)


@dataclass(kw_only=True)
class PickerWay:
    """One way to the engines, the processes on it, and the samples of each round."""

    name: str
    urls: list[str]
    parts: dict[str, Running] = field(default_factory=dict)
    at_once: list[LoadSample] = field(default_factory=list)
    paced: list[LoadSample] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)  # by process
    paced_cpu_ms: dict[str, list[float]] = field(default_factory=dict)


def ways_of(stack: ExitStack, policy: str) -> Iterator[PickerWay]:
    """Start everything."""
    engines = [stack.enter_context(stand_in("engine")) for _ in range(NUM_ENGINES)]
    sidecars = stack.enter_context(sidecars_running(NUM_ENGINES, 1))
    urls, ports = [engine.url for engine in engines], [engine.port for engine in engines]
    common = [*instance_flags(sidecars, urls), "--policy", policy]
    yield PickerWay(name="direct", urls=urls)
    gateway = stack.enter_context(block_serving("gateway", "--decide", "in-process", *common))
    yield PickerWay(name="gateway", urls=[gateway.url], parts={"gateway": gateway})
    alone = stack.enter_context(envoy_running("override_host", picker=1, engines=ports, changes=NO_PICKER))
    yield PickerWay(name="envoy", urls=[alone.url], parts={"envoy": alone})
    for name, changes in (("picker", {}), ("requests_only", NO_RESPONSES)):
        picker = stack.enter_context(block_serving("picker", "--no-secure-serving", *common))
        envoy = stack.enter_context(envoy_running("override_host", picker=picker.port, engines=ports, changes=changes))
        yield PickerWay(name=name, urls=[envoy.url], parts={"envoy": envoy, "picker": picker})


async def measured(ways: Sequence[PickerWay], rounds: int, num: int, num_paced: int) -> list[dict[str, object]]:
    """Run all loads, the ways in turn, so that all see the same machine."""
    prompt = text_of(random.Random(0), PROMPT_BYTES)
    at_once = [request_body(prompt)]
    paced = [request_body(prompt, FIRST_MS, gap_ms) for gap_ms in GAPS_MS]
    client = HttpClient()
    for way in ways:
        await load(client, way.urls, WARM_UP * at_once, AT_A_TIME)
    for _ in range(rounds):
        for way in ways:
            way.at_once.append(await through(way, client, num * at_once, way.cpu_ms))
        bodies = random.Random(0).choices(paced, k=num_paced)
        for way in ways:
            way.paced.append(await through(way, client, bodies, way.paced_cpu_ms))
    client.close()
    return list(results_of(ways, num, num_paced))


async def through(
    way: PickerWay, client: HttpClient, bodies: Sequence[bytes], cpu_ms: dict[str, list[float]]
) -> LoadSample:
    """Send requests one way, and note the processor time of its processes per request."""
    before_s = {name: part.cpu_s() for name, part in way.parts.items()}
    sample = await load(client, way.urls, bodies, AT_A_TIME)
    if "gateway" in way.parts:
        await all_released(way.parts["gateway"])
    for name, part in way.parts.items():
        cpu_ms.setdefault(name, []).append(1000 * (part.cpu_s() - before_s[name]) / len(bodies))
    return sample


def results_of(ways: Sequence[PickerWay], num: int, num_paced: int) -> Iterator[dict[str, object]]:
    """Summarise the samples as named numbers."""
    (direct,) = (way for way in ways if way.name == "direct")
    for way in ways:
        for part, values in way.cpu_ms.items():
            name = way.name if part == way.name else f"{way.name}.{part}"
            yield result(f"cpu_ms.{name}", "ms", values, num)
            yield result(f"cpu_ms.{name}.paced", "ms", way.paced_cpu_ms[part], num_paced)
        for percent, fraction in (("p50", 0.5), ("p90", 0.9)):
            times = [quantile(sample.ttft_ms, fraction) for sample in way.paced]
            straight = [quantile(sample.ttft_ms, fraction) for sample in direct.paced]
            if way is direct:
                yield result(f"ttft_ms.direct.{percent}", "ms", times, num_paced)
            else:
                added = [through - without for through, without in zip(times, straight, strict=True)]
                yield result(f"added_ttft_ms.{way.name}.{percent}", "ms", added, num_paced)
        yield result(f"requests_per_s.{way.name}", "requests/s", [sample.rate() for sample in way.at_once], num)


def result(name: str, unit: str, values: Sequence[float], num: int) -> dict[str, object]:
    """Return one result, the median of the rounds; `n` is the number of requests in all rounds."""
    return {"name": name, "value": statistics.median(values), "unit": unit, "n": num * len(values)}


if __name__ == "__main__":
    main()
