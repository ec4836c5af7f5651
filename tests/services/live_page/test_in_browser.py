"""The live page in a real Chromium, of a cluster under load."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.services.live_page.browser import ENGINES, PHONE, PICTURES, Watched, page_at, picture, texts, watched
from tests.services.live_page.reading import paged
from tests.services.security.key_files import key
from tests.services.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("cluster")]

log = logging.getLogger(__name__)  # measured times: pytest --log-cli-level=info

NOTHING, MINUS = "\u2013", "\u2212"  # as the page writes them
HOSTILE = "<img src=x onerror=document.title='hacked'>"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the gateway records in."""
    return tmp_path_factory.mktemp("recording") / "decisions.jsonl"


@pytest.fixture(scope="module")
def here(recording: Path) -> Iterator[Watched]:
    """One cluster and one browser for all tests."""
    with watched(recording) as found:
        yield found


async def number_in(page: Any, selector: str) -> float:
    """Return the number that an element shows; 0 for none."""
    text = (await texts(page, selector))[0].split()[0]
    return 0.0 if text == NOTHING else float(text)


def test_instances_and_their_requests_appear(here: Watched) -> None:
    """Each instance has a lane; a request that ends shows the error that its own times give, and few are far off."""

    async def test() -> None:
        async with here.load(), page_at(here.browser, here.url) as page:
            for name in ENGINES:
                await page.get_by_role("button", name=name, exact=True).wait_for()

            async def runs() -> bool:
                return (
                    sum([await number_in(page, f'[data-instance="{name}"] [data-value="running"]') for name in ENGINES])
                    > 0
                )

            await until(runs)
            await page.get_by_role("button", name=ENGINES[0], exact=True).click()
            rows = page.locator("#instance-requests tr[data-request]")

            async def ended() -> list[list[str]]:
                cells = [await row.locator("td").all_inner_texts() for row in await rows.all()]
                return [row for row in cells if row[1] in ("stop", "length")]

            async def several_ended() -> bool:
                return len(await ended()) >= 8

            await until(several_ended)
            await page.locator("#pause").click()
            shown = await ended()
            by_id = {one.plan.request_id.rpartition("-")[2]: one for one in here.results}
            errors = []
            for request_id, _, prompt, _, predicted, actual, error in shown:
                errors.append(float(error.replace(MINUS, "-").replace("+", "").split()[0]) / 100)
                assert errors[-1] == pytest.approx(seconds(predicted) / seconds(actual) - 1, abs=0.02), request_id
                sent = by_id.get(request_id.rpartition("-")[2])
                if sent is not None and sent.e2e_s is not None:
                    assert int(prompt) == sent.plan.prompt_tokens
                    assert seconds(actual) <= sent.e2e_s * 1.01 + 0.01  # the client waits for it at least as long
            log.info("median error of %d shown forecasts: %.3f", len(errors), median(map(abs, errors)))
            assert median(map(abs, errors)) < 0.5

    here.run(test())


def test_a_decision_opens_with_all_its_candidates(here: Watched) -> None:
    """By keyboard: the view, a request, and a row for every instance with the chosen one first."""

    async def test() -> None:
        async with here.load(), page_at(here.browser, here.url) as page:
            await page.locator("#tab-cluster").focus()
            await page.keyboard.press("ArrowRight")
            button = page.locator("tr[data-request] button").first
            await button.wait_for()
            await button.focus()
            await page.keyboard.press("Enter")
            await page.locator("#decision tr[data-candidate]").first.wait_for()
            rows = page.locator("#decision tr[data-candidate]")
            names = [await row.get_attribute("data-candidate") for row in await rows.all()]
            assert sorted(names) == ENGINES
            assert (await rows.first.inner_text()).startswith("→")
            request_id = (await texts(page, "#decision h2"))[0].partition(" → ")[0]
            found = (await here.client.get(f"{here.url}/decision", params={"request_id": request_id})).json()
            scores = [one["score"] for one in found["candidates"]]
            chosen = next(one for one in found["candidates"] if one["instance_id"] == names[0])
            assert chosen["score"] == min(scores)
            assert names[0] == found["instance"]["instance_id"]
            await picture(page, "live-page-decision")

    here.run(test())


def test_counts_of_targets_are_those_of_metrics(here: Watched) -> None:
    """After the load both show the same numbers of requests and of attained targets."""

    async def test() -> None:
        async with here.load(num=40, rate=20.0):
            await until(lambda: len(here.results) > 0)
            async with page_at(here.browser, f"{here.url}#slos") as page:

                async def same() -> bool:
                    requests = await here.metrics("block_gateway_slo_requests_total")
                    attained = await here.metrics("block_gateway_slo_attained_total")
                    if not requests or await here.metrics("block_gateway_requests_under_way") != {(): 0.0}:
                        return False
                    rows = await page.locator("tr[data-tpot]").all()
                    shown = {
                        (("client", await row.get_attribute("data-client")), ("tpot_slo", await row.get_attribute("data-tpot"))): (
                            float(await row.get_attribute("data-requests")), float(await row.get_attribute("data-attained")))
                        for row in rows
                    }  # fmt: skip
                    return shown == {key: (num, attained.get(key, 0.0)) for key, num in requests.items()}

                await until(same)
                await page.locator('tr[data-target="slo"]').first.wait_for()
                await picture(page, "live-page-slos")

    here.run(test())


def test_accuracy_is_drawn(here: Watched) -> None:
    """Points appear for requests that end while the page is open."""

    async def test() -> None:
        async with here.load(), page_at(here.browser, f"{here.url}#accuracy") as page:
            await page.locator('tr[data-instance="all"]').wait_for()

            async def many() -> bool:
                return int((await texts(page, 'tr[data-instance="all"] td'))[1]) >= 20

            await until(many)
            assert await page.locator("figure svg circle").count() > 0
            await picture(page, "live-page-accuracy")

    here.run(test())


def test_a_killed_engine_shows(here: Watched) -> None:
    """Its lane says so in words, and says when it is back."""

    async def test() -> None:
        async with here.load(), page_at(here.browser, here.url) as page:
            lane = page.locator(f'[data-instance="{ENGINES[1]}"]')
            await page.locator(f'[data-instance="{ENGINES[1]}"] .state', has_text="✓ ready").wait_for()
            await full_lanes()
            await picture(page, "live-page")
            child = here.cluster.children[ENGINES[1]]
            os.kill(child.pid, signal.SIGKILL)
            killed_s = time.monotonic()
            await lane.locator(".state", has_text="✕").wait_for()
            shown_s = time.monotonic() - killed_s
            log.info("a killed engine shows after %.2f s", shown_s)
            await until(lambda: child.serves)
            await lane.locator(".state", has_text="✓ ready").wait_for()

    here.run(test())


async def full_lanes() -> None:
    """Let the bars fill the lanes, where the page is to be drawn for the manual."""
    if PICTURES:
        await asyncio.sleep(12)


def test_a_phone_in_the_dark(here: Watched) -> None:
    """Nothing is wider than the screen, and colours follow the preference."""

    async def test() -> None:
        async with here.load(), page_at(here.browser, here.url, viewport=PHONE, dark=True) as page:
            await page.locator(f'[data-instance="{ENGINES[0]}"]').wait_for()
            for name in ("cluster", "decisions", "accuracy", "slos", "fleet"):
                await page.locator(f"#tab-{name}").click()
                await page.locator(f'#tab-{name}[aria-selected="true"]').wait_for()
                assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
            assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
            await page.locator("#tab-cluster").click()
            await full_lanes()
            await picture(page, "live-page-phone")

    here.run(test())


def test_texts_of_clients_are_never_html(here: Watched) -> None:
    """A request id and a client name that look like HTML are shown as they are."""

    async def test() -> None:
        async with page_at(here.browser, f"{here.url}#decisions") as page:
            headers = {"x-request-id": HOSTILE, "x-client-id": HOSTILE}
            body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4}
            reply = await here.client.post(
                f"{here.cluster.gateway_urls['block']}/v1/completions", json=body, headers=headers
            )
            assert reply.status_code == 200, reply.text
            await page.get_by_role("button", name=HOSTILE).click()
            await page.locator("#decision h2", has_text=HOSTILE).wait_for()
            assert await page.locator("img").count() == 0
            assert await page.title() == "Block"

    here.run(test())


def test_a_key_is_asked_for(here: Watched) -> None:
    """A wrong key is refused, the right one opens the page; it is in no address."""

    async def test() -> None:
        async with paged(keys=[key("secret", "team", role="operator")]) as behind:
            addresses: list[str] = []
            url = str(behind.client.base_url.join("/ui"))
            async with page_at(here.browser, url, refused=True) as page:
                page.on("request", lambda request: addresses.append(request.url))
                for text in ("wrong", "secret"):
                    await page.locator("#key-form").wait_for()
                    await page.locator("#key").fill(text)
                    await page.keyboard.press("Enter")
                    await page.locator(
                        "#about", has_text="may not open" if text == "wrong" else "2 instances"
                    ).wait_for()
                await page.get_by_role("button", name="a", exact=True).wait_for()
                assert addresses
                assert not any("secret" in address for address in [*addresses, page.url])

    here.run(test())


def test_a_recording_opens(here: Watched, recording: Path) -> None:
    """`block ui` shows the requests, the lanes at a chosen time, and a decision with its candidates."""

    async def test() -> None:
        async with here.load(num=30, rate=20.0):
            await until(lambda: recording.exists() and recording.read_text(encoding="utf-8").count('"outcome"') > 10)
        opened = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", "ui", str(recording), stdout=asyncio.subprocess.PIPE
        )
        assert opened.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                url = (await opened.stdout.readline()).decode().strip()
            async with page_at(here.browser, url) as page:
                await page.locator("#timeline").wait_for()
                for name in ENGINES:
                    await page.get_by_role("button", name=name, exact=True).wait_for()
                await page.locator("#time").focus()
                await page.keyboard.press("End")
                await page.locator("#tab-decisions").click()
                button = page.locator("tr[data-request] button").first
                await button.wait_for()
                name = await button.inner_text()
                await button.click()
                await page.locator("#decision h2", has_text=name).wait_for()
                rows = page.locator("#decision tr[data-candidate]")
                assert sorted([await row.get_attribute("data-candidate") for row in await rows.all()]) == ENGINES
        finally:
            opened.send_signal(signal.SIGTERM)
            await opened.wait()

    here.run(test())


def seconds(text: str) -> float:
    """Read a time as the page writes it."""
    value, unit = text.split()
    return float(value) / (1000 if unit == "ms" else 1)
