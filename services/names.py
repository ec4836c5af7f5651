"""Refusing names that nobody knows, with the nearest one that somebody does."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.nearest import nearest

# of a settings file: one for each kind of process, and that of a whole cluster; each reads its own and leaves the rest
TABLES = ("cluster", "gateway", "scheduler", "predictor", "tagger", "engine", "vllm", "provisioner", "bench")


def require_known(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse the first given name that is not known."""
    choices = list(known)
    for name in given:
        if name not in choices:
            raise ValueError(f"{name}: is no known {what}{nearest(str(name), choices)}")
