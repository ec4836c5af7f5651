"""The engine model against measured runs of a real vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.fitting.calibration import MeasuredLatencies
from predictor.profile import load_profile
from simulator.measured_runs import MEASURED_RUNS
from simulator.reference_data import data_folder
from simulator.replay import replay

CALIBRATED = 30
LIMITS = {"ttft": 0.05, "tpot": 0.02, "e2e": 0.02}
BIAS = 0.02


@pytest.mark.parametrize("name", MEASURED_RUNS)
def test_a_replay_agrees_with_a_measured_run(name: str) -> None:
    """The median errors stay within 2 % (TTFT 5 %), and neither they nor the makespan are biased."""
    try:
        data = data_folder()
    except ValueError as error:
        pytest.skip(str(error))
    run = MEASURED_RUNS[name]
    profile = load_profile(run.profile)
    requests, measured = run.requests(data)
    outcomes = replay(run.config(profile.engine.num_gpu_blocks or 0), profile.step_time, requests)
    replayed = MeasuredLatencies(
        first_token_s=np.array([outcome.ttft_s for outcome in outcomes]),
        last_token_s=np.array([outcome.e2e_s for outcome in outcomes]),
        output_tokens=measured.output_tokens,
    )
    for metric, actual in measured.metrics().items():
        signed = (replayed.metrics()[metric] / actual - 1)[CALIBRATED:]
        assert np.median(np.abs(signed)) <= LIMITS[metric], metric
        assert abs(np.median(signed)) <= BIAS, metric
    arrivals = np.array([request.arrival_s for request in requests])
    ends = [(latencies.last_token_s + arrivals).max() for latencies in (replayed, measured)]
    assert abs(ends[0] / ends[1] - 1) <= BIAS
