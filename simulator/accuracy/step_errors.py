"""How far a profile is off on observed steps: by region of batches, apart from the noise of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.fitting.regression import Steps, predict
from predictor.profile import ValidRange
from predictor.step_time import StepTime
from simulator.accuracy.window import Array, ObservedSteps

PREFILL, MIXED, DECODE = "prefill", "mixed", "decode"
PHASES = (PREFILL, MIXED, DECODE)
ALL = "all"
NUM_BLOCKS = 10  # of consecutive steps, whose ratios give the interval
STUDENT_T = 2.26  # 95 %, of that many blocks
PAUSE = 5.0  # times the median ratio: a step that long waited for something else
MIN_PAIRS = 8  # of similar consecutive steps
DRIFT_STEPS = 16  # over which the pace of a moment is averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """The steps of one region: measured and predicted seconds, and what the difference is made of.

    `bias` is predicted over measured time, minus 1, and `half` half its 95 % interval, NaN where there are too few
    steps. `error` is the median of single steps. `noise` is how much consecutive similar steps differ, which no profile
    can know; `drift` is how much the pace of the machine varies within the window beyond that.
    """

    phase: str
    decodes: str  # a range of numbers of decodes
    num_steps: int
    measured_s: float
    predicted_s: float
    bias: float
    half: float
    error: float
    noise: float
    drift: float

    @property
    def name(self) -> str:
        """Name the region."""
        return f"{self.phase} {self.decodes}".strip()


def phase_of(steps: Steps) -> NDArray[np.str_]:
    """Return the phase of each step: prefill alone, decodes alone, or both."""
    prefills, decodes = steps.num_prefills > 0, steps.num_decodes > 0
    return np.where(prefills & decodes, MIXED, np.where(prefills, PREFILL, DECODE))


def regions(steps: Steps) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """Yield all steps, those of each phase, and those of each phase by number of decodes."""
    yield ALL, "", np.ones(len(steps), np.bool_)
    phases = phase_of(steps)
    for phase in PHASES:
        mine = phases == phase
        if not mine.any():
            continue
        yield phase, "", mine
        if phase == PREFILL:
            continue
        for low, high in power_ranges(int(steps.num_decodes.max())):
            chosen = mine & (steps.num_decodes >= low) & (steps.num_decodes <= high)
            if chosen.any():
                yield phase, range_text(low, high), chosen


def power_ranges(largest: int) -> Iterator[tuple[int, int]]:
    """Yield 1, 2, 3 to 4, 5 to 8, and so on, up to a number."""
    low, high = 1, 1
    while low <= largest:
        yield low, high
        low, high = high + 1, 2 * high


def range_text(low: int, high: int) -> str:
    """Write a range of counts."""
    return f"{low}" if low == high else f"{low}-{high}"


def step_errors(observed: ObservedSteps, step_time: StepTime) -> list[StepErrors]:
    """Compare all steps with their durations by a step time, by region."""
    steps = observed.columns
    if not len(observed):
        return []
    predicted = predict(step_time, steps)
    return [
        errors_in(observed.where(chosen), predicted[chosen], phase, decodes)
        for phase, decodes, chosen in regions(steps)
    ]


def errors_in(observed: ObservedSteps, predicted: Array, phase: str = ALL, decodes: str = "") -> StepErrors:
    """Compare steps of one region with predicted durations."""
    measured = observed.columns.seconds
    bias, half = bias_of(predicted, measured)
    ratio = measured / np.maximum(predicted, 1e-12)
    noise = noise_of(observed, ratio)
    return StepErrors(
        phase=phase,
        decodes=decodes,
        num_steps=len(observed),
        measured_s=float(measured.sum()),
        predicted_s=float(predicted.sum()),
        bias=bias,
        half=half,
        error=float(np.median(np.abs(predicted - measured) / measured)),
        noise=noise,
        drift=drift_of(ratio, noise),
    )


def bias_of(predicted: Array, measured: Array) -> tuple[float, float]:
    """Return predicted over measured time, minus 1, and half its 95 % interval; pauses are left out."""
    ratio = measured / np.maximum(predicted, 1e-12)
    usual = ratio <= PAUSE * np.median(ratio)
    predicted, measured = predicted[usual], measured[usual]
    bias = float(predicted.sum() / measured.sum() - 1)
    if len(measured) < 2 * NUM_BLOCKS:
        return bias, float("nan")
    blocks = zip(np.array_split(predicted, NUM_BLOCKS), np.array_split(measured, NUM_BLOCKS), strict=True)
    ratios = np.array([ours.sum() / theirs.sum() for ours, theirs in blocks])
    return bias, float(STUDENT_T * ratios.std(ddof=1) / np.sqrt(NUM_BLOCKS))


def noise_of(observed: ObservedSteps, ratio: Array) -> float:
    """Return the median relative difference between consecutive steps of equal batches, for one of the two."""
    steps = observed.columns
    similar = (np.diff(observed.number) == 1) & (steps.num_prefills[1:] == 0)
    for name in ("num_tokens", "num_decodes", "num_prefills"):
        similar &= np.diff(getattr(steps, name)) == 0
    if np.count_nonzero(similar) < MIN_PAIRS:
        return float("nan")
    changes = np.abs(np.diff(np.log(ratio)))[similar]
    return float(np.median(changes) / np.sqrt(2))


def drift_of(ratio: Array, noise: float) -> float:
    """Return the standard deviation of the pace over some steps, without the part that comes from single steps."""
    num_blocks = len(ratio) // DRIFT_STEPS
    if num_blocks < 3:
        return float("nan")
    means = [np.median(block) for block in np.array_split(np.log(ratio), num_blocks)]
    of_noise = 0.0 if np.isnan(noise) else 1.57 * (noise / 0.6745) ** 2 / DRIFT_STEPS  # of a median
    return float(np.sqrt(max(0.0, np.var(means, ddof=1) - of_noise)))


def pace_of(observed: ObservedSteps, step_time: StepTime) -> Callable[[float], float]:
    """Return the real over predicted step time at any moment: of the steps around it."""
    predicted = predict(step_time, observed.columns)
    num_blocks = max(1, len(observed) // DRIFT_STEPS)
    starts = np.array([block[0] for block in np.array_split(observed.start_s, num_blocks)])
    sums = [np.array([block.sum() for block in np.array_split(values, num_blocks)])
            for values in (observed.columns.seconds, predicted)]  # fmt: skip
    ratios = sums[0] / np.maximum(sums[1], 1e-12)

    def pace_at(time_s: float) -> float:
        place = int(np.searchsorted(starts, time_s, side="right")) - 1
        return float(ratios[min(max(place, 0), len(ratios) - 1)])

    return pace_at


def outside_share(steps: Steps, valid: ValidRange) -> float:
    """Return the share of the time in steps whose batches are larger than the profile's data cover."""
    outside = (
        (steps.num_tokens > valid.max_tokens)
        | (np.maximum(steps.num_decodes, steps.num_sampled) > valid.max_sequences)
        | (steps.decode_context > valid.max_context_tokens)
        | (steps.decode_longest > valid.limits[-1])
    )
    return float(steps.seconds[outside].sum() / max(steps.seconds.sum(), 1e-12))
