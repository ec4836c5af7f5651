"""The mirroring sidecar before real emulated engines: how true its picture is, and what it makes of faults."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from predictor.config import EngineConfig
from predictor.request import Request
from protos.block.v1 import common_pb2
from services.predictor_server.engine_view import EngineSource
from services.predictor_server.exported import ExportedEngine
from tests.services.cli.running import refusal
from tests.services.emulator.running import A30, MODEL, Emulated, emulated, process
from tests.services.predictor_server.asking import READY, request, run
from tests.services.predictor_server.mirrored import Mirrored, forecast_by, mirror_of

CONFIG = EngineConfig(
    max_num_seqs=16, max_num_batched_tokens=512, num_gpu_blocks=257, max_model_len=1024, enable_prefix_caching=False
)
CANDIDATE = Request(request_id="candidate", prompt_tokens=100, output_tokens=50)
LONG = {"max_tokens": 400, "stream": True}
SMALL = ("-p", "llama-2-7b-a30", "--max-model-len", "1024", "--num-gpu-blocks", "257", "--state-file", "none")


def url_of(engine: Emulated) -> str:
    """Where it is."""
    return str(engine.client.base_url).rstrip("/")


async def traffic(client: httpx.AsyncClient, num: int, *, stream: bool, speed: float) -> None:
    """Send requests of known lengths at random moments of a few engine seconds."""
    draw = random.Random(3)

    async def one(number: int) -> None:
        await asyncio.sleep(draw.uniform(0.0, 4.0) / speed)
        body = {
            "prompt": "word " * draw.randint(20, 250), "max_tokens": draw.randint(20, 120), "ignore_eos": True,
            "stream": stream,
        }  # fmt: skip
        path, asked = "/v1/completions", body
        if number % 3 == 0:
            path, asked = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": body["prompt"]}]}
        assert (await client.post(path, json=asked)).status_code == 200

    await asyncio.gather(*(one(number) for number in range(num)))


def queues(source: EngineSource) -> tuple[int, int]:
    """How many run and wait by a source."""
    head = source.look().engine.state.engine[0]
    return int(head.num_running), int(head.num_waiting)


@pytest.mark.parametrize("stream", [True, False])
def test_its_forecasts_are_nearly_those_of_an_engine_that_shows_itself(stream: bool, tmp_path: Path) -> None:
    """On the same traffic, at the same moments, by the same engine's exported state."""
    speed = 1.0  # on a busy machine, a faster one would fall behind its own clock

    async def test(engine: Emulated) -> None:
        exported = ExportedEngine(str(engine.state_file), A30, "conditional_median", 30.0)
        errors, sizes = [], []
        async with mirror_of(url_of(engine), speed=speed) as mirrored:
            mirror = mirrored.mirroring.source
            sending = asyncio.create_task(traffic(mirrored.client, 24, stream=stream, speed=speed))
            while not sending.done():
                await asyncio.sleep(0.05)
                if mirrored.asked.sidecar.source.look().engine and sum(queues(exported)) > 2:
                    theirs, ours = forecast_by(exported, CANDIDATE), forecast_by(mirror, CANDIDATE)
                    errors.append(abs(ours.e2e_s - theirs.e2e_s) / theirs.e2e_s)
                    sizes.append(abs(sum(queues(exported)) - sum(queues(mirror))))
            await sending
            await mirrored.until(lambda: queues(mirror) == (0, 0) == queues(exported))
            assert len(errors) > 10
            assert median(errors) < 0.15
            assert median(sizes) <= 1
        exported.close()

    with emulated(tmp_path, CONFIG, speed=speed) as engine:
        run(test(engine))


def test_prompts_that_share_a_prefix_do_not_confuse_it(tmp_path: Path) -> None:
    """The engine holds fewer blocks than the mirror thinks, and the mirror learns of that, and goes on."""
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=512, num_gpu_blocks=257, max_model_len=1024)

    async def test(engine: Emulated) -> None:
        async with mirror_of(url_of(engine), speed=10.0) as mirrored:
            await mirrored.asked.until(lambda answer: answer.state == READY)
            states = set()
            asking = [
                asyncio.create_task(mirrored.complete(prompt="word " * 300, stream=True, max_tokens=40 + 10 * number))
                for number in range(12)
            ]
            while not all(task.done() for task in asking):
                states.add((await mirrored.asked.predict()).state)
                await asyncio.sleep(0.02)
            assert states == {READY}
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
            await mirrored.asked.until(lambda answer: answer.indicators.num_free_blocks == 256)

    with emulated(tmp_path, config, state_file="", speed=10.0) as engine:
        run(test(engine))


def test_it_says_that_it_mirrors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the wire, in a metric and in the log; and its settings are those that the engine told."""

    async def test(engine: Emulated) -> None:
        async with mirror_of(url_of(engine), speed=100.0) as mirrored:
            response = await mirrored.asked.until(lambda answer: answer.state == READY)
            assert response.indicators.source == common_pb2.STATE_SOURCE_MIRRORED
            assert response.indicators.num_total_blocks == CONFIG.num_gpu_blocks - 1
            assert mirrored.asked.sample("block_state_source", source="mirrored") == 1
            (refused,) = (await mirrored.asked.predict(request("long", CONFIG.max_model_len))).predictions
            assert "max_model_len" in refused.refusal.reason
            assert any(line.message == "engine is mirrored from its traffic" for line in caplog.records)

    with caplog.at_level("INFO"), emulated(tmp_path, CONFIG, state_file="", speed=100.0) as engine:
        run(test(engine))


def test_promises_end_when_their_requests_pass(tmp_path: Path) -> None:
    """A reservation counts until its request comes by the proxy, and its forecast is compared with what came of it."""

    async def test(engine: Emulated) -> None:
        async with mirror_of(url_of(engine), speed=20.0) as mirrored:
            asked = mirrored.asked
            await asked.until(lambda answer: answer.state == READY)
            foretold = await asked.forecast(request("mine", 20, 10))
            await asked.reserve(request("mine", 20, 10), forecast=foretold)
            assert (await asked.predict()).indicators.num_reserved == 1
            answer = await mirrored.client.post(
                "/v1/completions",
                json={"prompt": "Hello", "max_tokens": 10, "ignore_eos": True},
                headers={"x-request-id": "mine"},
            )
            assert answer.status_code == 200
            await asked.until(lambda answer: answer.indicators.num_reserved == 0)
            assert asked.sample("block_reservations_ended_total", how="shown") == 1
            await mirrored.until(lambda: asked.sample("block_forecast_error_ratio_count", quantity="e2e") == 1)
            assert asked.sample("block_forecast_error_ratio_sum", quantity="output_tokens") == 0

    with emulated(tmp_path, CONFIG, state_file="", speed=20.0) as engine:
        run(test(engine))


def test_who_leaves_leaves_engine_and_mirror(tmp_path: Path) -> None:
    """A stream that its client drops is cancelled at the engine and forgotten here."""

    async def test(engine: Emulated) -> None:
        async with mirror_of(url_of(engine), speed=0.5) as mirrored:
            await mirrored.asked.until(lambda answer: answer.state == READY)
            body = {"prompt": "Hello", "ignore_eos": True, **LONG}
            async with mirrored.client.stream("POST", "/v1/completions", json=body) as stream:
                pieces = stream.aiter_raw()  # kept, as its end would be the answer's
                await anext(pieces)
                await mirrored.asked.until(lambda answer: answer.indicators.num_running == 1)
            await mirrored.asked.until(lambda answer: answer.indicators.num_running == 0)
            await mirrored.until(engine.is_idle)

    with emulated(tmp_path, CONFIG, state_file="", speed=0.5) as engine:
        run(test(engine))


async def flowing(mirrored: Mirrored, num: int) -> list[asyncio.Task[httpx.Response]]:
    """Start long streams, and wait until the mirror has them."""
    tasks = [asyncio.create_task(mirrored.complete(**LONG)) for _ in range(num)]
    await mirrored.asked.until(lambda answer: answer.indicators.num_running == num)
    return tasks


async def cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    """Give up on them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_what_comes_by_another_way_is_seen_in_the_totals(tmp_path: Path) -> None:
    """Requests straight to the engine count as unknown load, which forecasts reckon with, as long as they last."""

    async def test(engine: Emulated) -> None:
        async with mirror_of(url_of(engine), speed=0.5) as mirrored, httpx.AsyncClient(timeout=60.0) as direct:
            asked = mirrored.asked
            await asked.until(lambda answer: answer.state == READY)
            alone = await asked.forecast(request("x", 200, 50))
            body = {"prompt": "word " * 200, "ignore_eos": True, **LONG}
            strangers = [
                asyncio.create_task(direct.post(f"{url_of(engine)}/v1/completions", json=body)) for _ in range(6)
            ]
            response = await asked.until(lambda answer: answer.indicators.num_running == 6)
            assert response.indicators.more["num_unknown"] == 6
            assert asked.sample("block_unknown_requests") == 6
            assert response.indicators.num_free_blocks < 200
            assert (await asked.forecast(request("x", 200, 50))).e2e_s > alone.e2e_s
            await cancelled(strangers)
            await asked.until(lambda answer: answer.indicators.num_running == 0)
            assert asked.sample("block_unknown_requests") == 0
            free = CONFIG.num_gpu_blocks - 1
            await asked.until(lambda answer: answer.indicators.num_free_blocks == free)

    with emulated(tmp_path, CONFIG, state_file="", speed=0.5) as engine:
        run(test(engine))


def test_a_slow_engines_pace_is_learnt(tmp_path: Path) -> None:
    """An engine that takes twice as long as its profile says is forecast to."""

    async def test(engine: Emulated) -> None:
        engine.order(slow=2.0)
        async with mirror_of(url_of(engine), speed=1.0) as mirrored:
            await mirrored.asked.until(lambda answer: answer.state == READY)
            tasks = await flowing(mirrored, 2)
            response = await mirrored.asked.until(lambda answer: answer.indicators.pace > 1.6)
            assert response.indicators.pace < 3.0
            await cancelled(tasks)

    with emulated(tmp_path, CONFIG, state_file="", speed=1.0) as engine:
        run(test(engine))


def test_a_hung_engine_is_down_until_it_goes_on(tmp_path: Path) -> None:
    """Where neither clients nor totals see anything happen, the instance is not recommended."""

    async def test(engine: Emulated) -> None:
        async with mirror_of(url_of(engine), speed=1.0, sidecar={"stall_s": 1.0}) as mirrored:
            await mirrored.asked.until(lambda answer: answer.state == READY)
            tasks = await flowing(mirrored, 1)
            await asyncio.to_thread(engine.order, hang=True)
            await mirrored.asked.until(lambda answer: answer.state == common_pb2.INSTANCE_STATE_DOWN)
            await asyncio.to_thread(engine.order)
            await mirrored.asked.until(lambda answer: answer.state == READY)
            await cancelled(tasks)

    with emulated(tmp_path, CONFIG, state_file="", speed=1.0) as engine:
        run(test(engine))


def test_what_the_engine_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    """A request that was mirrored before the engine refused it is forgotten, also where it stood for several."""

    async def test(engine: Emulated) -> None:
        async with mirror_of(url_of(engine), speed=50.0) as mirrored:
            await mirrored.asked.until(lambda answer: answer.state == READY)
            assert (await mirrored.complete(n=3)).status_code == 400  # the emulator makes one only
            assert (await mirrored.complete(prompt="word " * 3000)).status_code == 400
            assert (await mirrored.complete(model="another")).status_code == 404
            assert (await mirrored.complete(model=MODEL, max_tokens=5)).status_code == 200
            await mirrored.asked.until(
                lambda answer: answer.indicators.num_running + answer.indicators.num_waiting == 0
            )

    with emulated(tmp_path, CONFIG, state_file="", speed=50.0) as engine:
        run(test(engine))


def test_an_engine_that_dies_and_comes_back_is_mirrored_anew() -> None:
    """Streams end with an error, the instance is down, then idle and ready again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    async def test() -> None:
        with process(*SMALL, "--port", port, "--speed", "0.5") as started:
            sidecar = {"health_s": 0.1}
            async with mirror_of(started.url, speed=0.5, sidecar=sidecar) as mirrored:
                await mirrored.asked.until(lambda answer: answer.state == READY)
                tasks = await flowing(mirrored, 3)
                started.process.kill()
                started.process.wait()
                for task in tasks:
                    assert b'"error"' in (await task).content
                await mirrored.asked.until(lambda answer: answer.state == common_pb2.INSTANCE_STATE_DOWN)
                assert (await mirrored.complete()).status_code == 503
                await restarted(mirrored)

    async def restarted(mirrored: Mirrored) -> None:
        starting = process(*SMALL, "--port", port, "--speed", "20")
        await asyncio.to_thread(starting.__enter__)
        try:
            response = await mirrored.asked.until(lambda answer: answer.state == READY)
            assert response.indicators.num_running + response.indicators.num_waiting == 0
            assert (await mirrored.complete(max_tokens=5)).status_code == 200
        finally:
            starting.__exit__(None, None, None)

    run(test())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((), "state_file"),
        (("--engine-url", "http://127.0.0.1:1"), "profile"),
        (("--engine-url", "nonsense", "--profile", "llama-2-7b-a30"), "engine_url"),
        (("--engine-url", "http://127.0.0.1:1", "--profile", "llama-2-7b-a30", "--proxy-port", "99999"), "proxy_port"),
        (("--engine-url", "http://127.0.0.1:1", "--profile", "llama-2-7b-a30", "--engine-speed", "0"), "engine_speed"),
        (("--engine-url", "http://127.0.0.1:1", "--profile", "llama-2-7b-a30", "--max-num-seqs", "0"), "max_num_seqs"),
    ],
)
def test_what_cannot_be_mirrored_is_refused_in_one_line(arguments: tuple[str, ...], field: str) -> None:
    """The line names the setting that is missing or wrong."""
    assert field in refusal("serve", "predictor", *arguments)
