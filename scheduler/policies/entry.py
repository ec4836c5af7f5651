"""The entries of the table of policies, and what policies share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column

Score = Callable[[Candidates], Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A numeric parameter of a policy: its default, its meaning and its range."""

    default: float
    meaning: str
    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """How to make a policy, its formula and where that comes from, and the indicators that it reads.

    `make` returns a function that scores all candidates of one request and is called once per request; the lowest score
    wins. Of equal scores the lowest `tie_break` wins, a formula over indicators, and then the first instance id. With
    `sample`, that number of candidates is chosen at random first. With `hold`, a condition over indicators, a request
    waits at the scheduler until the condition is true for an instance; a background request waits until
    `no_other_misses` is true for one (empty: `hold`). While it waits, only instances are asked for which `eligible` is
    true, if there are any: a part of `hold` that reads no forecasts. All three may name parameters in braces.
    `least_slack` names the parameters that `no_other_misses` compares `least_slack_s` with, for best effort and for
    late requests.

    Where prefill and decode are disaggregated, `prefill` is the policy of prefill legs (empty: this one), and
    `disaggregate` the condition over indicators for two legs, which may name parameters in braces (empty: by forecast
    if the policy reads forecasts, else always).
    """

    make: Callable[[Mapping[str, float], np.random.Generator], Score]
    formula: str
    source: str
    needs: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    tie_break: str = ""
    sample: int = 0
    hold: str = ""
    no_other_misses: str = ""
    eligible: str = ""
    least_slack: tuple[str, str] | None = None
    prefill: str = ""
    disaggregate: str = ""


def plain(score: Score) -> Callable[[Mapping[str, float], np.random.Generator], Score]:
    """Make a policy without parameters, random numbers and state."""
    return lambda _parameters, _generator: score


def normalised(column: Column) -> Column:
    """Divide by the highest known value; a column of zeros stays as it is."""
    highest = column.max(initial=0.0)
    if highest != highest:  # noqa: PLR0124 - NaN: some values are unknown
        highest = np.fmax.reduce(column, initial=0.0)
    return column / highest if highest > 0 else column
