"""The profile of an engine whose steps were measured: the fit, its error, the transit times."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from predictor.config import EngineConfig
from predictor.fitting.measured_steps import MIN_STEPS, shape_for
from predictor.fitting.regression import COLUMNS, Steps, error_of, fit, held_out, predict, rounded
from predictor.profile import FITTED, Profile, SuggestedEngine, Transit, ValidRange

MIN_TRANSITS = 5
MAX_RUN = 8  # consecutive decodes of the same requests that are averaged


@dataclass(slots=True, kw_only=True)
class EngineMeasurement:
    """The result of a measurement: the engine, its steps, the transit times of requests, and disturbed batches."""

    model: str
    config: EngineConfig
    source: str
    clock_rate: float
    steps: np.ndarray
    transits: np.ndarray  # a row per request: seconds to the engine's loop and back; NaN if unknown
    num_requests: int
    num_batches: int
    num_disturbed: int
    num_preemptions: int
    took_s: float


def profile_of(
    measured: EngineMeasurement, *, name: str, gpu: str, tensor_parallel: int = 1, dtype: str = "auto"
) -> Profile:
    """Fit a profile to four fifths of the steps, with its error on the rest; ValueError if there are too few steps."""
    steps = steps_of(measured.steps)
    if len(steps) < MIN_STEPS:
        raise ValueError(f"budget: {len(steps)} steps are too few; {MIN_STEPS} are needed; increase the budget")
    is_test = held_out(len(steps))
    train, test = steps.where(~is_test), steps.where(is_test)
    shape = replace(shape_for(train), by_sequences=_knots_of_sampled(train))
    step_time = fit(train, shape)
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
    """Convert the step records of an engine (`layout.STEP`) to rows for the fit: one per run of similar steps.

    A row has the means of its run, because a request's latency is a sum of steps; a fit to single steps would be biased
    to quick steps, because errors are relative.
    """
    valid = records[(records["seconds"] > 0) & (records["num_tokens"] > 0)]
    if not len(valid):
        return Steps(**{column: np.empty(0) for column in COLUMNS})
    starts = _starts_of_runs(valid)
    lengths = np.diff([*starts, len(valid)])
    return Steps(**{name: np.add.reduceat(valid[name].astype(np.float64), starts) / lengths for name in COLUMNS})


def _starts_of_runs(steps: np.ndarray) -> np.ndarray:
    """Return the indices at which runs start: a different step, or MAX_RUN similar steps."""
    similar = np.ones(len(steps), np.bool_)
    similar[0] = False
    for name in ("num_tokens", "num_decodes", "num_sampled"):
        similar[1:] &= steps[name][1:] == steps[name][:-1]
    similar &= steps["num_prefills"] == 0
    similar[1:] &= steps["number"][1:] == steps["number"][:-1] + 1
    begins = np.flatnonzero(~similar)
    ends = [*begins[1:], len(steps)]
    return np.concatenate([np.arange(begin, end, MAX_RUN) for begin, end in zip(begins, ends, strict=True)])


def transit_of(transits: np.ndarray) -> Transit:
    """Return the median times to the engine's loop and back; 0 if too few requests have them."""

    def median(column: np.ndarray) -> float:
        known = column[np.isfinite(column)]
        return rounded(max(0.0, float(np.median(known)))) if len(known) >= MIN_TRANSITS else 0.0

    return Transit(inward_s=median(transits[:, 0]), outward_s=median(transits[:, 1]))


def _knots_of_sampled(steps: Steps) -> tuple[float, ...]:
    """Return knots for the cost of sampling a sequence, which is fitted apart from the cost of its token."""
    largest = float(steps.num_sampled.max())
    return (0.0, largest) if largest >= 1 else ()


def profile_name(model: str, gpu: str) -> str:
    """Return the default name of a profile."""
    words = f"{model.rstrip('/').rpartition('/')[2]}-{gpu}".lower()
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-") or "measured"
