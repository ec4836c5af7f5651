"""What the live page costs: processor time of its browser and of the scheduler, and decisions with and without it.

The scheduler is started by its command, over stand-ins for sidecars whose indicators change all the time. Requests
arrive as a Poisson process. Short runs without and with a reader of its stream take turns; then the page is open in the
system's Chromium without a window and without a GPU, so that drawing takes processor time as well. Needs `playwright`
and Chromium, as `make browser` does.

- `page_cpu_share.{view}.{instances}`: processor time of all processes of the browser per second, in cores.
- `server_cpu_share.{how}.{instances}`: processor time of the scheduler per second, in cores, in the short runs: without
  a reader, and with its stream read by a program that does nothing else.
- `decision_ms.{how}.p50|p99.{instances}`: times of decisions, also with the page open in a browser on the same cores.
- `decision_ms.difference.{instances}`: of the medians of decisions with the stream read and without, in short runs that
  take turns: the median of these differences; `noise` is half the range of the middle half of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import services  # noqa: F401 - sets options of gRPC, which it reads when it is imported

# isort: split
import grpc

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scripts.bench_requests import PLACE
from scripts.bench_scheduler import load
from scripts.load_client import quantile
from scripts.processes import Running, block_serving, family_of, instance_flags, own_cpu_s, sidecars_running
from scripts.report import report
from services.http.server import listening

TAKING_TURNS = ("without", "read")
HOW = (*TAKING_TURNS, "with")
VIEWS = ("cluster", "decisions", "accuracy", "slos")
WARM_UP_S = 3.0
SLICE_S = 3.0  # of the runs that take turns
TOGETHER = 16  # stand-ins behind one port
BROWSER = "chromium"


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each view of the page")
    parser.add_argument("--rounds", type=int, default=20, help="of short runs without and with a reader")
    arguments = parser.parse_args()
    with listening(PLACE, 0) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        sidecars = stack.enter_context(sidecars_running(arguments.instances, TOGETHER, "--changing"))
        flags = ["--sidecar-deadline-ms", "1000", "--metrics-port", str(port), *instance_flags(sidecars)]
        scheduler = stack.enter_context(block_serving("scheduler", *flags))
        results = asyncio.run(measured(scheduler, f"http://{PLACE}:{port}", arguments))
    report("live_page", results, as_json=arguments.json)


async def measured(scheduler: Running, url: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Let runs without and with the page take turns."""
    num = arguments.instances
    rng = random.Random(0)
    decision_ms: dict[str, list[list[float]]] = {how: [] for how in HOW}
    server_s: dict[str, list[float]] = {how: [] for how in HOW}
    page_s: dict[str, float] = {}
    async with grpc.aio.insecure_channel(f"{PLACE}:{scheduler.port}") as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)

        async def schedule(request: common_pb2.Request) -> common_pb2.Decision:
            request.request_id = f"{time.monotonic_ns()}"
            return (await stub.Schedule(scheduler_pb2.ScheduleRequest(request=request))).decision

        async def run(how: str, seconds: float) -> None:
            decisions: list[common_pb2.Decision] = []
            before_s = scheduler.cpu_s()
            start_s = time.perf_counter()
            await load(schedule, stub.Release, rng, arguments.rate, seconds, (decisions, []), None)
            server_s[how].append((scheduler.cpu_s() - before_s) / (time.perf_counter() - start_s))
            decision_ms[how].append([1e3 * decision.decision_s for decision in decisions])

        await load(schedule, stub.Release, rng, arguments.rate, WARM_UP_S, ([], []), None)
        differences_ms: list[float] = []
        for _ in range(arguments.rounds):
            await run("without", SLICE_S)
            async with tail_read(url):
                await run("read", SLICE_S)
            read, without = (median(decision_ms[how][-1]) for how in ("read", "without"))
            differences_ms.append(read - without)
        async with page_open(f"{url}/ui") as page:
            for view in VIEWS:
                await page.locator(f"#tab-{view}").click()
                before_s, start_s = browser_cpu_s(), time.perf_counter()
                await run("with", arguments.seconds)
                page_s[view] = (browser_cpu_s() - before_s) / (time.perf_counter() - start_s)
    rows = [(f"page_cpu_share.{view}", value, "cores", 1) for view, value in page_s.items()]
    rows += [(f"server_cpu_share.{how}", fmean(server_s[how]), "cores", len(server_s[how])) for how in TAKING_TURNS]
    for how, runs in decision_ms.items():
        times = [one for run in runs for one in run]
        rows += [(f"decision_ms.{how}.p{round(100 * q)}", quantile(times, q), "ms", len(times)) for q in (0.5, 0.99)]
    low, middle, high = (quantile(differences_ms, q) for q in (0.25, 0.5, 0.75))
    n = len(differences_ms)
    rows += [("decision_ms.difference", middle, "ms", n), ("decision_ms.noise", (high - low) / 2, "ms", n)]
    return [{"name": f"{name}.{num}", "value": value, "unit": unit, "n": n} for name, value, unit, n in rows]


@asynccontextmanager
async def tail_read(url: str) -> AsyncIterator[None]:
    """Read the stream of events while the block runs, without a browser."""
    address = url.removeprefix("http://")
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /ui/tail HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())

    async def read() -> None:
        while await reader.read(1 << 16):
            pass

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()
        writer.close()


@asynccontextmanager
async def page_open(url: str) -> AsyncIterator[Any]:
    """Open the page in a browser while the block runs."""
    from playwright.async_api import async_playwright

    path = os.environ.get("BLOCK_CHROMIUM") or shutil.which(BROWSER)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 800})
        await page.goto(url)
        await page.locator(".lane").first.wait_for()
        await asyncio.sleep(WARM_UP_S)  # starting a browser takes processor time, too
        yield page
        await browser.close()


def browser_cpu_s() -> float:
    """Return the processor time of the browser that this process runs."""
    return sum(own_cpu_s(pid) for pid in family_of(os.getpid()) if is_browser(pid))


def is_browser(pid: int) -> bool:
    """Return whether a process belongs to the browser."""
    try:
        return BROWSER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return False


if __name__ == "__main__":
    main()
