"""A real vLLM engine with LoRA adapters: exported, learnt, placed on by their names, and forecast."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest

from predictor.approximations import LEARNT_ADAPTER_TIME, UNKNOWN_ADAPTER_TIME
from predictor.request import RequestFacts, adapter_number
from services.engine_state.snapshot import config_of, snapshot_from_view
from services.engine_state.view import UnreadableError
from tests.deploy.engines import MODEL, PROFILE, lora_adapter, need_vllm, random_weights, tiny_model
from tests.deploy.fleet import READY, Fleet, fleet
from tests.deploy.forecasting import forecasting
from tests.services.cluster.living import until
from tests.services.predictor_server.running_sidecars import request

pytestmark = pytest.mark.vllm

NAME = "fcfs"
ADAPTERS = ("sql", "chat", "code", "law", "poem")
MAX_LORAS, MAX_CPU_LORAS = 2, 4  # so that five adapters used in turn are loaded from disk each time
STORY = "Once upon a time there was a scheduler that knew what it was doing. "


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One engine with adapters and the services in front of it, for all tests of this file, which run in order."""
    need_vllm()
    folder = tmp_path_factory.mktemp("fleet")
    model = random_weights(tiny_model(folder / "model"), seed=7)
    modules = [f"{name}={lora_adapter(folder / name, model, number)}" for number, name in enumerate(ADAPTERS)]
    options = (
        "--load-format", "auto", "--enable-lora", "--max-loras", str(MAX_LORAS), "--max-cpu-loras", str(MAX_CPU_LORAS),
        "--max-lora-rank", "8", "--lora-modules", *modules,
    )  # fmt: skip
    with fleet(folder, (NAME,), *options, model=model) as running:
        yield running


def test_limits_and_names_are_known(one: Fleet) -> None:
    """The state file has the engine's limits, and the gateway lists its adapters."""

    async def test() -> None:
        await one.until(NAME, lambda response: response.state == READY)
        with one.state_of(NAME) as reader:
            view = reader.read()
        config = config_of(view)
        assert (config.max_loras, config.max_cpu_loras) == (MAX_LORAS, MAX_CPU_LORAS)
        assert {model.id async for model in one.client.models.list()} == {MODEL, *ADAPTERS}

    one.run(test())


def test_a_request_is_placed_by_the_name_of_its_adapter(one: Fleet) -> None:
    """Each adapter answers in its own way; the state file has the last two in GPU slots, and the last four in memory."""

    async def test() -> None:
        (before,) = await one.forecasts(NAME, request("asked", 40, 20, adapter=ADAPTERS[0]))
        assert UNKNOWN_ADAPTER_TIME in before.approximations
        texts = []
        for model in (MODEL, *ADAPTERS, MODEL, *ADAPTERS):
            placed = await one.stream(STORY, 12, model)
            assert (placed.failure, placed.num_tokens, placed.instance) == (None, 12, NAME)
            texts.append(placed.text)
        num_texts = len(ADAPTERS) + 1
        assert texts[:num_texts] == texts[num_texts:]
        assert len({*texts}) == num_texts
        with one.state_of(NAME) as reader:
            known = [(memory.number, memory.is_active) for memory in snapshot_from_view(reader.read()).adapters]
        last = ADAPTERS[-MAX_CPU_LORAS:]
        assert known == [
            (adapter_number(name), position >= MAX_CPU_LORAS - MAX_LORAS) for position, name in enumerate(last)
        ]
        active, loaded = await one.forecasts(
            NAME, request("active", 40, 20, adapter=ADAPTERS[-1]), request("loaded", 40, 20, adapter=ADAPTERS[0])
        )
        assert LEARNT_ADAPTER_TIME not in active.approximations
        assert LEARNT_ADAPTER_TIME in loaded.approximations
        assert active.ttft_s < loaded.ttft_s

    one.run(test())


def test_a_step_has_as_many_adapters_as_there_are_slots(one: Fleet) -> None:
    """Of three adapters at the same time, the requests of the third one wait, and those of the base model do not."""

    async def test() -> None:
        models = [*ADAPTERS[:3], MODEL]
        asking = [asyncio.create_task(one.stream(f"{model}: {STORY}", 120, model)) for model in models]
        seen: set[tuple[str, ...]] = set()
        with one.state_of(NAME) as reader:

            def all_have_ended() -> bool:
                with suppress(UnreadableError):  # while the engine writes it
                    snapshot = snapshot_from_view(reader.read())
                    assert len({live.request.adapter for live in snapshot.running} - {""}) <= MAX_LORAS
                    if len(snapshot.running) + len(snapshot.waiting) == len(models):
                        seen.add(tuple(live.request.adapter for live in snapshot.waiting))
                return all(task.done() for task in asking)

            await until(all_have_ended)
        placed = await asyncio.gather(*asking)
        assert {(one.failure, one.num_tokens) for one in placed} == {(None, 120)}
        assert any(len(waiting) == 1 and waiting[0] in ADAPTERS for waiting in seen), seen

    one.run(test())


def test_its_requests_are_forecast(one: Fleet) -> None:
    """At the pace of the engine's own steps and with the time of its loads, which a new sidecar learns."""
    engine = one.engines[NAME]

    async def test() -> None:
        for number in range(4 * len(ADAPTERS)):
            adapter, prompt, answer = ADAPTERS[number % len(ADAPTERS)], 40 + 37 * number % 300, 20 + 13 * number % 40
            candidate = RequestFacts(
                request_id=f"f{number}", prompt_tokens=prompt, output_tokens=answer, adapter=adapter
            )
            sending = engine.complete(f"{number}{STORY * 10}"[:prompt], answer, f"f{number}", model=adapter)
            reply = await compared.compare(candidate, sending)
            assert (reply["model"], reply["usage"]["completion_tokens"]) == (adapter, answer)
        assert compared.sidecar.refresh().engine.state.engine[0].lora_load_s > 0
        compared.require_accuracy(learnt_from=len(ADAPTERS))

    with forecasting(engine, PROFILE) as compared:
        one.run(test())
