"""One engine of the installed vLLM, whichever version: exported, measured, forecast, and placed on."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator

import pytest

from predictor.profile import Profile, profile_from_json, profile_to_json
from predictor.request import RequestFacts
from predictor.vllm_versions import rules_for
from services.engine_state.snapshot import config_of
from services.predictor_server.exported import ExportedEngine
from services.predictor_server.sidecar import to_wall_clock
from services.profiling.measure_command import MeasureOptions, measured_profile
from tests.conformance.vllm_side import version
from tests.deploy.engines import NUM_BLOCKS, NUM_SEATS, need_vllm
from tests.deploy.fleet import READY, Fleet, fleet
from tests.services.predictor_server.running_mirrors import forecast_by

pytestmark = pytest.mark.vllm

NAME = "fcfs"
BUDGET_S = 15.0
STORY = "Once upon a time there was a scheduler that knew what it was doing. "
MOST_ERROR = 0.5  # of the median forecast, on a machine that other tests share


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One engine and the services in front of it, for all tests of this file, which run in order."""
    need_vllm()
    with fleet(tmp_path_factory.mktemp("fleet"), (NAME,)) as running:
        yield running


@pytest.fixture(scope="module")
def profile(one: Fleet) -> Profile:
    """A profile that is measured on the engine within seconds."""

    async def measure() -> None:
        await one.until(NAME, lambda response: response.state == READY)
        engine = one.engines[NAME]
        options = MeasureOptions(engine_url=engine.url, state_file=str(engine.state), budget_s=BUDGET_S)
        measured.append((await measured_profile(options, lambda _: None))[0])

    measured: list[Profile] = []
    one.run(measure())
    return measured[0]


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


def test_it_can_be_measured(profile: Profile) -> None:
    """The profile has steps of all kinds."""
    assert profile_from_json(profile_to_json(profile)) == profile
    assert 1 < profile.valid.max_sequences <= NUM_SEATS
    assert profile.step_time.constant_s + profile.step_time.token_s > 0


def test_its_requests_are_forecast(one: Fleet, profile: Profile) -> None:
    """By the profile that was measured, from the state that it exports."""
    errors = []

    async def test() -> None:
        engine = one.engines[NAME]
        sidecar = ExportedEngine(str(engine.state), profile, "conditional_median", 60.0)
        for number, (prompt, answer) in enumerate([(40, 60), (300, 20), (120, 40), (500, 60), (20, 80)]):
            candidate = RequestFacts(request_id=f"f{number}", prompt_tokens=prompt, output_tokens=answer)
            forecast = to_wall_clock(forecast_by(sidecar, candidate), 1.0, profile.transit)
            started_s = asyncio.get_running_loop().time()
            reply = await engine.complete(f"{number}{STORY * 10}"[:prompt], answer, f"f{number}")
            real_s = asyncio.get_running_loop().time() - started_s
            assert reply["usage"]["completion_tokens"] == answer
            errors.append(abs(forecast.e2e_s - real_s) / real_s)
        sidecar.close()

    one.run(test())
    assert statistics.median(errors) < MOST_ERROR, errors


def test_requests_are_placed_on_it(one: Fleet) -> None:
    """A client of the gateway gets its whole answer from it, with a forecast."""

    async def test() -> None:
        placed = await asyncio.gather(*(one.stream(f"{number}{STORY}", 30) for number in range(4)))
        assert {(result.failure, result.num_tokens, result.instance) for result in placed} == {(None, 30, NAME)}

    one.run(test())
