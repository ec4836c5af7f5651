"""From what was measured to a latency profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from predictor.fitting.measured_steps import MIN_STEPS, shape_for
from predictor.fitting.regression import COLUMNS, Steps, error_of, fit, held_out, predict, rounded
from predictor.profile import FITTED, Profile, SuggestedEngine, Transit, ValidRange
from services.profiling.measuring import Measured

FEWEST_TRANSITS = 5
MOST_OF_A_RUN = 8  # decodes in a row by the same requests


def profile_of(measured: Measured, *, name: str, gpu: str, tensor_parallel: int = 1, dtype: str = "auto") -> Profile:
    """Fit a profile to four fifths of the steps and tell its error on the rest; ValueError where they are too few."""
    steps = steps_of(measured.steps)
    if len(steps) < MIN_STEPS:
        raise ValueError(f"budget: {len(steps)} steps are too few to fit, {MIN_STEPS} are needed; give it more time")
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
        source=f"{len(measured.steps)} steps of {measured.num_requests} requests, measured on {measured.source}"
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
    """Arrange steps as an engine shows them (`layout.STEP`) for the fit: a row for each run of like steps.

    A run's row has the mean of everything: what adds up to a request's latency is means, and a fit to single steps
    would be drawn to the quick ones, as errors are relative.
    """
    sound = records[(records["seconds"] > 0) & (records["num_tokens"] > 0)]
    if not len(sound):
        return Steps(**{column: np.empty(0) for column in COLUMNS})
    starts = _starts_of_runs(sound)
    lengths = np.diff([*starts, len(sound)])
    return Steps(**{name: np.add.reduceat(sound[name].astype(np.float64), starts) / lengths for name in COLUMNS})


def _starts_of_runs(steps: np.ndarray) -> np.ndarray:
    """Where steps begin that are not like the one before, or that are enough of the same."""
    alike = np.ones(len(steps), np.bool_)
    alike[0] = False
    for name in ("num_tokens", "num_decodes", "num_sampled"):
        alike[1:] &= steps[name][1:] == steps[name][:-1]
    alike &= steps["num_prefills"] == 0
    alike[1:] &= steps["number"][1:] == steps["number"][:-1] + 1
    begins, length = np.flatnonzero(~alike), MOST_OF_A_RUN
    ends = [*begins[1:], len(steps)]
    return np.concatenate([np.arange(begin, end, length) for begin, end in zip(begins, ends, strict=True)])


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
