"""The contents of a state file, and why one cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MISSING, FOREIGN, CORRUPT, ENDED, BUSY = "missing", "foreign", "corrupt", "ended", "busy"


class UnreadableError(ValueError):
    """A state file cannot be read: it is missing, foreign, corrupt, busy, or its engine has ended."""

    def __init__(self, reason: str, message: str) -> None:
        """Initialise it with one of the reasons above."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of KV blocks by block, and the blocks and contents of requests in the order of `View.slots`."""

    blocks: np.ndarray
    tables: tuple[np.ndarray, ...]
    hashes: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An engine's state in one publication, in read-only arrays.

    `life` identifies a start of the engine, and `generation` counts its files, each larger than the one before.
    `live` and `requests` have a row per slot. `running` and `waiting` are slots in the engine's order, `held` those of
    requests that have ended while their blocks are held. `steps` are the steps in flight, oldest first. `clients` are
    those whose tokens the local scheduler counts, `adapters` those in host memory, the least recently used one first.
    `now_s` is the time of reading on the engine's clock, `age_s` the age of the publication on the wall clock,
    `clock_rate` engine seconds per second.
    """

    life: int
    generation: int
    sequence: int
    now_s: float
    age_s: float
    clock_rate: float
    settings: dict[str, Any]
    state: np.void
    clients: np.ndarray
    adapters: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    held: np.ndarray
    steps: tuple[tuple[float, np.ndarray], ...]
    live: np.ndarray
    requests: np.ndarray
    contents: Contents | None

    @property
    def slots(self) -> np.ndarray:
        """The slots of all requests that run, wait, or have ended while their blocks are held."""
        return np.concatenate((self.running, self.waiting, self.held))
