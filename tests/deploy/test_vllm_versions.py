"""One engine of the installed vLLM, whichever version: exported, measured, forecast, and placed on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from predictor.fitting.engine_profile import EngineMeasurement, steps_of
from predictor.fitting.regression import predict
from predictor.profile import Profile, profile_from_json, profile_to_json
from predictor.request import RequestFacts
from predictor.vllm_versions import rules_for
from services.engine_state.snapshot import config_of
from services.profiling.measure_command import MeasureOptions, measured_profile
from tests.conformance.vllm_side import version
from tests.deploy.engines import NUM_BLOCKS, NUM_SEATS, need_vllm
from tests.deploy.fleet import READY, Fleet, fleet
from tests.deploy.forecasting import forecasting

pytestmark = pytest.mark.vllm

NAME = "fcfs"
BUDGET_S = 60.0
STORY = "Once upon a time there was a scheduler that knew what it was doing. "


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One engine and the services in front of it, for all tests of this file, which run in order."""
    need_vllm()
    with fleet(tmp_path_factory.mktemp("fleet"), (NAME,)) as running:
        yield running


@pytest.fixture(scope="module")
def measured(one: Fleet) -> tuple[Profile, EngineMeasurement]:
    """A profile that is measured on the engine within a minute, and the measurement."""

    async def measure() -> None:
        await one.until(NAME, lambda response: response.state == READY)
        engine = one.engines[NAME]
        options = MeasureOptions(engine_url=engine.url, state_file=str(engine.state), budget_s=BUDGET_S)
        results.append(await measured_profile(options, lambda _: None))

    results: list[tuple[Profile, EngineMeasurement]] = []
    one.run(measure())
    return results[0]


def test_its_state_says_which_version_it_is(one: Fleet) -> None:
    """Settings are the engine's, and the rules are those of its very release."""

    async def test() -> None:
        response = await one.until(NAME, lambda response: response.state == READY)
        assert response.indicators.num_total_blocks == NUM_BLOCKS
        with one.state_of(NAME) as reader:
            config = config_of(reader.read())
        assert (config.num_gpu_blocks, config.max_num_seqs) == (NUM_BLOCKS + 1, NUM_SEATS)
        assert config.vllm_version == version()
        assert rules_for(config.vllm_version).is_exact

    one.run(test())


def test_it_can_be_measured(measured: tuple[Profile, EngineMeasurement]) -> None:
    """On a busy machine the budget may end before several requests have run at once."""
    profile, measurement = measured
    steps = steps_of(measurement.steps)
    assert profile_from_json(profile_to_json(profile)) == profile
    assert 1 <= profile.valid.max_sequences <= NUM_SEATS
    assert 0.5 < predict(profile.step_time, steps).sum() / steps.seconds.sum() < 2


def test_its_requests_are_forecast(one: Fleet, measured: tuple[Profile, EngineMeasurement]) -> None:
    """By the profile that was measured, from the state that it exports."""
    (profile, _), engine = measured, one.engines[NAME]

    async def test() -> None:
        for number, (prompt, answer) in enumerate([(40, 60), (300, 20), (120, 40), (500, 60), (20, 80)]):
            candidate = RequestFacts(request_id=f"f{number}", prompt_tokens=prompt, output_tokens=answer)
            sending = engine.complete(f"{number}{STORY * 10}"[:prompt], answer, f"f{number}")
            reply = await compared.compare(candidate, sending)
            assert reply["usage"]["completion_tokens"] == answer
        compared.require_accuracy()

    with forecasting(engine, profile) as compared:
        one.run(test())


def test_requests_are_placed_on_it(one: Fleet) -> None:
    """A client of the gateway gets its whole answer from it, with a forecast."""

    async def test() -> None:
        placed = await asyncio.gather(*(one.stream(f"{number}{STORY}", 30) for number in range(4)))
        assert {(result.failure, result.num_tokens, result.instance) for result in placed} == {(None, 30, NAME)}

    one.run(test())
