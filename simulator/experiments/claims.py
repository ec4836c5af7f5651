"""A paper's claims about a figure, evaluated on our measurements: values, differences, best variant, turning points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from predictor.suggestions import require_choice
from simulator.capacity import half_width

KEYS = ("says", "paper", "metric", "of", "over", "at", "settings", "lowest", "highest")

# Returns the values of all seeds for a setting, a variant and a rate; empty if not measured.
Read = Callable[[str, str, float], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence of the paper, its number, and what to compare it with here.

    With `over`, the relative difference of the variant `of` to that one; with `of` alone, its value; with `lowest` or
    `highest`, the name of the best of these variants.
    """

    text: str
    metric: str
    at: tuple[float, ...]
    paper: str = ""
    of: str = ""
    over: str = ""
    lowest: tuple[str, ...] = ()
    highest: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A metric and its limit; the turning point of a curve is the rate from which on it exceeds the limit."""

    metric: str
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """The measurement for a claim at one setting and rate: a number with half its 95 % interval, or a name."""

    setting: str
    rate: float
    value: float = math.nan
    half: float | None = None
    name: str = ""


def claim_from(table: Mapping[str, Any], metrics: Sequence[str], variants: Sequence[str]) -> Claim:
    """Read a claim from a table; unknown names are rejected."""
    for key in table:
        if key not in KEYS:
            raise ValueError(f"claims: {key!r} is unknown; there are {', '.join(KEYS)}")
    at = table.get("at", ())
    claim = Claim(
        text=str(table.get("says", "")),
        metric=str(table.get("metric", "")),
        at=tuple(float(rate) for rate in (at if isinstance(at, list) else [at])),
        paper=str(table.get("paper", "")),
        of=str(table.get("of", "")),
        over=str(table.get("over", "")),
        lowest=tuple(table.get("lowest", ())),
        highest=tuple(table.get("highest", ())),
        settings=tuple(table.get("settings", ())),
    )
    require_choice("claims.metric", claim.metric, metrics)
    named = [name for name in (claim.of, claim.over, *claim.lowest, *claim.highest) if name]
    for name in named:
        if name not in variants:
            raise ValueError(f"claims: must be one of the variants, not {name!r}")
    if not named or not claim.at:
        raise ValueError(f"claims: {claim.text!r} names no variant, or no rate")
    return claim


def turn_from(table: Mapping[str, Any], metrics: Sequence[str]) -> Turn:
    """Read a turn from a table."""
    if set(table) != {"metric", "limit"} or table["metric"] not in metrics or not table["limit"] > 0:
        raise ValueError(f"turn: must name a metric and a limit above 0, not {dict(table)}")
    return Turn(metric=table["metric"], limit=float(table["limit"]))


def evaluate(claim: Claim, settings: Sequence[str], read: Read) -> list[ClaimResult]:
    """Evaluate a claim at its settings and rates; those that were not measured are left out."""
    results = []
    for setting in claim.settings or settings:
        for rate in claim.at:
            one = _best(claim, setting, rate, read) if claim.lowest or claim.highest else _number(
                claim, setting, rate, read)  # fmt: skip
            if one is not None:
                results.append(one)
    return results


def _number(claim: Claim, setting: str, rate: float, read: Read) -> ClaimResult | None:
    values = read(setting, claim.of, rate)
    if claim.over:
        pairs = zip(values, read(setting, claim.over, rate), strict=True)
        values = [one / other - 1 for one, other in pairs if other]
    if not values:
        return None
    half = half_width(values) if len({*values}) > 1 else None
    return ClaimResult(setting=setting, rate=rate, value=float(np.mean(values)), half=half)


def _best(claim: Claim, setting: str, rate: float, read: Read) -> ClaimResult | None:
    names, choose = (claim.lowest, min) if claim.lowest else (claim.highest, max)
    means = {name: float(np.mean(values)) for name in names if (values := read(setting, name, rate))}
    if not means:
        return None
    name = choose(means, key=means.__getitem__)
    return ClaimResult(setting=setting, rate=rate, value=means[name], name=name)


def turning_points(turn: Turn, setting: str, variant: str, rates: Sequence[float], read: Read) -> list[float]:
    """Return for each seed the rate at which a curve crosses the limit, or infinity.

    Between two rates, the curve's logarithm is interpolated linearly.
    """
    by_seed = zip(*(read(setting, variant, rate) for rate in rates), strict=True)
    return [_crossing(rates, values, turn.limit) for values in by_seed]


def _crossing(rates: Sequence[float], values: Sequence[float], limit: float) -> float:
    if values[0] >= limit:
        return rates[0]
    for (rate, value), (next_rate, next_value) in pairwise(zip(rates, values, strict=True)):
        if next_value >= limit:
            share = math.log(limit / value) / math.log(next_value / value) if value > 0 else 1.0
            return rate + share * (next_rate - rate)
    return math.inf
