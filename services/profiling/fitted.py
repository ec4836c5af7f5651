"""From what was measured to a latency profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from predictor.fitting.measured_steps import FEWEST_STEPS, shape_for
from predictor.fitting.regression import COLUMNS, Steps, error_of, fit, held_out, predict, rounded
from predictor.profile import FITTED, Profile, SuggestedEngine, Transit, ValidRange
from services.profiling.measuring import Measured

FEWEST_TRANSITS = 5


def profile_of(measured: Measured, *, name: str, gpu: str, tensor_parallel: int = 1, dtype: str = "auto") -> Profile:
    """Fit a profile to four fifths of the steps and tell its error on the rest; ValueError where they are too few."""
    steps = steps_of(measured.steps)
    if len(steps) < FEWEST_STEPS:
        raise ValueError(f"budget: {len(steps)} steps are too few to fit, {FEWEST_STEPS} are needed; give it more time")
    unseen = held_out(len(steps))
    seen, test = steps.where(~unseen), steps.where(unseen)
    shape = replace(shape_for(seen), by_sequences=_knots_of_sampled(seen))
    step_time = fit(seen, shape)
    config = measured.config
    return Profile(
        name=name,
        model=measured.model,
        gpu=gpu,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        kind=FITTED,
        step_time=step_time,
        valid=ValidRange(
            max_tokens=int(steps.num_tokens.max()),
            max_sequences=max(1, int(steps.num_sampled.max())),
            max_context_tokens=max(1, int(steps.decode_context.max())),
        ),
        error=error_of(predict(step_time, test), test.seconds),
        source=f"{len(steps)} steps of {measured.num_requests} requests, measured on {measured.source}"
        f" in {measured.took_s:.0f} s",
        engine=SuggestedEngine(
            num_gpu_blocks=config.num_gpu_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        ),
        transit=transit_of(measured.transits),
    )


def steps_of(records: np.ndarray) -> Steps:
    """Arrange steps as an engine shows them (`layout.STEP`) for the fit; what took no time says nothing."""
    sound = records[(records["seconds"] > 0) & (records["num_tokens"] > 0)]
    return Steps(**{column: sound[column].astype(np.float64) for column in COLUMNS})


def transit_of(transits: np.ndarray) -> Transit:
    """The usual time to the loop and back, where enough requests tell."""

    def usual(column: np.ndarray) -> float:
        told = column[np.isfinite(column)]
        return rounded(max(0.0, float(np.median(told)))) if len(told) >= FEWEST_TRANSITS else 0.0

    return Transit(inward_s=usual(transits[:, 0]), outward_s=usual(transits[:, 1]))


def _knots_of_sampled(steps: Steps) -> tuple[float, ...]:
    """From none to all: what sampling a sequence costs, beside what its token costs."""
    largest = float(steps.num_sampled.max())
    return (0.0, largest) if largest >= 1 else ()
