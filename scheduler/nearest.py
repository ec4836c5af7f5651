"""What somebody may have meant who wrote a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """End a complaint about an unknown name: with the nearest known one, if there is any."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else otherwise
