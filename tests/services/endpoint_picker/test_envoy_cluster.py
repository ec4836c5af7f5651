"""Envoy and a picker in front of a whole cluster: emulated engines, and the sidecars that follow them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.cluster.child import Child
from tests.services.cluster.living import ENGINES, MODEL, Living, living
from tests.services.endpoint_picker.real_envoy import Envoy, envoy

pytestmark = [pytest.mark.envoy, pytest.mark.xdist_group("cluster")]

NUM_REQUESTS = 24
OF_ONE_RUN = re.compile(rb'"(id|created|cached_tokens)":\s*[^,}]+')
DECIDE = ("--policy", "random", "--seed", "5", "--schedule-s", "60", "--sidecar-deadline-ms", "20000")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """A cluster; each test leaves it idle."""
    with living(tmp_path_factory.mktemp("cluster")) as here:
        yield here


@asynccontextmanager
async def proxied(live: Living, folder: Path) -> AsyncIterator[tuple[Envoy, Child]]:
    """Run a picker and Envoy in front of the cluster's engines."""
    instances = str(live.cluster.instances_file)
    picker = Child(
        "picker-envoy", "picker", "--no-secure-serving", "--metrics-port", "0", "--instances-file", instances, *DECIDE
    )
    await picker.start()
    try:
        ports = [live.cluster.children[name].port for name in ENGINES]
        async with envoy(folder, "override_host", picker=picker.port, engines=ports) as proxy:
            yield proxy, picker
    finally:
        await picker.stop()


def test_placements_and_streams_are_those_of_the_gateway(live: Living, tmp_path: Path) -> None:
    """By the same policy and seed each request goes to the same engine, and its stream is the same."""

    async def send(url: str, number: int) -> tuple[str, bytes]:
        response = await live.client.post(
            f"{url}/v1/completions",
            json={
                "model": MODEL, "prompt": f"Number {number} " * (number + 1), "max_tokens": 8, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True},
            },
        )  # fmt: skip
        assert response.status_code == 200, response.text
        return response.headers["x-block-instance"], OF_ONE_RUN.sub(b"", response.content)

    async def test() -> None:
        instances = str(live.cluster.instances_file)
        flags = ("--decide", "in-process", "--instances-file", instances, *DECIDE)
        async with live.another_gateway(*flags) as gateway:
            through_gateway = [await send(f"http://127.0.0.1:{gateway.port}", number) for number in range(NUM_REQUESTS)]
        async with proxied(live, tmp_path) as (proxy, picker):
            through_envoy = [await send(str(proxy.client.base_url), number) for number in range(NUM_REQUESTS)]
            live.cluster.children["picker-envoy"] = picker
            try:
                await live.until_metric(
                    "picker-envoy", "block_picker_output_tokens_total", lambda tokens: tokens == 8 * NUM_REQUESTS
                )
            finally:
                del live.cluster.children["picker-envoy"]
        assert through_envoy == through_gateway
        assert {name for name, _ in through_envoy} == set(ENGINES)

    live.run(test())
