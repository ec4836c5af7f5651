"""Two real vLLM engines behind gateway, scheduler and sidecars: clients, prefixes, preemption, priorities, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from statistics import median
from typing import Any

import openai
import pytest

from predictor.engine_view import EngineView
from predictor.request import RequestFacts
from protos.block.v1 import common_pb2
from scheduler.prefix.kv_block_hash import kv_block_hashes
from services.engine_state.snapshot import config_of
from services.engine_state.view import ENDED, UnreadableError
from services.predictor_server.exported import ExportedEngine
from tests.deploy.engines import BLOCK_SIZE, LONGEST, MODEL, NUM_BLOCKS, NUM_SEATS, PROFILE, need_vllm
from tests.deploy.fleet import POLICIES, READY, Fleet, fleet
from tests.services.cluster.living import PATIENCE_S, until
from tests.services.predictor_server.running_mirrors import forecast_by, mirror_of
from tests.services.predictor_server.running_sidecars import request

pytestmark = pytest.mark.vllm

STORY = "Once upon a time there was a scheduler that knew what it was doing. "
HI = [{"role": "user", "content": "Say hello"}]
EXACT = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Both engines and the services in front of them, for all tests of this file, which run in order."""
    need_vllm()
    with fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.mark.parametrize("name", POLICIES)
def test_a_sidecar_finds_the_engine_and_its_settings(two: Fleet, name: str) -> None:
    """It reads blocks, seats and scheduling policy from the engine."""

    async def test() -> None:
        response = await two.until(name, lambda response: response.state == READY)
        assert response.indicators.num_total_blocks == NUM_BLOCKS
        with two.state_of(name) as reader:
            config = config_of(reader.read())
        assert (config.num_gpu_blocks, config.block_size) == (NUM_BLOCKS + 1, BLOCK_SIZE)
        assert (config.max_num_seqs, config.max_model_len) == (NUM_SEATS, LONGEST)
        assert (config.scheduling_policy, config.enable_prefix_caching) == (name, True)

    two.run(test())


def test_the_official_client_completes(two: Fleet) -> None:
    """Whole and streamed completions have the same text and token counts, and name their instance."""

    async def test() -> None:
        assert [model.id async for model in two.client.models.list()] == [MODEL]
        asked: dict[str, Any] = {"model": MODEL, "prompt": STORY, **EXACT}
        whole = await two.client.completions.create(**asked)
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(STORY), 12)
        assert whole.choices[0].finish_reason == "length"
        raw = await two.client.completions.with_raw_response.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in raw.parse()]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
        assert chunks[-1].usage.completion_tokens == 12
        assert raw.headers["x-block-instance"] in two.engines
        assert raw.headers["x-block-policy"] == "block"
        assert float(raw.headers["x-block-predicted-e2e-ms"]) > float(raw.headers["x-block-predicted-ttft-ms"]) > 0

    two.run(test())


def test_the_official_client_chats(two: Fleet) -> None:
    """Chats are rendered by the engine's own chat template."""

    async def test() -> None:
        asked: dict[str, Any] = {"model": MODEL, "messages": HI, **EXACT}
        whole = await two.client.chat.completions.create(**asked)
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len("user:Say hello;assistant:"), 12)
        stream = await two.client.chat.completions.create(**asked, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content

    two.run(test())


def test_what_an_engine_refuses_reaches_the_client(two: Fleet) -> None:
    """The client raises its own exceptions for refusals of the gateway and of the engine."""

    async def test() -> None:
        with pytest.raises(openai.NotFoundError):
            await two.client.completions.create(model="huge", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await two.client.completions.create(model=MODEL, prompt="x" * (LONGEST + 1), max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            await two.client.completions.create(model=MODEL, prompt="x", max_tokens=1, temperature=-3)

    two.run(test())


def test_simultaneous_requests_are_spread(two: Fleet) -> None:
    """Both engines serve as soon as the scheduler knows that both are up, and every stream is complete."""
    seen: set[str] = set()

    async def both_serve() -> bool:
        placed = await asyncio.gather(*(two.stream(f"{number}{STORY}", 40) for number in range(NUM_SEATS)))
        assert {one.failure for one in placed} == {None}
        assert {one.num_tokens for one in placed} == {40}
        seen.update(one.instance for one in placed)
        return seen == {*two.engines}

    async def test() -> None:
        await two.use("round_robin")
        await until(both_serve, 2 * PATIENCE_S)
        await two.use("block")
        await two.until_idle()

    two.run(test())


@pytest.mark.parametrize("name", POLICIES)
def test_prefix_hits_are_forecast(two: Fleet, name: str) -> None:
    """The sidecar forecasts the number of cached tokens that the engine then reports."""
    prompt = f"{name}: {STORY * 3}"
    ids = [3 + ord(character) - 32 for character in prompt]
    asking = request(
        "asked", len(ids), 4, prefix_hashes=kv_block_hashes(ids, BLOCK_SIZE), prefix_block_tokens=BLOCK_SIZE
    )

    async def test() -> None:
        engine, whole_blocks = two.engines[name], (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        (unknown,) = await two.forecasts(name, asking)
        assert unknown.prefix_hit_tokens == 0
        first = await engine.complete(prompt, 4, "first")
        assert first["usage"]["prompt_tokens"] == len(ids)

        async def is_cached() -> bool:  # the sidecar reads the engine's state a moment later
            (forecast,) = await two.forecasts(name, asking)
            return forecast.prefix_hit_tokens == whole_blocks

        await until(is_cached)
        known, nameless = await two.forecasts(name, asking, request("nameless", len(ids), 4))
        assert known.ttft_s < nameless.ttft_s
        again = await engine.complete(prompt, 4, "again")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_blocks
        with two.state_of(name) as reader:
            hits = {client_name(row): int(row["hit_tokens"]) for row in reader.new_outcomes()}
        assert (hits["first"], hits["again"]) == (0, whole_blocks)

    two.run(test())


def test_a_conversation_returns_to_its_prefix(two: Fleet) -> None:
    """The gateway hashes a prompt's blocks, so a prefix-aware policy sends requests to their cache."""
    prompt = "A long instruction that all turns begin with. " * 12

    async def test() -> None:
        await two.use("expr: new_prefill_tokens")
        first = await two.stream(prompt, 4)
        await two.until_idle()
        again = [await two.stream(f"{prompt}{number}", 4) for number in range(3)]
        assert {one.instance for one in again} == {first.instance}
        await two.use("block")

    two.run(test())


def client_name(row: Any) -> str:
    """Return the client's id of a request."""
    return bytes(row["request_id"]).decode().removeprefix("cmpl-").rsplit("-", 2)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_preemption_is_seen(two: Fleet, name: str) -> None:
    """Short of blocks, the engine keeps the first or most urgent requests; sidecar and engine count the same preemptions."""
    answer_tokens, num = 600, 6

    async def test() -> None:
        engine = two.engines[name]
        before = (await two.predict(name)).indicators.num_preemptions_total
        theirs_before = engine.metric("vllm:num_preemptions_total")
        with two.state_of(name) as reader:
            reader.new_outcomes()
            answers = []
            for number in range(num):  # each is more urgent than the one before
                fields = {"priority": num - number} if name == "priority" else {}
                answer = engine.complete(chr(97 + number) * 100, answer_tokens, f"p{number}", **fields)
                answers.append(asyncio.create_task(answer))
                if number == 0:  # the least urgent one runs before the others come
                    await two.until(name, lambda response: response.indicators.num_running == 1)
            await two.until(name, lambda response: response.indicators.num_free_blocks < NUM_BLOCKS // 4)
            await two.until(name, lambda response: response.indicators.num_preemptions_total > before)
            done = await asyncio.gather(*answers)
            assert {one["usage"]["completion_tokens"] for one in done} == {answer_tokens}
            await two.until(name, lambda response: response.indicators.num_running == 0)
            ended = {client_name(row): row for row in reader.new_outcomes()}
        preempted = {name: int(row["num_preemptions"]) for name, row in ended.items()}
        counted = (await two.predict(name)).indicators.num_preemptions_total - before
        assert counted == sum(preempted.values()) == engine.metric("vllm:num_preemptions_total") - theirs_before > 0
        if name == "priority":
            assert preempted[f"p{num - 1}"] == 0  # on a slow machine p0 may end before blocks are short
            more_urgent = sum(preempted[f"p{number}"] for number in range(num // 2, num))
            assert more_urgent <= counted - more_urgent
        else:
            assert preempted[min(ended, key=lambda one: float(ended[one]["arrival_s"]))] == 0

    two.run(test())


@pytest.mark.parametrize("name", POLICIES)
def test_forecasts_follow_priorities(two: Fleet, name: str) -> None:
    """With priorities, an urgent request is forecast to go first, and does; without, it waits in order."""

    async def test() -> None:
        engine = two.engines[name]
        with_priorities = name == "priority"

        def answer(prompt: str, tokens: int, called: str, priority: int) -> asyncio.Task[Any]:
            fields = {"priority": priority} if with_priorities else {}
            return asyncio.create_task(engine.complete(prompt, tokens, called, **fields))

        line = [answer(chr(48 + number) * 20, 200, f"line{number}", 5) for number in range(15 * NUM_SEATS)]
        late = answer("y" * 20, 30, "lazy", 9)
        await two.until(name, lambda response: response.indicators.num_waiting >= 12 * NUM_SEATS)
        urgent, lazy = await two.forecasts(
            name, request("urgent", 20, 30, priority=0), request("lazy", 20, 30, priority=9)
        )
        assert (urgent.ttft_s < 0.7 * lazy.ttft_s) == with_priorities
        if with_priorities:
            await answer("z" * 20, 30, "urgent", 0)
            assert not late.done()
        for task in (*line, late):  # clients that leave
            task.cancel()
        await asyncio.gather(*line, late, return_exceptions=True)
        await two.until_idle()

    two.run(test())


def test_a_mirror_before_vllm(two: Fleet) -> None:
    """Without looking at what the engine shows, it finds the settings, and forecasts about as one that does look."""
    candidate = RequestFacts(request_id="candidate", prompt_tokens=100, output_tokens=50)

    async def test() -> None:
        engine = two.engines["fcfs"]
        exported = ExportedEngine(str(engine.state), PROFILE, "conditional_median", 30.0)
        ratios, differences = [], []
        async with mirror_of(engine.url, engine={}, profile=PROFILE) as mirrored:
            told = await mirrored.rpc.until(lambda told: told.state == READY)
            assert told.indicators.source == common_pb2.STATE_SOURCE_MIRRORED
            assert told.indicators.num_total_blocks == NUM_BLOCKS
            (refused,) = (await mirrored.rpc.predict(request("long", LONGEST))).predictions
            assert "max_model_len" in refused.refusal.reason
            mirror = mirrored.mirror.source
            for turn in range(10):  # on a busy machine one round gives few samples
                asking = [
                    asyncio.create_task(
                        mirrored.complete(
                            model=MODEL, prompt=f"{number:03}" * 30, max_tokens=120 + number, stream=number % 2 == 0
                        )
                    )
                    for number in range(4 * NUM_SEATS)
                ]
                while not all(task.done() for task in asking):
                    await asyncio.sleep(0.02)
                    if mirror.refresh() and exported.refresh().engine.state.engine[0].num_running == NUM_SEATS:
                        ours, theirs = forecast_by(mirror, candidate), forecast_by(exported, candidate)
                        ratios.append(ours.e2e_s / theirs.e2e_s)
                        differences.append(abs(num_there(mirror.refresh()) - num_there(exported.refresh())))
                answers = await asyncio.gather(*asking)
                assert {answer.status_code for answer in answers} == {200}
                if turn == 0:
                    ratios.clear()  # it was still learning the engine's real speed
                elif len(ratios) >= 20:
                    break
            assert len(ratios) > 5
            assert 0.4 < median(ratios) < 2.5, ratios
            assert median(differences) <= 2, differences  # both look at a moving engine
            await mirrored.until(lambda: num_there(mirror.refresh()) == 0)
        exported.close()

    two.run(test())


def num_there(picture: EngineView) -> int:
    """Return the number of running and waiting requests of a view."""
    head = picture.engine.state.engine[0]
    return int(head.num_running + head.num_waiting)


def test_a_terminated_engine_removes_its_state_file(two: Fleet) -> None:
    """Its file is removed, and the sidecar reports it as starting."""

    async def test() -> None:
        engine = two.engines["priority"]
        await asyncio.to_thread(engine.terminate)
        await until(lambda: not engine.state.exists())
        await two.until("priority", lambda response: response.state != READY)

    two.run(test())


def test_a_killed_engine_is_reported_as_down(two: Fleet) -> None:
    """Its last state file stays, and is not used."""

    async def test() -> None:
        with two.state_of("fcfs") as reader:
            reader.read()
            two.engines["fcfs"].kill()
            await two.until("fcfs", lambda response: response.state == common_pb2.INSTANCE_STATE_DOWN)
            with pytest.raises(UnreadableError) as refusal:
                reader.read()
            assert refusal.value.reason == ENDED

    two.run(test())
