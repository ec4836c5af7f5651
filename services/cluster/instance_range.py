"""Between how many instances a provisioner may choose, and what it is to know of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_INSTANCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRange:
    """Between how many instances a provisioner may choose."""

    least: int
    most: int


def instance_range_from(text: str) -> InstanceRange:
    """Read MIN-MAX."""
    found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"provision: must be MIN-MAX, such as 2-5, not {text!r}")
    least, most = map(int, found.groups())
    if not 1 <= least <= most <= MOST_INSTANCES:
        raise ValueError(f"provision: must be 1 <= MIN <= MAX <= {MOST_INSTANCES}, not {text}")
    return InstanceRange(least=least, most=most)


def room_of(engine: Mapping[str, Any]) -> dict[str, int]:
    """Find in a table [engine] what a provisioner is to know of every engine, by its own flags' names."""
    table = {str(name).replace("-", "_"): value for name, value in engine.items()}
    room = {"seats": table.get("max_num_seqs", 0), "kv_tokens": 0}
    if "num_gpu_blocks" in table:
        room["kv_tokens"] = table["num_gpu_blocks"] * table.get("block_size", 16)
    return {name: value for name, value in room.items() if isinstance(value, int) and value > 0}
