"""A cluster under load and a real browser in front of its live page."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from predictor.request import Slo
from services.cluster import Cluster, ClusterSettings, running
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from simulator.load_plan import Timing, planned, synthetic
from simulator.load_report import RequestResult
from tests.services.waiting import PATIENCE_S

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PATIENT_MS = 1000 * PATIENCE_S
NUM_ENGINES = 4
ENGINES = [f"engine-{number}" for number in range(NUM_ENGINES)]
MODEL = "demo"
SLO = Slo(ttft_s=2.0, tpot_s=0.1)
LAPTOP, PHONE = {"width": 1280, "height": 640}, {"width": 390, "height": 844}
PICTURES = os.environ.get("BLOCK_PICTURES", "")  # the folder that screenshots are written to; none without it


def chromium() -> str:
    """Return the path of the system's Chromium."""
    found = os.environ.get("BLOCK_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    assert found, "chromium: is not installed (apt-get install chromium), and BLOCK_CHROMIUM names none"
    return found


@asynccontextmanager
async def browsing() -> AsyncIterator[Any]:
    """Run a browser without a window."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def page_at(
    browser: Any, url: str, *, viewport: dict[str, int] = LAPTOP, dark: bool = False, refused: bool = False
) -> AsyncIterator[Any]:
    """Open a page; an error or a message about one in its console fails the test, unless requests are `refused`."""
    context = await browser.new_context(viewport=viewport, color_scheme="dark" if dark else "light")
    problems: list[str] = []
    page = await context.new_page()
    page.set_default_timeout(PATIENT_MS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    try:
        await page.goto(url)
        yield page
        assert [one for one in problems if not (refused and "Failed to load resource" in one)] == []
    finally:
        await context.close()


async def picture(page: Any, name: str) -> None:
    """Write a screenshot, where they are asked for."""
    if PICTURES:
        await page.screenshot(path=str(Path(PICTURES) / f"{name}.png"))


@dataclass(kw_only=True)
class Watched:
    """A cluster under load, a browser, and the event loop of both."""

    cluster: Cluster
    runner: asyncio.Runner
    browser: Any
    client: httpx.AsyncClient
    results: list[RequestResult] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The live page of the gateway."""
        return f"{self.cluster.gateway_urls['block']}/ui"

    async def metrics(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Read a metric of the gateway, by labels."""
        text = (await self.client.get(f"{self.cluster.gateway_urls['block']}/metrics")).text
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    @asynccontextmanager
    async def load(self, *, num: int = 2000, rate: float = 8.0) -> AsyncIterator[None]:
        """Send requests with targets while the block runs."""
        generator = np.random.default_rng(1)
        drawn = synthetic(num, "lognormal:110:1", "lognormal:120:0.5", generator)
        plan = planned(drawn, Timing(kind="poisson", rate=rate), generator)
        form = RequestFormat(model=MODEL, slo=SLO, headers=((b"x-client-id", b"tenant-a"),))
        origin = origin_of(self.cluster.gateway_urls["block"])
        sending = asyncio.create_task(
            run_plan(plan, origin, form, LoadLimits(timeout_s=2 * PATIENCE_S), self.results.append)
        )
        try:
            yield
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending

    def run(self, test: Any) -> None:
        """Run a test on the cluster's event loop."""

        async def limited() -> None:
            async with asyncio.timeout(8 * PATIENCE_S):
                await test

        self.runner.run(limited())


@contextmanager
def watched(recording: Path) -> Iterator[Watched]:
    """Run a cluster whose gateway decides by itself and records, and a browser."""
    settings = ClusterSettings(
        instances=NUM_ENGINES,
        port=0,
        engine_flags=("--profile", "llama-2-7b-a30", "--speed", "2", "--served-model-name", MODEL),
        scheduler_flags=(
            "--sidecar-deadline-ms", "5000", "--tagger-deadline-ms", "5000", "--record", str(recording),
            "--record-candidates",
        ),
    )  # fmt: skip
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def start() -> Watched:
            cluster = await stack.enter_async_context(running(settings))
            browser = await stack.enter_async_context(browsing())
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))
            return Watched(cluster=cluster, runner=runner, browser=browser, client=client)

        try:
            yield runner.run(start())
        finally:
            runner.run(stack.aclose())


async def texts(page: Any, selector: str) -> list[str]:
    """Return the texts of all elements that a selector finds."""
    found: list[str] = await page.locator(selector).all_inner_texts()
    return found
