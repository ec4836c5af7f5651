"""Which of the models that an estimator learned from speak for a served model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def places_of(name: str, known: Sequence[str]) -> list[int]:
    """Find a served model among those learned from: by its whole name, by its last part, or else all of them."""
    return list(_places(name[-200:], tuple(known)))


@lru_cache(maxsize=4096)
def _places(name: str, known: tuple[str, ...]) -> tuple[int, ...]:
    for spelled in (str, str.lower, _last_part):
        found = tuple(place for place, one in enumerate(known) if spelled(one) == spelled(name))
        if found:
            return found
    return tuple(range(len(known)))


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
