"""Measuring an emulated engine, whose step times are known, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.fitting.engine_profile import EngineMeasurement, profile_of, transit_of
from predictor.fitting.regression import COLUMNS, Steps, predict
from predictor.profile import profile_from_json
from services.engine_state.reader import Reader
from services.http.origin import origin_of
from services.profiling.measuring import MeasurementOptions, measure
from services.settings import seconds_of
from tests.ports import free_port
from tests.services.cli.running import block, refusal
from tests.services.emulator.running import A30, CONFIG, PATIENCE_S, Emulated, emulated

pytestmark = pytest.mark.xdist_group("measuring")  # all tests use one measurement

SPEED = 50.0
BUDGET_S = 8.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """An engine that is fast, but slow enough to observe all its steps."""
    with emulated(tmp_path_factory.mktemp("engine"), speed=SPEED) as running:
        yield running


@pytest.fixture(scope="module")
def measured(engine: Emulated) -> EngineMeasurement:
    """The result of a short measurement."""
    return asyncio.run(measure(options(engine), lambda _: None))


def options(engine: Emulated, budget_s: float = BUDGET_S) -> MeasurementOptions:
    """Options to measure this engine."""
    return MeasurementOptions(
        origin=origin_of(str(engine.client.base_url)), state_file=str(engine.state_file), budget_s=budget_s
    )


def test_the_engines_settings_are_found(measured: EngineMeasurement) -> None:
    """Blocks, sequences and token budget are those of the engine."""
    assert measured.config.num_gpu_blocks == CONFIG.num_gpu_blocks
    assert measured.config.max_num_seqs == CONFIG.max_num_seqs
    suggested = profile_of(measured, name="it", gpu="none").engine
    assert (suggested.block_size, suggested.max_num_batched_tokens) == (
        CONFIG.block_size,
        CONFIG.max_num_batched_tokens,
    )


def test_the_fit_agrees_with_the_engine(measured: EngineMeasurement) -> None:
    """Held-out steps are predicted within a few per cent, and so are batches that were not run."""
    profile = profile_of(measured, name="it", gpu="none")
    assert profile.error is not None
    assert profile.error.p50 < 0.03
    rows = np.array([(n, n, n, n * context, 0, 0, 0, 0, 1.0) for n in (1, 3, 6) for context in (20, 150, 500)], float)
    unseen = Steps(**dict(zip(COLUMNS, rows.T, strict=True)))
    assert np.median(np.abs(predict(profile.step_time, unseen) / predict(A30.step_time, unseen) - 1)) < 0.1


def test_an_engine_that_only_prefills(engine: Emulated) -> None:
    """Only prompts are computed, and their steps are fitted as well as with others."""
    options_of_leg = replace(options(engine), leg="prefill")
    measured = asyncio.run(measure(options_of_leg, lambda _: None))
    assert measured.num_requests > 0
    assert not measured.steps["num_decodes"].any()
    fitted = profile_of(measured, name="it", gpu="none").step_time
    rows = np.array([(n, 1, 0, 0, 1, n * n, 0, 0, 1.0) for n in (50, 150, 500)], float)
    prompts = Steps(**dict(zip(COLUMNS, rows.T, strict=True)))
    assert np.median(np.abs(predict(fitted, prompts) / predict(A30.step_time, prompts) - 1)) < 0.1
    with pytest.raises(ValueError, match="^leg: must be one of serve, prefill, decode, not 'both'"):
        replace(options_of_leg, leg="both")


def test_all_kinds_of_steps_are_observed_without_preemptions(measured: EngineMeasurement) -> None:
    """There are steps with prompts only, with decodes only, and with both; several requests run at a time."""
    steps = measured.steps
    for prefills, decodes in ((True, False), (False, True), (True, True)):
        assert np.any(((steps["num_prefills"] > 0) == prefills) & ((steps["num_decodes"] > 0) == decodes))
    assert steps["num_decodes"].max() >= 4
    assert measured.num_preemptions == 0
    assert measured.num_disturbed == 0


def test_no_prompt_hits_the_prefix_cache(engine: Emulated, measured: EngineMeasurement) -> None:
    """Caching is on, but every prompt is computed in full."""
    assert measured.config.enable_prefix_caching
    reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
    assert int(reader.read().state["prefix_hits"]) == 0
    reader.close()


def test_transit_times(measured: EngineMeasurement) -> None:
    """They are known if enough requests came to an idle engine, and 0 otherwise."""
    transit = transit_of(measured.transits)
    assert transit.inward_s > 0
    assert transit.outward_s > 0
    assert transit_of(measured.transits[:2]).inward_s == 0


def test_an_engine_with_other_traffic_is_not_measured(tmp_path: Path) -> None:
    """If another request does not end in time, the error says so in one line."""
    with emulated(tmp_path, speed=1.0) as slow:
        asked = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with slow.client.stream("POST", "/v1/completions", json=asked) as other:
            pieces = other.iter_bytes()
            next(pieces)
            with pytest.raises(ValueError, match="engine: has other requests"):
                asyncio.run(measure(options(slow, 5.0), lambda _: None))
            next(pieces)  # the other request still runs
        slow.until(slow.is_idle)


def test_batches_with_other_requests_do_not_count(engine: Emulated, measured: EngineMeasurement) -> None:
    """A batch with other requests is left out, and the other batches are enough."""
    assert measured

    async def disturbed() -> EngineMeasurement:
        measuring = asyncio.create_task(measure(options(engine, 6.0), lambda _: None))
        await asyncio.sleep(0)
        while not measuring.done():
            await asyncio.to_thread(engine.complete, max_tokens=30)
            await asyncio.wait([measuring], timeout=1.0)
        return await measuring

    result = asyncio.run(disturbed())
    assert 0 < result.num_disturbed < result.num_batches


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("3m", 180), ("1.5h", 5400)])
def test_budgets_have_units(text: str, seconds: float) -> None:
    """Seconds, minutes and hours are accepted."""
    assert seconds_of(text, "budget") == seconds


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--budget", "soon"), "budget"),
        (("--engine-url", "http://127.0.0.1:1", "--state-file", "/nowhere", "--budget", "1s"), "budget"),
        (("--engine-url", "http://127.0.0.1:1", "--state-file", "/nowhere"), "state_file"),
        (("--engine-url", "http://127.0.0.1:1"), "state_file"),
        ((), "engine_url"),
        (("--engine-url", "http://127.0.0.1:1", "--start", "vllm serve"), "engine_url"),
        (("--start", "/nowhere/vllm serve MODEL"), "start"),
        (("--start", "false"), "start: the engine exited"),
        (("--start", "false", "-o", "/nowhere/profile.json"), "output"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(flags: tuple[str, ...], complaint: str) -> None:
    """The line names the field."""
    assert complaint in refusal("profile", "measure", *flags)


def test_the_command_starts_an_engine_measures_it_and_ends_it(tmp_path: Path) -> None:
    """It writes a valid profile, reports what was measured, and leaves no process running."""
    state, made = tmp_path / "engine.state", tmp_path / "made.json"
    command = (
        f"{sys.executable} -m services.cli serve engine --profile llama-2-7b-a30 --speed 50 --port {free_port()}"
        f" --state-file {state}"
    )
    flags = ("--start", command, "--state-file", str(state), "--budget", "5s", "--gpu", "A30", "-o", str(made))
    done = block("profile", "measure", *flags, "--json", "--start-timeout", "5m")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    profile = profile_from_json(made.read_text())
    assert (profile.model, profile.gpu) == (A30.model, "A30")
    assert profile.transit.inward_s > 0
    assert report["engine"]["max_num_seqs"] == 48
    assert report["num_batches"] > 0
    assert not state.exists()
