"""Predicted lengths of responses: a number or a distribution, and the remaining length of a response in progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from predictor.suggestions import unknown_choice

OVERDUE_TOKENS = 10  # Block §4.1: the predicted rest of a response that is longer than its tag
MAX_TOKENS = 2**31 - 1
DEFAULT_RESIDUAL = "conditional_median"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A predicted response length: log-normal with this median; a spread of 0 means a single number."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    median_tokens: float
    spread: float = 0.0  # standard deviation of the logarithm

    def __post_init__(self) -> None:
        """Refuse impossible lengths."""
        if not (math.isfinite(self.median_tokens) and 0 < self.median_tokens <= MAX_TOKENS):
            raise ValueError(f"median_tokens: must be above 0 and at most {MAX_TOKENS}, not {self.median_tokens}")
        if not (math.isfinite(self.spread) and 0 <= self.spread <= 10):
            raise ValueError(f"spread: must lie between 0 and 10, not {self.spread}")


def plus_ten(tag: Tag, tokens_so_far: int) -> float:
    """Predict the tag's median; beyond it, ten more tokens."""
    return tag.median_tokens if tag.median_tokens > tokens_so_far else tokens_so_far + OVERDUE_TOKENS


def conditional_median(tag: Tag, tokens_so_far: int) -> float:
    """Predict the median of the lengths that are still possible; a tag without spread is extended by ten tokens."""
    return _conditional(tag, tokens_so_far, QUANTILES["conditional_median"])


def conditional_quartile(tag: Tag, tokens_so_far: int) -> float:
    """Predict their lower quartile: an admission that relies on it risks preemptions rather than idle blocks."""
    return _conditional(tag, tokens_so_far, QUANTILES["conditional_quartile"])


@cache
def _normal_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The logarithm of the normal distribution function, and its inverse; importing scipy takes a while."""
    from scipy.special import log_ndtr, ndtri_exp

    return log_ndtr, ndtri_exp


def _conditional(tag: Tag, tokens_so_far: int, quantile: float) -> float:
    if tag.spread == 0 or tokens_so_far == 0:
        return plus_ten(tag, tokens_so_far)
    log_ndtr, ndtri_exp = _normal_functions()
    location = math.log(tag.median_tokens)
    log_survival = log_ndtr((location - math.log(tokens_so_far)) / tag.spread)
    exponent = location - tag.spread * float(ndtri_exp(log_survival + math.log1p(-quantile)))
    return math.exp(exponent) if exponent < math.log(MAX_TOKENS) else MAX_TOKENS


RESIDUALS: dict[str, Callable[[Tag, int], float]] = {
    "plus_ten": plus_ten,
    "conditional_median": conditional_median,
    "conditional_quartile": conditional_quartile,
}
QUANTILES = {"conditional_median": 0.5, "conditional_quartile": 0.25}  # of the lengths that are still possible


@cache
def _standard_scores(num: int) -> tuple[float, ...]:
    """Return the middles of `num` equally likely parts of the standard normal distribution."""
    return tuple(NormalDist().inv_cdf((part + 0.5) / num) for part in range(num))


def quantile_medians(median_tokens: float, spread: float, num: int) -> tuple[float, ...]:
    """Return `num` equally likely lengths of a tag, in ascending order: the middle one is its median."""
    return tuple(
        min(float(MAX_TOKENS), max(1.0, median_tokens * math.exp(spread * score))) if score else median_tokens
        for score in _standard_scores(num)
    )


def expected_tokens(tag: Tag, tokens_so_far: int, residual: str = DEFAULT_RESIDUAL) -> int:
    """Return the whole predicted response length, rounded; always above `tokens_so_far`."""
    if residual not in RESIDUALS:
        raise unknown_choice("residual", residual, RESIDUALS)
    expected = RESIDUALS[residual](tag, tokens_so_far)
    return max(tokens_so_far + 1, min(MAX_TOKENS, math.ceil(expected - 0.5)))


def expected_lengths(
    medians: np.ndarray, spreads: np.ndarray, tokens_so_far: np.ndarray, residual: str = DEFAULT_RESIDUAL
) -> np.ndarray:
    """Return `expected_tokens` of many requests at once; NaN for those without a tag."""
    expected = np.where(medians > tokens_so_far, medians, tokens_so_far + OVERDUE_TOKENS)
    expected[np.isnan(medians)] = np.nan
    if residual in QUANTILES:
        log_ndtr, ndtri_exp = _normal_functions()
        (rest,) = np.nonzero((spreads > 0) & (tokens_so_far > 0) & ~np.isnan(medians))
        location, spread = np.log(medians[rest]), spreads[rest]
        log_survival = log_ndtr((location - np.log(tokens_so_far[rest])) / spread)
        exponent = location - spread * ndtri_exp(log_survival + math.log1p(-QUANTILES[residual]))
        expected[rest] = np.exp(np.minimum(exponent, math.log(MAX_TOKENS)))
    return np.maximum(tokens_so_far + 1, np.minimum(MAX_TOKENS, np.ceil(expected - 0.5)))
