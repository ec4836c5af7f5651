"""Suggestions for misspelt names in errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error about an unknown name: the closest known one, or `otherwise`."""
    closest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {closest[0]}?" if closest else otherwise


def require_known(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse the first given name that is unknown."""
    choices = list(known)
    for name in given:
        if name not in choices:
            raise ValueError(f"{name}: is no known {what}{did_you_mean(str(name), choices)}")
