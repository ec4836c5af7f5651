"""A request that is exported, and what has been written of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import layout
from .writer import NEVER, UNKNOWN


@dataclass(slots=True)
class ExportedRequest:
    """A request in its slot, and what has been written of it."""

    request: Any
    slot: int
    serial: int
    arrival_s: float
    runs: bool = False
    scheduled_s: float = NEVER
    first_token_s: float = NEVER
    hit_tokens: int = 0
    prefill_tokens: int = UNKNOWN
    num_hashes: int = 0
    num_tabled: int = 0
    stage: int = layout.NO_TRANSFER
    fetch_started_s: float = NEVER
    fetch_ended_s: float = NEVER
    held_until_s: float = NEVER
    row: tuple[Any, ...] = field(default=())
