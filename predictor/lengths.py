"""How long an answer will be: a number or a distribution, and what is left of one that goes on longer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from predictor.suggestions import did_you_mean

OVERDUE_TOKENS = 10  # Block §4.1: what is thought to be left of a request that has outlived its tag
MOST_TOKENS = 2**31 - 1
DEFAULT_RESIDUAL = "conditional_median"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A predicted response length: log-normal with this median; a spread of 0 is a bare number."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    median_tokens: float
    spread: float = 0.0  # standard deviation of the logarithm

    def __post_init__(self) -> None:
        """Refuse what is no length."""
        if not (math.isfinite(self.median_tokens) and 0 < self.median_tokens <= MOST_TOKENS):
            raise ValueError(f"median_tokens: must be above 0 and at most {MOST_TOKENS}, not {self.median_tokens}")
        if not (math.isfinite(self.spread) and 0 <= self.spread <= 10):
            raise ValueError(f"spread: must lie between 0 and 10, not {self.spread}")


def plus_ten(tag: Tag, tokens_so_far: int) -> float:
    """End where the tag says; once that is passed, ten tokens from now."""
    return tag.median_tokens if tag.median_tokens > tokens_so_far else tokens_so_far + OVERDUE_TOKENS


def conditional_median(tag: Tag, tokens_so_far: int) -> float:
    """End at the median of the lengths that are still possible; a bare number knows none and is extended by ten."""
    return _conditional(tag, tokens_so_far, QUANTILES["conditional_median"])


def conditional_quartile(tag: Tag, tokens_so_far: int) -> float:
    """End at their lower quartile: who decides by this whether there will be room is hopeful rather than idle."""
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
    return math.exp(exponent) if exponent < math.log(MOST_TOKENS) else MOST_TOKENS


RESIDUALS: dict[str, Callable[[Tag, int], float]] = {
    "plus_ten": plus_ten,
    "conditional_median": conditional_median,
    "conditional_quartile": conditional_quartile,
}
QUANTILES = {"conditional_median": 0.5, "conditional_quartile": 0.25}  # of the lengths that are still possible


def expected_tokens(tag: Tag, tokens_so_far: int, residual: str = DEFAULT_RESIDUAL) -> int:
    """Round the whole response length that a rule expects, given what has been produced; always more than that."""
    if residual not in RESIDUALS:
        raise ValueError(f"residual: {residual!r} is none of {', '.join(RESIDUALS)}{did_you_mean(residual, RESIDUALS)}")
    expected = RESIDUALS[residual](tag, tokens_so_far)
    return max(tokens_so_far + 1, min(MOST_TOKENS, math.ceil(expected - 0.5)))


def expected_lengths(
    medians: np.ndarray, spreads: np.ndarray, tokens_so_far: np.ndarray, residual: str = DEFAULT_RESIDUAL
) -> np.ndarray:
    """Do for many requests at once what `expected_tokens` does for one; NaN where there is no tag."""
    expected = np.where(medians > tokens_so_far, medians, tokens_so_far + OVERDUE_TOKENS)
    expected[np.isnan(medians)] = np.nan
    if residual in QUANTILES:
        log_ndtr, ndtri_exp = _normal_functions()
        (rest,) = np.nonzero((spreads > 0) & (tokens_so_far > 0) & ~np.isnan(medians))
        location, spread = np.log(medians[rest]), spreads[rest]
        log_survival = log_ndtr((location - np.log(tokens_so_far[rest])) / spread)
        exponent = location - spread * ndtri_exp(log_survival + math.log1p(-QUANTILES[residual]))
        expected[rest] = np.exp(np.minimum(exponent, math.log(MOST_TOKENS)))
    return np.maximum(tokens_so_far + 1, np.minimum(MOST_TOKENS, np.ceil(expected - 0.5)))
