"""Errors about unknown names, which suggest the closest known one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


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


def require_choice(field: str, value: object, choices: Collection[str], *, or_empty: bool = False) -> None:
    """Refuse a value that is none of the choices."""
    if not isinstance(value, str) or (value not in choices and not (or_empty and not value)):
        raise unknown_choice(field, value, choices, or_empty=or_empty)


def unknown_choice(field: str, value: object, choices: Iterable[str], *, or_empty: bool = False) -> ValueError:
    """Return the error about a value that is none of the choices, with the closest one."""
    known = list(choices)
    hint = did_you_mean(value, known) if isinstance(value, str) else ""
    empty = ", or empty" if or_empty else ""
    return ValueError(f"{field}: must be one of {', '.join(known)}{empty}, not {value!r:.40}{hint}")
