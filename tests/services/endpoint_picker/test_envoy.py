"""A picker behind a real Envoy, which has the shipped configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.endpoint_picker.real_envoy import envoy
from tests.services.endpoint_picker.running import MODEL, picking
from tests.services.gateway.stubs import COMPLETION, STREAM, completes, streams
from tests.services.waiting import run, until

pytestmark = pytest.mark.envoy


@pytest.mark.parametrize("name", ["override_host", "original_dst"])
def test_the_best_endpoint_serves_and_its_reservation_ends(tmp_path: Path, name: str) -> None:
    """A request goes to the instance with the best forecast, which gets the reservation and the outcome."""

    async def test() -> None:
        settings = {"max_endpoints": 1} if name == "original_dst" else {}
        async with picking(completes, completes, settings=settings) as here:
            here.sidecars[1].e2e_s = 1.0
            ports = [engine.port for engine in here.engines]
            async with envoy(tmp_path, name, picker=here.running.port, engines=ports) as proxy:
                response = await proxy.client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})
                assert response.status_code == 200, response.text
                assert response.json() == COMPLETION
                assert response.headers["x-block-instance"] == "b"
                await until(lambda: bool(here.sidecars[1].outcomes))
                assert [len(one.reserved_ids) for one in here.sidecars] == [0, 1]
                assert not here.sidecars[1].held
                (outcome,) = here.sidecars[1].outcomes
                assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 3)

    run(test)


def test_streams_pass_byte_by_byte(tmp_path: Path) -> None:
    """The events of a stream arrive as the engine sent them."""

    async def test() -> None:
        async with picking(streams) as here:
            ports = [engine.port for engine in here.engines]
            async with envoy(tmp_path, "override_host", picker=here.running.port, engines=ports) as proxy:
                response = await proxy.client.post(
                    "/v1/completions", json={"model": MODEL, "prompt": "Hi", "stream": True}
                )
                assert response.content == b"".join(STREAM)
                await until(lambda: bool(here.sidecars[0].outcomes))
                (outcome,) = here.sidecars[0].outcomes
                assert outcome.output_tokens == 3
                assert 0 < outcome.ttft_s <= outcome.e2e_s

    run(test)
