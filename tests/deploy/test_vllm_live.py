"""A real vLLM engine that serves a tiny model, and a sidecar that reads what the plug-in shows of it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protos.block.v1 import common_pb2
from services.export.reader import Reader
from services.export.snapshot import config_of
from services.export.view import ENDED, UnreadableError
from tests.conformance.vllm_side import interpreter
from tests.deploy.engines import STOP_S, Engine, tiny_model, vllm_serving
from tests.services.predictor_server.asking import Asked, request, sidecar_of

pytestmark = pytest.mark.vllm

NUM_REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS, BLOCK_SIZE = 4, 100, 250, 32
PROMPTS = [chr(97 + number) * PROMPT_TOKENS for number in range(NUM_REQUESTS)]


def test_a_sidecar_beside_vllm(tmp_path: Path) -> None:
    """It reads the settings, follows requests from arrival to end, foresees prefix hits, outlives a killed engine."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    model, state = tiny_model(tmp_path / "model"), tmp_path / "state"
    reader = Reader(str(state))

    async def test() -> None:
        async with sidecar_of(state, stall_s=1e9) as asked:
            assert (await asked.predict(request())).state == common_pb2.INSTANCE_STATE_STARTING
            with vllm_serving(model, state, tmp_path / "first.log") as engine:
                config = config_of(reader.read())
                assert (config.num_gpu_blocks, config.block_size, config.max_num_seqs) == (65, BLOCK_SIZE, 8)
                assert (config.max_model_len, config.scheduling_policy) == (1024, "fcfs")
                await ready(asked)
                await follows(asked, engine, reader)
                await shows_hits(asked, engine, reader)
                life = reader.read().life
                engine.kill()
                await asked.until(lambda response: response.state == common_pb2.INSTANCE_STATE_DOWN)
                with pytest.raises(UnreadableError) as refusal:
                    reader.read()
                assert refusal.value.reason == ENDED
            with vllm_serving(model, state, tmp_path / "second.log", "--scheduling-policy", "priority") as engine:
                await ready(asked)
                view = reader.read()
                assert view.life != life
                assert config_of(view).scheduling_policy == "priority"
                assert (await asyncio.to_thread(engine.complete, "ab", 3, "second"))["usage"]["completion_tokens"] == 3
                await asked.until(lambda _: int(reader.read().state["num_outcomes"]) == 1)
                engine.process.terminate()
                await asyncio.to_thread(engine.process.wait, STOP_S)
                await asked.until(lambda response: response.state != common_pb2.INSTANCE_STATE_READY)

    asyncio.run(test())


async def ready(asked: Asked) -> None:
    """Wait until the sidecar takes the engine for one that serves."""
    await asked.until(lambda response: response.state == common_pb2.INSTANCE_STATE_READY)


async def follows(asked: Asked, engine: Engine, reader: Reader) -> None:
    """Requests are seen to run, one more is forecast behind them, and all are seen to end with what they got."""
    with ThreadPoolExecutor() as clients:
        answers = [
            clients.submit(engine.complete, text, ANSWER_TOKENS, f"request-{number}")
            for number, text in enumerate(PROMPTS)
        ]
        busy = await asked.until(lambda response: response.indicators.num_running > 0)
        assert busy.indicators.num_running <= NUM_REQUESTS
        forecast = await asked.forecast(request("new", PROMPT_TOKENS, ANSWER_TOKENS))
        assert 0 < forecast.ttft_s < forecast.e2e_s
        usages = [(await asyncio.wrap_future(answer))["usage"] for answer in answers]
    assert {usage["completion_tokens"] for usage in usages} == {ANSWER_TOKENS}
    await asked.until(lambda response: response.indicators.num_running == 0)
    outcomes = [row for row in reader.new_outcomes() if b"request-" in row["request_id"]]
    assert [int(row["prompt_tokens"]) for row in outcomes] == [usage["prompt_tokens"] for usage in usages]
    assert {int(row["output_tokens"]) for row in outcomes} == {ANSWER_TOKENS}
    steps = reader.new_steps()
    assert len(steps) >= ANSWER_TOKENS
    assert (steps["seconds"] > 0).all()


async def shows_hits(asked: Asked, engine: Engine, reader: Reader) -> None:
    """What was computed stays shown, and whoever comes with the same beginning is shown to have hit it."""
    view = reader.read(contents=True)
    assert view.contents is not None
    assert (view.contents.blocks["content"] != 0).sum() >= NUM_REQUESTS * (PROMPT_TOKENS // BLOCK_SIZE)
    before = int(view.state["prefix_hits"])
    await asyncio.to_thread(engine.complete, PROMPTS[0], 2, "again")
    await asked.until(lambda _: int(reader.read().state["prefix_hits"]) > before)
    assert int(reader.read().state["prefix_hits"]) - before == (PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
