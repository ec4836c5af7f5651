"""The content of a state file, and the error of one that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MISSING, FOREIGN, CORRUPT, ENDED, BUSY = "missing", "foreign", "corrupt", "ended", "busy"


class UnreadableError(ValueError):
    """A state file cannot be read: it is missing, foreign, corrupt, its engine has ended, or it stays busy."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep the reason beside the message."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of KV blocks: an array by block, and in the order of `View.slots` requests' blocks and contents."""

    blocks: np.ndarray
    tables: tuple[np.ndarray, ...]
    hashes: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An engine's state in one publication, in arrays that do not change.

    An engine's `life` is a number of its own, and `generation` counts the files of that life, each larger than the one
    before. `live` and `requests` have a row per slot. `running` and `waiting` are slots in the engine's order, `steps`
    the steps under way, oldest first. `now_s` is the time of reading on the engine's clock, `age_s` the wall-clock age
    of the publication, and `clock_rate` engine seconds per second.
    """

    life: int
    generation: int
    sequence: int
    now_s: float
    age_s: float
    clock_rate: float
    settings: dict[str, Any]
    state: np.void
    running: np.ndarray
    waiting: np.ndarray
    steps: tuple[tuple[float, np.ndarray], ...]
    live: np.ndarray
    requests: np.ndarray
    contents: Contents | None

    @property
    def slots(self) -> np.ndarray:
        """Return the slots of all running and waiting requests."""
        return np.concatenate((self.running, self.waiting))
