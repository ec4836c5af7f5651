"""One line of the table of policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column

Score = Callable[[Candidates], Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number that a policy can be given by name, or what it is without."""

    default: float
    meaning: str
    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """How to make a policy, what it computes, where that comes from, and which indicators it reads.

    What is made scores all candidates of one request, and is called once for each request; the lowest score wins. Of
    equals, the lowest `tie_break` wins, a formula over indicators, and of those the first instance id. With `sample`,
    so many candidates are drawn at random first. With `hold`, a condition over indicators, a request is held at the
    scheduler until that holds of some instance.
    """

    make: Callable[[Mapping[str, float], np.random.Generator], Score]
    formula: str
    source: str
    needs: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    tie_break: str = ""
    sample: int = 0
    hold: str = ""


def plain(score: Score) -> Callable[[Mapping[str, float], np.random.Generator], Score]:
    """Make a policy that takes no parameters, draws nothing and remembers nothing."""
    return lambda _parameters, _generator: score
