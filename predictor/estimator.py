"""How long a local scheduler believes that a step takes: the profile's seconds with the online correction.

The model knows the pace of an engine, real over the profile's seconds, and so does its local scheduler, unless it is
configured to err: by a factor, and by noise that differs from step to step. With a momentum it does not know the pace
either, and corrects its estimates as ProServe does (§4.1): after each step β becomes θ·β + (1-θ)·real / estimated, as
`correction.Correction` with a window of one step.
"""

from __future__ import annotations

import numpy as np

from predictor.compiled import kernel, small_kernel
from predictor.correction import CorrectionRule

LOWEST, HIGHEST = CorrectionRule().lowest, CorrectionRule().highest
BITS_32 = 0xFFFFFFFF


@small_kernel
def belief(engine: np.record) -> float:
    """Return the estimate of the next step's time over the profile's."""
    pace = engine.correction if engine.estimator_momentum > 0 else engine.pace
    return pace * error(engine, engine.num_steps)


@small_kernel
def error(engine: np.record, number: int) -> float:
    """Return how much too long a step is estimated without correction; `number` counts the engine's steps."""
    factor = engine.estimator_factor
    if engine.estimator_noise > 0:
        factor *= np.exp(engine.estimator_noise * normal(number, engine.estimator_seed))
    return factor


@small_kernel
def is_constant(engine: np.record) -> bool:
    """Return whether estimates are the same in all steps."""
    return bool(engine.estimator_noise == 0 and engine.estimator_momentum == 0)


@kernel
def observe(engine: np.record, number: int, pace: float) -> None:
    """Correct the estimate by a step that has ended."""
    kept = engine.estimator_momentum
    ratio = limited(pace / error(engine, number))
    engine.correction = limited(kept * engine.correction + (1 - kept) * ratio)


@small_kernel
def limited(factor: float) -> float:
    """Limit a factor, so that a single outlier has little effect."""
    return min(HIGHEST, max(LOWEST, factor))


@kernel
def normal(number: int, seed: int) -> float:
    """Return a nearly normal deviate, the same for the same number and seed: the sum of twelve uniform ones."""
    total = -6.0
    for draw in range(12):
        total += mixed(mixed(seed & BITS_32) ^ ((12 * number + draw) & BITS_32)) / (BITS_32 + 1)
    return total


@small_kernel
def mixed(bits: int) -> int:
    """Mix 32 bits, so that those of consecutive numbers are unrelated; products stay within 63 bits."""
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & BITS_32
    bits = ((bits ^ (bits >> 15)) * 0x46AC8B5D) & BITS_32
    return bits ^ (bits >> 16)
