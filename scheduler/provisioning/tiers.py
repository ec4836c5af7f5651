"""Tiers: instances that serve one bound of the time per token (PolyServe §4.2); their table in a TOML document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scheduler.toml_tables import entries_from, entries_in, require_fields, require_positive, require_text

MAX_TIERS = 64  # that a table may have
MAX_NAME = 64  # characters
ANY_NUMBER = 1_000_000  # instances: no bound
SAME = 1.0 + 1e-6  # targets within this ratio are the same number
FIELDS = ("name", "tpot_slo_s", "min_instances", "max_instances")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The instances that keep a time per token of `tpot_slo_s`, with a minimum and a maximum number of them."""

    name: str
    tpot_slo_s: float
    min_instances: int = 0
    max_instances: int = ANY_NUMBER

    def __post_init__(self) -> None:
        """Refuse invalid values; the error names the field."""
        require_text("name", self.name)
        if len(self.name) > MAX_NAME or not (self.name.isascii() and self.name.isprintable()):
            raise ValueError(f"name: must be at most {MAX_NAME} printable ASCII characters")
        require_positive("tpot_slo_s", self.tpot_slo_s)
        for name, minimum in (("min_instances", 0), ("max_instances", 1)):
            value = getattr(self, name)
            if type(value) is not int or not minimum <= value <= ANY_NUMBER:
                raise ValueError(f"{name}: must be a whole number from {minimum} on, not {value!r:.20}")
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances: {self.min_instances} is more than max_instances {self.max_instances}")


Tiers = tuple[Tier, ...]  # the strictest first


def tiers_in(text: str, source: str) -> Tiers:
    """Read a TOML document with a table [[tier]] for each tier; errors start with its source."""
    return entries_in(text, source, "tier", tiers_from)


def tiers_from(tables: Any) -> Tiers:
    """Read a list of tables; the error for an invalid one has its index."""
    if isinstance(tables, list) and len(tables) > MAX_TIERS:
        raise ValueError(f"tier: must be at most {MAX_TIERS} tables, not {len(tables)}")
    return ordered(entries_from(tables, "tier", _tier_from))


def _tier_from(table: Mapping[str, Any]) -> Tier:
    require_fields(table, FIELDS, ("name", "tpot_slo_s"))
    return Tier(**{**table, "tpot_slo_s": _number(table["tpot_slo_s"])})


def _number(value: Any) -> float:
    require_positive("tpot_slo_s", value)
    return float(value)


def ordered(tiers: Sequence[Tier]) -> Tiers:
    """Return tiers with the strictest first; ValueError where two have the same name or bound."""
    found = sorted(tiers, key=lambda tier: tier.tpot_slo_s)
    for tier, looser in pairwise(found):
        if looser.tpot_slo_s <= tier.tpot_slo_s * SAME:
            raise ValueError(
                f"tier: tpot_slo_s: {tier.name!r} and {looser.name!r} have the same bound, {tier.tpot_slo_s:g} s"
            )
    names = [tier.name for tier in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tier: name: {name!r} is a duplicate")
    return tuple(found)


def require_room(tiers: Tiers, max_instances: int) -> None:
    """Refuse tiers that need more instances than there may be."""
    least = sum(tier.min_instances for tier in tiers)
    if least > max_instances:
        raise ValueError(f"tier: min_instances: {least} in sum are more than max_instances {max_instances} of the pool")


def require_served(tiers: Tiers, shortest_step_s: float) -> None:
    """Refuse a tier whose bound no instance keeps, by the shortest step that decodes one request; NaN: unknown."""
    for tier in tiers:
        if shortest_step_s > tier.tpot_slo_s:
            raise ValueError(
                f"tier: tpot_slo_s: no instance can keep the {1e3 * tier.tpot_slo_s:g} ms of {tier.name!r}: the "
                f"shortest step of the instances takes {1e3 * shortest_step_s:.3g} ms"
            )


def tier_for(tpot_slo_s: float, tiers: Tiers) -> Tier | None:
    """Return the loosest tier that keeps a target; None without a target, and for one stricter than all tiers."""
    if not math.isfinite(tpot_slo_s):
        return None
    return next((tier for tier in reversed(tiers) if tier.tpot_slo_s <= tpot_slo_s * SAME), None)
