"""Maps a served model to the models in an estimator's training data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def model_indices(name: str, known: Sequence[str]) -> list[int]:
    """Return the indices of a served model among known ones: by full name, by its last part, or else all of them."""
    return list(_indices(name[-200:], tuple(known)))


@lru_cache(maxsize=4096)
def _indices(name: str, known: tuple[str, ...]) -> tuple[int, ...]:
    for spelled in (str, str.lower, _last_part):
        found = tuple(index for index, one in enumerate(known) if spelled(one) == spelled(name))
        if found:
            return found
    return tuple(range(len(known)))


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
