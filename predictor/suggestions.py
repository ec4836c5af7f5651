"""What somebody may have meant who wrote a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """End a complaint about an unknown name: with the nearest known one, if there is any."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else otherwise


def require_known(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse the first given name that is not known."""
    choices = list(known)
    for name in given:
        if name not in choices:
            raise ValueError(f"{name}: is no known {what}{did_you_mean(str(name), choices)}")
