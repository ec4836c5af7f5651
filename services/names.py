"""Refusing names that nobody knows, with the nearest one that somebody does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# of a settings file: one for each kind of process, and that of a whole cluster; each reads its own and leaves the rest
TABLES = ("cluster", "gateway", "scheduler", "predictor", "tagger", "engine", "vllm", "provisioner", "bench")


def require_known(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse the first given name that is not known."""
    choices = list(known)
    for name in given:
        if name not in choices:
            near = difflib.get_close_matches(str(name), choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name}: is no known {what}{hint}")
