"""The values of estimators: queries, estimates, and the outcomes that they learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_TOKENS = 2**31 - 1
MAX_SPREAD = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One request whose response length is to be estimated: its prompt, as far as known, and the client's parameters.

    `keys` identify the prompt (`length_tagger.keys`), `expected_tokens` is the client's own estimate, and `precomputed`
    has the estimates of estimators that run ahead in batches, because they are slow.
    """

    model: str = ""
    prompt: str = ""
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    expected_tokens: int | None = None
    session_id: str = ""
    client_id: str = ""
    keys: tuple[int, ...] = ()
    precomputed: tuple[Estimate, ...] = ()

    def __post_init__(self) -> None:
        """Reject lengths that no response can have."""
        for name in ("prompt_tokens", "max_tokens", "expected_tokens"):
            require_length(name, getattr(self, name), at_least=1)
        require_length("min_tokens", self.min_tokens, at_least=0)
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted length, log-normal with this median; a spread of 0 is a bare number.

    `confidence` is the estimator's probability that the length is within a factor of two of the median: 1 if the length
    is known, 0 if nothing is known about the request.
    """

    median_tokens: float
    spread: float  # standard deviation of the logarithm
    confidence: float
    estimator: str

    def __post_init__(self) -> None:
        """Reject invalid values, naming the field."""
        if not (math.isfinite(self.median_tokens) and 0 < self.median_tokens <= MAX_TOKENS):
            raise ValueError(f"median_tokens: must be above 0 and at most {MAX_TOKENS}, not {self.median_tokens}")
        if not (math.isfinite(self.spread) and 0 <= self.spread <= MAX_SPREAD):
            raise ValueError(f"spread: must lie between 0 and {MAX_SPREAD:g}, not {self.spread}")
        if not (math.isfinite(self.confidence) and 0 <= self.confidence <= 1):
            raise ValueError(f"confidence: must lie between 0 and 1, not {self.confidence}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOutcome:
    """The length of a response, whether it was cut at max_tokens, and the keys of its estimate."""

    output_tokens: int
    model: str = ""
    session_id: str = ""
    client_id: str = ""
    keys: tuple[int, ...] = ()
    cut: bool = False

    def __post_init__(self) -> None:
        """Reject invalid values, naming the field."""
        require_length("output_tokens", self.output_tokens, at_least=1)


class Tagger(Protocol):
    """An estimator of response lengths."""

    def estimate(self, query: Query) -> Estimate | None:
        """Return the estimated length, or None if the estimator has none."""

    def observe(self, outcome: LengthOutcome) -> None:
        """Learn from an outcome, if the estimator learns."""


class BatchTagger(Protocol):
    """An estimator that estimates several requests at once."""

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate | None]:
        """Return an estimate per query, or None."""


def require_length(name: str, value: int | None, *, at_least: int) -> None:
    """Reject a number of tokens out of range, naming the field."""
    if value is not None and not at_least <= value <= MAX_TOKENS:
        raise ValueError(f"{name}: must be at least {at_least} and at most {MAX_TOKENS}, not {value}")


def chance_within_factor_two(spread: float) -> float:
    """Return the probability that a log-normal length is between half and twice its median."""
    return 1.0 if spread == 0 else math.erf(math.log(2) / (spread * math.sqrt(2)))
