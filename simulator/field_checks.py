"""Checks of the fields of a scenario: an error is one line that names the field and says what it must be."""

from __future__ import annotations

import math


def require_number(
    name: str, value: object, *, at_least: float = 0.0, above: float | None = None, infinite: bool = False
) -> None:
    """Reject what is no number, or not at least a limit, or not above one; infinity only where it means something."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        in_range = value >= at_least if above is None else value > above
        if in_range and (value < math.inf or infinite):
            return
    limit = "" if at_least == -math.inf else f" from {at_least:g} on" if above is None else f" above {above:g}"
    raise ValueError(f"{name}: must be a number{limit}, not {value!r:.40}")


def require_share(name: str, value: object) -> None:
    """Reject what is no number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}: must be a share from 0 to 1, not {value!r:.40}")


def require_flag(name: str, value: object) -> None:
    """Reject what is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, not {value!r:.40}")


def require_string(name: str, value: object) -> None:
    """Reject what is no text; it may be empty."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a text, not {value!r:.40}")
