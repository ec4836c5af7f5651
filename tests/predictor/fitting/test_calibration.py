"""Calibration finds known constants from the first requests alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.fitting.calibration import MeasuredLatencies, calibrate
from predictor.step_time import StepTime

KERNELS = StepTime(constant_s=1e-3, prefill_s=5e-4)
OUTPUT = np.linspace(50.0, 400.0, 40)
PROMPT = np.linspace(200.0, 3000.0, 40)[::-1]


def toy_replay(step_time: StepTime) -> MeasuredLatencies:
    """A replay without queueing: prefill, then a decode step per token."""
    first = 0.02 + step_time.constant_s + step_time.prefill_s + step_time.token_s * PROMPT
    step = 0.01 + step_time.constant_s + step_time.token_s * 8
    return MeasuredLatencies(first_token_s=first, last_token_s=first + step * (OUTPUT - 1), output_tokens=OUTPUT)


@pytest.mark.parametrize(
    "missing",
    [{"constant_s": 2.5e-3}, {"constant_s": 2e-3, "token_s": 4e-5}, {"constant_s": 1e-3, "prefill_s": 6e-3}],
)
def test_finds_the_missing_constants(missing: dict[str, float]) -> None:
    """The constants are added to those of the kernels, and the other coefficients are unchanged."""
    whole = replace(KERNELS, **{name: getattr(KERNELS, name) + value for name, value in missing.items()})
    found = calibrate(KERNELS, toy_replay, toy_replay(whole), num_requests=20, constants=tuple(missing))
    for name, value in missing.items():
        assert getattr(found, name) - getattr(KERNELS, name) == pytest.approx(value, rel=0.1)
    assert replace(found, **{name: getattr(KERNELS, name) for name in missing}) == KERNELS


def test_later_requests_have_no_effect() -> None:
    """Only the first requests are compared."""
    measured = toy_replay(replace(KERNELS, constant_s=3e-3))
    spoiled = np.where(np.arange(40) < 20, 1.0, 5.0)
    later = replace(
        measured, first_token_s=measured.first_token_s * spoiled, last_token_s=measured.last_token_s * spoiled
    )
    assert calibrate(KERNELS, toy_replay, later, num_requests=20) == calibrate(
        KERNELS, toy_replay, measured, num_requests=20
    )


def test_a_faster_engine_than_its_kernels_gets_no_negative_constant() -> None:
    """Constants only ever add time."""
    measured = toy_replay(replace(KERNELS, constant_s=0.0))
    found = calibrate(KERNELS, toy_replay, measured, num_requests=20)
    assert found.constant_s == pytest.approx(KERNELS.constant_s, rel=0.05)


def test_refuses_an_unknown_constant() -> None:
    """The error names a constant that cannot be calibrated."""
    with pytest.raises(ValueError, match=r"^constants: 'prefill_qq_s' is none of"):
        calibrate(KERNELS, toy_replay, toy_replay(KERNELS), num_requests=5, constants=("prefill_qq_s",))
