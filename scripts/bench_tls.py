"""What TLS costs: processor time of the gateway per request, and time to first token, beside plain text in one run.

Gateways that differ only in their connections take turns, each before stand-in engines and a stand-in scheduler of its
kind, 16 requests concurrently, prompts of 2 KB, streams of 16 events:

- `plain`: no TLS at all;
- `clients`: clients connect by HTTPS, everything behind the gateway is plain text;
- `every_link`: HTTPS to engines and TLS to the scheduler as well, with certificates of both sides.

`cpu_ms_per_request` is of engines that answer at once, over connections that are kept; `new_connection_…` has a
connection, and with TLS a handshake, for each request. `ttft_ms` is of engines at an engine's pace. A number is the
median over the rounds, of the processor time (user and system) of the gateway's process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import uvloop

from scripts.bench_requests import FIRST_MS, GAPS_MS, PLACE, PROMPT_BYTES, request_body, text_of
from scripts.load_client import load_through, quantile
from scripts.processes import Running, block_serving, stand_in
from scripts.report import report
from services.http.client import HttpClient
from services.security.certificates import use_tls
from services.security.development_ca import write_certificates
from services.security.parts import LOCAL_NAMES
from services.security.settings import TlsSettings

NUM_ENGINES = 2
AT_A_TIME = 16
WARM_UP = 200


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="of all gateways")
    parser.add_argument(
        "--requests", type=int, default=600, help="per round and gateway, with engines that answer at once"
    )
    parser.add_argument("--paced-requests", type=int, default=200, help="per round and gateway, at an engine's pace")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_certificates(Path(folder), ("gateway", "engine", "scheduler", "client"), LOCAL_NAMES)
        own = ["--tls-cert", f"{folder}/gateway.crt", "--tls-key", f"{folder}/gateway.key"]
        gateways = {
            "plain": gateway_of(stack),
            "clients": gateway_of(stack, own=own),
            "every_link": gateway_of(stack, own=[*own, "--tls-ca", f"{folder}/ca.crt"], behind=["--tls", folder]),
        }
        use_tls(TlsSettings(tls_ca=f"{folder}/ca.crt"))
        nums = {"kept": arguments.requests, "new": arguments.requests // 2, "paced": arguments.paced_requests}
        results = uvloop.run(measured(gateways, nums, arguments.rounds))
    report("tls", results, as_json=arguments.json)


def gateway_of(stack: ExitStack, own: list[str] | None = None, behind: list[str] | None = None) -> Running:
    """Start a gateway with engines and a scheduler of its own."""
    scheme = "https" if behind else "http"
    engines = [
        replace(stack.enter_context(stand_in("engine", *(behind or []))), scheme=scheme) for _ in range(NUM_ENGINES)
    ]
    scheduler = stack.enter_context(stand_in("scheduler", *(behind or []), *(engine.url for engine in engines)))
    gateway = block_serving("gateway", "--scheduler", f"{PLACE}:{scheduler.port}", *(own or []))
    return replace(stack.enter_context(gateway), scheme="https" if own else "http")


async def measured(gateways: dict[str, Running], nums: dict[str, int], rounds: int) -> list[dict[str, object]]:
    """Send the same requests through each gateway in turn."""
    prompt = text_of(random.Random(0), PROMPT_BYTES)
    at_once = request_body(prompt)
    paced = [request_body(prompt, FIRST_MS, gap_ms) for gap_ms in GAPS_MS]
    kept, new = HttpClient(), HttpClient(max_kept=0)
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for gateway in gateways.values():
        await load_through(kept, [gateway], [at_once] * WARM_UP, AT_A_TIME)
    for number in range(rounds):
        bodies = random.Random(number).choices(paced, k=nums["paced"])
        for name, gateway in gateways.items():
            sample = await load_through(kept, [gateway], [at_once] * nums["kept"], AT_A_TIME)
            values["cpu_ms_per_request", name, "ms"].append(sample.cpu_ms())
            values["requests_per_s", name, "requests/s"].append(sample.rate())
            sample = await load_through(new, [gateway], [at_once] * nums["new"], AT_A_TIME)
            values["new_connection_cpu_ms_per_request", name, "ms"].append(sample.cpu_ms())
            sample = await load_through(kept, [gateway], bodies, AT_A_TIME, spread_s=0.1)
            for quantity, fraction in (("p50", 0.5), ("p99", 0.99)):
                values["ttft_ms", f"{name}.{quantity}", "ms"].append(quantile(sample.ttft_ms, fraction))
    kept.close()
    new.close()
    of = {"ttft_ms": "paced", "new_connection_cpu_ms_per_request": "new"}
    return [
        {
            "name": f"{what}.{name}",
            "value": statistics.median(found),
            "unit": unit,
            "n": nums[of.get(what, "kept")] * rounds,
        }
        for (what, name, unit), found in sorted(values.items())
    ]


if __name__ == "__main__":
    main()
