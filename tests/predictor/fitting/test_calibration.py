"""Calibration finds known constants, also of an overloaded engine, and says what a window cannot tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.config import EngineConfig
from predictor.fitting.calibration import CalibratedConstants, MeasuredLatencies, Replay, calibrate
from predictor.fitting.constants import UNITS, Calibrated, scaled
from predictor.fitting.regression import Steps, predict
from predictor.request import RequestFacts
from predictor.step_time import Curve, Grid, StepTime
from simulator.measured_runs import latencies_of
from simulator.replay import replay

KERNELS = StepTime(
    constant_s=1e-3,
    prefill_s=5e-4,
    by_tokens=Curve(x=(1.0, 64.0, 512.0), y=(9e-3, 1e-2, 3e-2)),
    decode_attention=Grid(x=(1.0, 32.0), y=(0.0, 400.0), z=((1e-4, 4e-4), (1e-3, 9e-3))),
    mixed_attention=Grid(x=(1.0, 32.0), y=(0.0, 400.0), z=((1e-4, 6e-4), (1e-3, 1.3e-2))),
)
OUTPUT = np.linspace(50.0, 400.0, 40)
PROMPT = np.linspace(200.0, 3000.0, 40)[::-1]
ARRIVAL = np.linspace(0.0, 90.0, 40)
SEQUENCES = np.tile([3.0, 9.0, 27.0, 15.0], 10)


def toy_replay(step_time: StepTime) -> MeasuredLatencies:
    """A replay without queueing: prefill, then a decode step per token."""
    first = 0.02 + step_time.constant_s + step_time.prefill_s + step_time.token_s * PROMPT
    step = 0.01 + step_time.constant_s + step_time.token_s * SEQUENCES
    return MeasuredLatencies(
        first_token_s=first, last_token_s=first + step * (OUTPUT - 1), output_tokens=OUTPUT, arrival_s=ARRIVAL
    )


def overloaded(num_blocks: int = 60) -> Replay:
    """Return the replay of an engine for which requests come twice as fast as it serves them."""
    draw = np.random.default_rng(5)
    requests = [
        RequestFacts(
            request_id=f"{number:02}",
            arrival_s=number * 0.02,
            prompt_tokens=int(draw.integers(20, 200)),
            output_tokens=int(draw.integers(5, 120)),
        )
        for number in range(60)
    ]
    output = np.array([float(request.output_tokens or 0) for request in requests])
    config = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=256, num_gpu_blocks=num_blocks, max_model_len=512,
        enable_prefix_caching=False,
    )  # fmt: skip
    return lambda step_time: latencies_of(requests, replay(config, step_time, requests), output)


def found_by(calibration: CalibratedConstants) -> dict[str, float]:
    """Return the changes of constants that are told."""
    return {one.name: one.change for one in calibration.constants if not one.why_not}


@pytest.mark.parametrize(
    "missing",
    [{"constant_s": 2.5e-3}, {"constant_s": 2e-3, "token_s": 4e-5}, {"constant_s": 1e-3, "prefill_s": 6e-3}],
)
def test_finds_the_missing_constants(missing: dict[str, float]) -> None:
    """The constants are added to those of the kernels, and the other coefficients are unchanged."""
    whole = replace(KERNELS, **{name: getattr(KERNELS, name) + value for name, value in missing.items()})
    start = Calibrated(step_time=KERNELS)
    calibration = calibrate(start, toy_replay, toy_replay(whole), constants=tuple(missing))
    assert found_by(calibration) == pytest.approx(missing, rel=0.1)
    assert calibration.error_after < 0.1 * calibration.error_before
    found = calibration.result.step_time
    assert replace(found, **{name: getattr(KERNELS, name) for name in missing}) == KERNELS


@pytest.mark.parametrize("num_blocks", [60, 400])
def test_a_window_that_begins_overloaded(num_blocks: int) -> None:
    """The constant of an engine at which every request waits, and some are preempted, is found from half of them."""
    served = overloaded(num_blocks)
    truth = served(replace(KERNELS, constant_s=3e-3))
    calibration = calibrate(
        Calibrated(step_time=KERNELS), served, truth, compared=np.arange(60) < 30, constants=("constant_s",)
    )
    assert found_by(calibration) == pytest.approx({"constant_s": 2e-3}, rel=0.05)
    later = np.arange(60) >= 30
    replayed = served(calibration.result.step_time).where(later)
    for metric, actual in truth.where(later).metrics().items():
        assert np.median(np.abs(replayed.metrics()[metric] / actual - 1)) < 0.01


def test_kernels_that_are_wrong() -> None:
    """Where all kernels take longer than in the tables, later requests are replayed as if that were known."""
    served = overloaded()
    truth = served(scaled(KERNELS, 1.05))
    calibration = calibrate(Calibrated(step_time=KERNELS), served, truth, compared=np.arange(60) < 30)
    assert not calibration.is_kept
    later = np.arange(60) >= 30
    replayed = served(calibration.result.step_time).where(later)
    assert np.median(np.abs(replayed.last_token_s / truth.where(later).last_token_s - 1)) < 0.02


def test_constants_that_cannot_be_told_apart() -> None:
    """Where all steps have equally many sequences, communication is CPU time: one is fitted, the other named."""

    def alike(step_time: StepTime) -> MeasuredLatencies:
        step = 0.01 + step_time.constant_s + step_time.token_s * 8
        first = np.full(40, 0.05)
        return MeasuredLatencies(
            first_token_s=first, last_token_s=first + step * (OUTPUT - 1), output_tokens=OUTPUT, arrival_s=ARRIVAL
        )

    truth = alike(replace(KERNELS, constant_s=3e-3))
    calibration = calibrate(
        Calibrated(step_time=KERNELS), alike, truth, constants=("constant_s", "token_s", "prefill_s")
    )
    assert found_by(calibration) == pytest.approx({"constant_s": 2e-3}, rel=0.05)
    reasons = {one.name: one.why_not for one in calibration.constants if one.why_not}
    assert reasons == {
        "token_s": "cannot be separated from constant_s here",
        "prefill_s": "has no effect on this window",
    }
    assert "cannot be separated" in calibration.describe()


def test_intervals_contain_the_truth() -> None:
    """With noise, the interval of 90 % contains the real constant, and is no wider than it."""
    truth = toy_replay(replace(KERNELS, constant_s=4e-3))
    hits = 0
    for seed in range(10):
        noise = np.exp(0.05 * np.random.default_rng(seed).standard_normal(40))
        measured = replace(truth, last_token_s=truth.last_token_s * noise)
        calibration = calibrate(Calibrated(step_time=KERNELS), toy_replay, measured, constants=("constant_s",))
        (one,) = calibration.constants
        assert 0 < one.high - one.low < 3e-3
        hits += one.low <= 3e-3 <= one.high
    assert hits >= 7


def test_never_worse() -> None:
    """What is right already is kept, and so are constants that only fit noise."""
    start = Calibrated(step_time=KERNELS)
    calibration = calibrate(start, toy_replay, toy_replay(KERNELS))
    assert calibration.result.step_time == KERNELS
    assert calibration.is_kept
    assert calibration.error_after == calibration.error_before
    assert all("is kept" in one.why_not for one in calibration.constants)


def test_observed_steps_count_too() -> None:
    """Steps tell what requests do not: here the cost of a sequence in a step."""
    count = np.linspace(1.0, 60.0, 40)
    zeros = np.zeros(40)
    steps = Steps(
        num_tokens=count, num_sampled=count, num_decodes=count, decode_context=count * 300, num_prefills=zeros,
        prefill_qq=zeros, prefill_qkv=zeros, decode_longest=np.full(40, 300.0), seconds=zeros,
    )  # fmt: skip
    real = predict(KERNELS, steps) + 3e-5 * count
    calibration = calibrate(
        Calibrated(step_time=KERNELS),
        toy_replay,
        toy_replay(KERNELS),
        steps=replace(steps, seconds=real),
        constants=("prefill_s", "sequence_s"),
    )
    assert found_by(calibration) == pytest.approx({"sequence_s": 3e-5}, rel=0.05)


def test_time_outside_of_steps() -> None:
    """A time that every request takes outside of steps is no part of the step time."""
    truth = toy_replay(KERNELS)
    later = replace(truth, first_token_s=truth.first_token_s + 0.2, last_token_s=truth.last_token_s + 0.2)
    calibration = calibrate(Calibrated(step_time=KERNELS), toy_replay, later, constants=("request_s", "token_s"))
    assert calibration.result.request_s == pytest.approx(0.2, rel=0.05)


def test_constants_change_a_step_time() -> None:
    """Each constant adds what it says; none makes a time negative."""
    start = Calibrated(step_time=KERNELS)
    seconds = start.changed({"scale": 0.5, "sequence_s": 1e-4, "constant_s": -1.0}).step_time
    assert seconds.constant_s == 0.0
    assert seconds.by_tokens.y == pytest.approx([1.5 * y for y in KERNELS.by_tokens.y])
    assert seconds.decode_attention.z[1] == pytest.approx((1.5e-3, 1.35e-2))
    assert seconds.by_sequences.table(20)[20] == pytest.approx(2e-3)
    assert start.changed({}) == start
    assert set(UNITS) == {"constant_s", "prefill_s", "token_s", "sequence_s", "request_s", "scale"}


def test_refuses_what_it_cannot_use() -> None:
    """The error names an unknown constant, and a window with too few requests."""
    start, truth = Calibrated(step_time=KERNELS), toy_replay(KERNELS)
    with pytest.raises(ValueError, match=r"^constants: must be one of .*, not 'prefill_qq_s'"):
        calibrate(start, toy_replay, truth, constants=("prefill_qq_s",))
    with pytest.raises(ValueError, match=r"^requests: 5 are too few to calibrate, 12 are needed"):
        calibrate(start, toy_replay, truth, compared=np.arange(40) < 5)
