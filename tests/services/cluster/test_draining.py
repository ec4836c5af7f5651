"""An instance of a running cluster is registered, used, drained and removed, by HTTP and by the commands."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from services.http.sse import data_of
from tests.services.cluster.living import ENGINES, MODEL, SCHEDULERS, Living, is_some
from tests.services.cluster.loading import loaded
from tests.services.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

NUM_STREAMS = 8
MAX_TOKENS = 120
MOVED = b": x-block-migrations: "


async def command(*words: str) -> dict[str, Any]:
    """Run a command of `block`, and return what it prints as JSON."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *words, "--json", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    return dict(json.loads(output))


def operators(live: Living) -> list[str]:
    """The URLs of the schedulers' ports for operators."""
    return list(live.cluster.operator_urls["block"])


def flags(urls: list[str]) -> list[str]:
    """The flags that name them."""
    return [word for url in urls for word in ("--operator", url)]


class Streamed:
    """One stream, of which some has come."""

    def __init__(self, live: Living, number: int) -> None:
        """Ask nothing yet."""
        self.body = {
            "model": MODEL, "prompt": f"tell me story number {number}", "max_tokens": MAX_TOKENS, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        self.live = live
        self.instance = ""
        self.content = b""
        self.has_begun = asyncio.Event()

    async def run(self) -> Streamed:
        """Send the request, and read to the end."""
        url = f"{self.live.gateway}/v1/completions"
        async with self.live.client.stream("POST", url, json=self.body) as response:
            assert response.status_code == 200
            self.instance = response.headers["x-block-instance"]
            async for piece in response.aiter_raw():
                self.content += piece
                self.has_begun.set()
        return self

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it contains."""
        return [json.loads(event) for event in data_of(self.content) if event != b"[DONE]"]

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(event["choices"][0]["text"] for event in self.events if event["choices"])


def test_streams_leave_an_instance_that_drains(live: Living) -> None:
    """One scheduler of two has the order; no stream loses a token or has one twice, and those elsewhere stay there."""

    async def test() -> None:
        gateway = "gateway-block"
        before = await live.metric(gateway, "block_gateway_migrations_total", result="planned")
        streams = [Streamed(live, number) for number in range(NUM_STREAMS)]
        for engine in ENGINES:
            await live.order(engine, slow=40.0)
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(stream.run()) for stream in streams]
            for stream in streams:
                await stream.has_begun.wait()
            engine = streams[0].instance
            told = flags(operators(live)[:1])
            drained = await command("drain", engine, "--deadline-s", "0", "--wait", "--wait-s", "120", *told)
            assert drained["requests"] == 0
            assert not reading[-1].done() or engine == streams[-1].instance
            for one in ENGINES:
                await live.order(one)
        moved = [stream for stream in streams if MOVED in stream.content]
        assert {stream.instance for stream in moved} == {engine}
        assert len(moved) == sum(stream.instance == engine for stream in streams)
        planned = await live.metric(gateway, "block_gateway_migrations_total", result="planned") - before
        assert planned == len(moved)
        async with loaded(live.gateway, clients=2, most=10) as load:  # no request goes there, by either scheduler
            await until(lambda: len(load.results) == 10)
        assert load.served_since(0, engine) == 0
        await command("undrain", engine, *told)
        for stream in streams:
            undisturbed = await Streamed(live, int(stream.body["prompt"].rpartition(" ")[2])).run()
            assert stream.text == undisturbed.text
            assert stream.events[-1]["usage"]["completion_tokens"] == MAX_TOKENS
            assert stream.content.endswith(b"data: [DONE]\n\n")

    live.run(test())


def test_an_instance_is_registered_and_removed(live: Living) -> None:
    """It is used as one of the file; each command may be repeated."""

    async def test() -> None:
        engine, urls = ENGINES[2], operators(live)
        with live.also_listed({}, without=[engine]):
            await until(lambda: is_listed(live, engine, False))
            words = (live.cluster.url_of(engine), live.cluster.address_of("predictor-2"), *flags(urls))
            statuses = [await command("instances", "add", engine, *words) for _ in range(2)]
            assert [[one["status"] for one in reply["schedulers"]] for reply in statuses] == [[201, 201], [200, 200]]
            listed = await command("instances", "list", *flags(urls))
            for scheduler in listed["schedulers"]:
                sources = {one["instance_id"]: one["source"] for one in scheduler["instances"]}
                assert sources == {**dict.fromkeys(ENGINES, "file"), engine: "http"}
            async with loaded(live.gateway) as load:
                await until(lambda: load.served_since(0, engine) > 0)
                await command("drain", engine, "--deadline-s", "0", "--wait", *flags(urls))
                for _ in range(2):
                    await command("instances", "remove", engine, *flags(urls))
                assert not await is_listed(live, engine, True)
                num = len(load.results)
                await until(lambda: load.served_since(num) >= 5)
            assert load.failures() == []
        await until(lambda: is_listed(live, engine, True))
        for name in SCHEDULERS:
            await live.until_metric(name, "block_instances", is_some)

    live.run(test())


async def is_listed(live: Living, engine: str, expected: bool) -> bool:
    """Whether all schedulers list an instance, or none does."""
    replies = [(await live.client.get(f"{url}/instances/{engine}")).status_code for url in operators(live)]
    return replies == [200 if expected else 404] * len(replies)
