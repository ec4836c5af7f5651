"""A picker behind a real Envoy, which has the shipped configurations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos.block.v1 import common_pb2
from tests.services.endpoint_picker.real_envoy import Envoy, envoy
from tests.services.endpoint_picker.running import MODEL, Picking, picking
from tests.services.gateway.stubs import COMPLETION, STREAM, Answer, Call, completes, event, streams
from tests.services.waiting import run, until

pytestmark = pytest.mark.envoy

EXT_PROC = "          - name: envoy.filters.http.ext_proc\n"
SUBSET_FILTER = """          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules:
              - header: x-test-subset
                on_header_present:
                  metadata_namespace: envoy.lb.subset_hint
                  key: x-gateway-destination-endpoint-subset
"""
BUFFERED = {
    f"{way}_body_mode: FULL_DUPLEX_STREAMED": f"{way}_body_mode: BUFFERED" for way in ("request", "response")
} | {f"{way}_trailer_mode: SEND": f"{way}_trailer_mode: SKIP" for way in ("request", "response")}
HEADERS_ONLY = {before: after.replace("BUFFERED", "NONE") for before, after in BUFFERED.items()}


@asynccontextmanager
async def behind(
    folder: Path,
    *answers: Answer,
    name: str = "override_host",
    changes: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    **scheduler: Any,
) -> AsyncIterator[tuple[Picking, Envoy]]:
    """Run Envoy in front of a picker over an instance for each answer of an engine."""
    settings = {**({"max_endpoints": 1} if name == "original_dst" else {}), **(settings or {})}
    async with picking(*answers, settings=settings, **scheduler) as here:
        ports = [engine.port for engine in here.engines]
        tls = settings.get("secure_serving", False)
        picker = here.running.port
        async with envoy(folder, name, picker=picker, engines=ports, tls=tls, changes=changes) as proxy:
            yield here, proxy


async def post(proxy: Envoy, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    """Send a completion."""
    return await proxy.client.post(
        "/v1/completions", json={"model": MODEL, "prompt": "Say hello", **fields}, headers=headers
    )


async def echoes(call: Call) -> None:
    """Reply with the length of the body, and what it asks for."""
    call.whole({"size": len(call.body), "model": json.loads(call.body)["model"]})


@pytest.mark.parametrize("name", ["override_host", "original_dst"])
def test_the_best_endpoint_serves_and_its_reservation_ends(tmp_path: Path, name: str) -> None:
    """A request goes to the instance with the best forecast, which gets the reservation and the outcome."""

    async def test() -> None:
        async with behind(tmp_path, completes, completes, name=name) as (here, proxy):
            here.sidecars[1].e2e_s = 1.0
            response = await post(proxy, {"x-gateway-destination-endpoint": "127.0.0.1:1"})
            assert response.status_code == 200, response.text
            assert response.json() == COMPLETION
            assert response.headers["x-block-instance"] == "b"
            await until(lambda: bool(here.sidecars[1].outcomes))
            assert [len(one.reserved_ids) for one in here.sidecars] == [0, 1]
            assert not here.sidecars[1].held
            (outcome,) = here.sidecars[1].outcomes
            assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 3)
            assert here.engines[1].calls[0].headers["x-request-id"] == outcome.request_id
            models = await proxy.client.get("/v1/models")
            assert models.status_code == 200

    run(test)


@pytest.mark.parametrize("name", ["override_host", "original_dst"])
def test_the_shipped_configuration_speaks_tls_to_the_picker(tmp_path: Path, name: str) -> None:
    """By its self-signed certificate, which Envoy does not verify; health checks, too."""
    pytest.importorskip("cryptography", reason="needs the package of the extra 'picker'")

    async def test() -> None:
        async with behind(tmp_path, completes, name=name, settings={"secure_serving": True}) as (_, proxy):

            async def is_healthy() -> bool:
                return await proxy.stat("cluster.picker.health_check.success") > 0

            await until(is_healthy)
            response = await post(proxy)
            assert response.json() == COMPLETION
            assert response.headers["x-block-instance"] == "a"

    run(test)


@pytest.mark.parametrize("name", ["override_host", "original_dst"])
def test_streams_pass_byte_by_byte(tmp_path: Path, name: str) -> None:
    """The events of a stream arrive as the engine sent them, each when it comes."""

    async def test() -> None:
        may_end = asyncio.Event()

        async def halts(call: Call) -> None:
            call.stream()
            await call.chunk(STREAM[0])
            await may_end.wait()
            for piece in STREAM[1:]:
                await call.chunk(piece)
            call.end()

        async with behind(tmp_path, halts, name=name) as (here, proxy):
            fields = {"model": MODEL, "prompt": "Hi", "stream": True}
            async with proxy.client.stream("POST", "/v1/completions", json=fields) as response:
                pieces = response.aiter_raw()
                assert await anext(pieces) == STREAM[0]
                may_end.set()
                assert b"".join([piece async for piece in pieces]) == b"".join(STREAM[1:])
            await until(lambda: bool(here.sidecars[0].outcomes))
            (outcome,) = here.sidecars[0].outcomes
            assert outcome.output_tokens == 3
            assert 0 < outcome.ttft_s <= outcome.e2e_s

    run(test)


def test_the_second_endpoint_serves_where_the_first_is_dead(tmp_path: Path) -> None:
    """Envoy goes down the list; the reservation of the first ends, and the second gets the outcome."""

    async def test() -> None:
        settings = {"conformance_pool": "apps/pool"}
        async with behind(tmp_path, completes, completes, completes, settings=settings) as (here, proxy):
            here.sidecars[2].e2e_s, here.sidecars[1].e2e_s = 1.0, 1.5
            await here.engines[2].stop()
            response = await post(proxy)
            assert response.json() == COMPLETION
            assert response.headers["x-conformance-test-served-endpoint"] == here.endpoints[1]
            selected = [here.endpoints[number] for number in (2, 1, 0)]
            assert response.headers["x-conformance-test-selected-endpoint"].split(",") == selected
            await until(lambda: bool(here.sidecars[1].outcomes))
            assert here.sidecars[1].outcomes[0].output_tokens == 3
            assert here.sidecars[2].outcomes[0].finish_reason == common_pb2.FINISH_REASON_FAILED
            assert not any(one.held for one in here.sidecars)
            await here.engines[2].start()

    run(test)


def test_where_all_endpoints_are_dead_the_client_gets_the_proxy_s_error(tmp_path: Path) -> None:
    """And nothing stays reserved."""

    async def test() -> None:
        async with behind(tmp_path, completes, completes) as (here, proxy):
            for engine in here.engines:
                await engine.stop()
            assert (await post(proxy)).status_code == 503
            await until(lambda: not any(one.held for one in here.sidecars))
            for engine in here.engines:
                await engine.start()

    run(test)


def test_a_subset_limits_the_choice(tmp_path: Path) -> None:
    """A filter before the picker sets it; without a known endpoint in it, the client gets 503."""

    async def test() -> None:
        async with behind(tmp_path, completes, completes, changes={EXT_PROC: SUBSET_FILTER + EXT_PROC}) as (
            here,
            proxy,
        ):
            here.sidecars[0].e2e_s = 1.0
            response = await post(proxy, {"x-test-subset": here.endpoints[1]})
            assert response.headers["x-block-instance"] == "b"
            response = await post(proxy, {"x-test-subset": "10.0.0.1:80"})
            assert response.status_code == 503
            assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
            assert response.json()["error"]["type"] == "server_error"
            assert (await post(proxy)).headers["x-block-instance"] == "a"

    run(test)


def test_a_request_that_is_shed_gets_429_and_a_time(tmp_path: Path) -> None:
    """The reply is the picker's, as a whole."""

    async def test() -> None:
        async with behind(tmp_path, completes, policy="slo") as (here, proxy):

            def late(response: Any) -> None:
                for one in response.predictions:
                    one.forecast.attained = 0.0

            here.sidecars[0].twist = late
            headers = {"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "1", "x-block-when-late": "shed"}
            response = await post(proxy, headers)
            assert response.status_code == 429
            assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
            assert int(response.headers["retry-after"]) >= 1
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"]["code"] == "rate_limit_exceeded"

    run(test)


def test_a_client_that_leaves_releases_its_request(tmp_path: Path) -> None:
    """Before the response, and within it."""

    async def test() -> None:
        async def begins(call: Call) -> None:
            if len(call.body) > 100:
                call.stream()
                await call.chunk(event("Hello"))
            await call.left()

        async with behind(tmp_path, begins) as (here, proxy):
            asking = asyncio.create_task(post(proxy))
            await until(lambda: bool(here.engines[0].calls))
            asking.cancel()
            await until(lambda: bool(here.sidecars[0].outcomes))
            fields = {"model": MODEL, "prompt": 100 * "x", "stream": True}
            async with proxy.client.stream("POST", "/v1/completions", json=fields) as response:
                assert await anext(response.aiter_raw()) == event("Hello")
            await until(lambda: len(here.sidecars[0].outcomes) == 2)
            reasons = {outcome.finish_reason for outcome in here.sidecars[0].outcomes}
            assert reasons == {common_pb2.FINISH_REASON_CANCELLED}
            assert not here.sidecars[0].held
            await until(lambda: len(here.running.service) == 0)

    run(test)


@pytest.mark.parametrize("num_bytes", [200_000, 5 * 2**20])
@pytest.mark.parametrize("name", ["override_host", "original_dst"])
def test_large_bodies_reach_the_engine_whole(tmp_path: Path, name: str, num_bytes: int) -> None:
    """Byte by byte, where nothing is added to them."""

    async def test() -> None:
        async with behind(tmp_path, echoes, name=name) as (here, proxy):
            body = json.dumps({"model": MODEL, "prompt": num_bytes * "é"}, ensure_ascii=False).encode()
            response = await proxy.client.post("/v1/completions", content=body)
            assert response.json() == {"size": len(body), "model": MODEL}
            assert here.engines[0].calls[0].body == body

    run(test)


@pytest.mark.parametrize("changes", [{}, BUFFERED], ids=["full_duplex", "buffered"])
def test_a_model_is_rewritten_and_written_back(tmp_path: Path, changes: dict[str, str]) -> None:
    """The body for the engine has another length, as has the response."""

    async def test() -> None:
        async with behind(tmp_path, echoes, changes=changes) as (here, proxy):
            response = await post(proxy, {"x-llm-d-model-name-rewrite": MODEL}, model="a much longer name of a model")
            assert response.json()["model"] == "a much longer name of a model"
            assert json.loads(here.engines[0].calls[0].body)["model"] == MODEL

    run(test)


def test_buffered_bodies(tmp_path: Path) -> None:
    """The proxy shows bodies as a whole, and the endpoint is chosen by the body."""

    async def test() -> None:
        async with behind(tmp_path, completes, completes, changes=BUFFERED) as (here, proxy):
            here.sidecars[1].e2e_s = 1.0
            response = await post(proxy, prompt=200_000 * "x")
            assert response.json() == COMPLETION
            assert response.headers["x-block-instance"] == "b"
            await until(lambda: bool(here.sidecars[1].outcomes))
            assert here.sidecars[1].outcomes[0].output_tokens == 3
            assert here.metric("block_picker_picks_total", how="placed") == 1

    run(test)


def test_headers_alone(tmp_path: Path) -> None:
    """The proxy shows no bodies: the request is placed nevertheless, and its reservation ends."""

    async def test() -> None:
        async with behind(tmp_path, completes, completes, changes=HEADERS_ONLY) as (here, proxy):
            here.sidecars[1].e2e_s = 1.0
            response = await post(proxy, prompt=4000 * "x")
            assert response.json() == COMPLETION
            assert response.headers["x-block-instance"] == "b"
            await until(lambda: bool(here.sidecars[1].outcomes))
            assert here.sidecars[1].outcomes[0].prompt_tokens > 1000
            assert not here.sidecars[1].held

    run(test)


def test_the_test_mode_of_the_conformance_suite(tmp_path: Path) -> None:
    """A test names the endpoint, and the reply names the one that served."""

    async def test() -> None:
        settings = {"conformance_pool": "apps/pool"}
        async with behind(tmp_path, completes, streams, completes, settings=settings) as (here, proxy):
            for endpoint in here.endpoints:
                response = await post(proxy, {"test-epp-endpoint-selection": endpoint})
                assert response.status_code == 200
                assert response.headers["x-conformance-test-served-endpoint"] == endpoint
            response = await proxy.client.get(
                "/anything", headers={"test-epp-endpoint-selection": f"10.0.0.1,{here.endpoints[0]}"}
            )
            assert response.headers["x-conformance-test-served-endpoint"] == here.endpoints[0]
            assert [len(engine.calls) for engine in here.engines] == [2, 1, 1]

    run(test)
