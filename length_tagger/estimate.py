"""What an estimator is asked, what it answers, and what it learns from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

MOST_TOKENS = 2**31 - 1
MOST_SPREAD = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One answer whose length is wanted: the prompt as far as it is known, and what the client said about the answer.

    `keys` name what the prompt says (`length_tagger.keys`), `expected_tokens` is the client's own estimate,
    `foretold` what estimators have said already that are too slow to be asked one by one.
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
    foretold: tuple[Estimate, ...] = ()

    def __post_init__(self) -> None:
        """Refuse lengths that no answer could have."""
        for name in ("prompt_tokens", "max_tokens", "expected_tokens"):
            require_length(name, getattr(self, name), at_least=1)
        require_length("min_tokens", self.min_tokens, at_least=0)
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} are more than max_tokens, {self.max_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted length, log-normal with this median; a spread of 0 is a bare number.

    `confidence` is the chance, as the estimator sees it, that the answer ends within a factor of two of the median:
    1 where the length is known, 0 where nothing is known about this request.
    """

    median_tokens: float
    spread: float  # standard deviation of the logarithm
    confidence: float
    estimator: str

    def __post_init__(self) -> None:
        """Refuse what is no length."""
        if not (math.isfinite(self.median_tokens) and 0 < self.median_tokens <= MOST_TOKENS):
            raise ValueError(f"median_tokens: must be above 0 and at most {MOST_TOKENS}, not {self.median_tokens}")
        if not (math.isfinite(self.spread) and 0 <= self.spread <= MOST_SPREAD):
            raise ValueError(f"spread: must lie between 0 and {MOST_SPREAD:g}, not {self.spread}")
        if not (math.isfinite(self.confidence) and 0 <= self.confidence <= 1):
            raise ValueError(f"confidence: must lie between 0 and 1, not {self.confidence}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOutcome:
    """How long an answer became, whether it was cut there, and under which names its estimate was made."""

    output_tokens: int
    model: str = ""
    session_id: str = ""
    client_id: str = ""
    keys: tuple[int, ...] = ()
    cut: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no length."""
        require_length("output_tokens", self.output_tokens, at_least=1)


class Tagger(Protocol):
    """An estimator; one that has nothing to say about a request answers None, one that does not learn ignores."""

    def estimate(self, query: Query) -> Estimate | None:
        """Say how long the answer will be."""

    def observe(self, outcome: LengthOutcome) -> None:
        """Learn how long one became."""


def require_length(name: str, value: int | None, *, at_least: int) -> None:
    """Refuse a number of tokens out of range, naming the field."""
    if value is not None and not at_least <= value <= MOST_TOKENS:
        raise ValueError(f"{name}: must be at least {at_least} and at most {MOST_TOKENS}, not {value}")


def chance_within_factor_two(spread: float) -> float:
    """Tell how likely a log-normal length is to lie between half and twice its median."""
    return 1.0 if spread == 0 else math.erf(math.log(2) / (spread * math.sqrt(2)))
