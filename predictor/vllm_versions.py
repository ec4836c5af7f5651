"""What vLLM's scheduler decides differently from version to version, for requests of text: one table.

A version has the rules of the one before it, with its own changes. `docs/engines.md` says how the next one is added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

Release = tuple[int, int]  # such as (0, 32)

SPECULATION: tuple[Release, ...] = ((0, 30), (0, 31), (0, 32))  # releases whose speculative decoding is modelled
LATE_FREES: tuple[Release, ...] = ((0, 28), (0, 29))  # preempt requests whose KV blocks are free only a step later
DEFAULT: Release = (0, 32)  # of engines whose version is not known: the newest whose CPU build is tested
_RELEASE = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?![\d])")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRules:
    """What one version's scheduler does; the functions named are `Scheduler`'s."""

    # `long_prefill_token_threshold` does not hold for a request that is alone on the engine (`schedule`).
    spares_lone_prefill: bool
    # Waiting requests that hold KV blocks come before all others (`kv_holding_waiting`). Before that they were in the
    # queue of skipped requests, which with priorities was merged with the other one (`skipped_waiting`).
    holding_first: bool
    # With priorities, a running request that preempts itself does not end the loop over the running ones (`schedule`).
    goes_on_after_self_preemption: bool


@dataclass(frozen=True, slots=True)
class ChosenRules:
    """The rules for a version, and the release that they are of; `is_exact` where it is that very release."""

    rules: VllmRules
    release: Release
    is_exact: bool

    @property
    def name(self) -> str:
        """The release as text."""
        return ".".join(str(part) for part in self.release)


_FIRST = VllmRules(spares_lone_prefill=False, holding_first=False, goes_on_after_self_preemption=False)
_CHANGES: Mapping[Release, Mapping[str, bool]] = {
    (0, 28): {},
    (0, 29): {},
    (0, 30): {},
    (0, 31): {"spares_lone_prefill": True, "holding_first": True},
    (0, 32): {},
    (0, 33): {"goes_on_after_self_preemption": True},
}
RULES: Mapping[Release, VllmRules] = dict(
    zip(
        _CHANGES,
        list(accumulate(_CHANGES.values(), lambda rules, changes: replace(rules, **changes), initial=_FIRST))[1:],
        strict=True,
    )
)


def release_of(version: str) -> Release:
    """Return the release of a version such as `0.32.0` or `0.33.1rc2+cu129`; ValueError for any other text."""
    found = _RELEASE.match(version)
    if found is None:
        raise ValueError(f"{version!r} is not a version of vLLM such as 0.32.0")
    return int(found[1]), int(found[2])


def rules_for(version: str) -> ChosenRules:
    """Return the rules of a version, or those of the nearest release in the table; empty: of `DEFAULT`."""
    release = release_of(version) if version else DEFAULT
    if release in RULES:
        return ChosenRules(RULES[release], release, is_exact=True)
    before = [known for known in RULES if known < release]
    nearest = max(before) if before else min(RULES)
    return ChosenRules(RULES[nearest], nearest, is_exact=False)


def approximations_of(version: str, *, speculates: bool, overlaps_fetches: bool) -> tuple[str, ...]:
    """Return what forecasts of an engine of this version approximate: nothing where all its rules are known.

    `overlaps_fetches`: it schedules asynchronously, and fetches KV blocks meanwhile.
    """
    chosen, named = rules_for(version), []
    if not chosen.is_exact:
        major, minor = release_of(version)
        named.append(f"vLLM {major}.{minor} is not known, and is forecast by the rules of {chosen.name}")
    if speculates and chosen.release not in SPECULATION:
        named.append(f"speculative decoding of vLLM {chosen.name} is forecast by the rules of 0.32")
    if overlaps_fetches and chosen.release in LATE_FREES:
        named.append(
            f"preemption in vLLM {chosen.name} with a KV connector that fetches is forecast by the rules of 0.30"
        )
    return tuple(named)
