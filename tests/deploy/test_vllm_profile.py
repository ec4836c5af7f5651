"""A real vLLM engine is measured within seconds, and its profile predicts its steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from predictor.fitting.engine_profile import steps_of
from predictor.fitting.regression import predict
from predictor.profile import profile_from_json, profile_to_json
from services.engine_state.reader import Reader
from services.profiling.measure_command import MeasureOptions, measured_profile
from tests.deploy.engines import BLOCK_SIZE, MODEL, NUM_BLOCKS, NUM_SEATS, START_S, Engine, need_vllm, tiny_model

pytestmark = pytest.mark.vllm


def test_a_running_engine_gets_a_profile(tmp_path: Path) -> None:
    """Its settings are found, all kinds of steps are fitted, and there are no cache hits and no preemptions."""
    need_vllm()
    state = tmp_path / "state"
    engine = Engine(tiny_model(tmp_path / "model"), state, tmp_path / "log")
    reader = Reader(str(state))
    try:
        engine.start()
        engine.until(engine.is_healthy, START_S)
        orders = MeasureOptions(engine_url=engine.url, state_file=str(state), budget_s=15.0)
        profile, measured = asyncio.run(measured_profile(orders, lambda _: None))
        assert int(reader.read().state["prefix_hits"]) == 0
    finally:
        reader.close()
        engine.kill()
    assert (measured.num_disturbed, measured.num_preemptions) == (0, 0)
    assert (measured.config.num_gpu_blocks, measured.config.max_num_seqs) == (NUM_BLOCKS + 1, NUM_SEATS)
    assert measured.config.async_scheduling is False
    assert profile_from_json(profile_to_json(profile)) == profile
    assert profile.model == MODEL
    assert profile.engine.block_size == BLOCK_SIZE
    assert 1 < profile.valid.max_sequences <= NUM_SEATS
    assert profile.transit.inward_s > 0
    assert profile.transit.outward_s > 0
    steps = steps_of(measured.steps)
    assert steps.num_prefills.max() > 0
    assert 0.5 < predict(profile.step_time, steps).sum() / steps.seconds.sum() < 2
