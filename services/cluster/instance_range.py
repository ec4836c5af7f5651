"""The number of instances that a provisioner may choose, and the capacity of an engine that it plans with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictor.config import EngineConfig
from services.settings import default_of

MAX_INSTANCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRange:
    """The smallest and the largest number of instances that a provisioner may choose."""

    minimum: int
    maximum: int


def instance_range_from(text: str) -> InstanceRange:
    """Read MIN-MAX."""
    found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"provision: must be MIN-MAX, such as 2-5, not {text!r}")
    minimum, maximum = map(int, found.groups())
    if not 1 <= minimum <= maximum <= MAX_INSTANCES:
        raise ValueError(f"provision: must be 1 <= MIN <= MAX <= {MAX_INSTANCES}, not {text}")
    return InstanceRange(minimum=minimum, maximum=maximum)


def engine_capacity_of(engine: Mapping[str, Any]) -> dict[str, int]:
    """Read the capacity of an engine from its table, under the names of the provisioner's flags."""
    table = {str(name).replace("-", "_"): value for name, value in engine.items()}
    capacity = {"seats": table.get("max_num_seqs", 0), "kv_tokens": 0}
    if "num_gpu_blocks" in table:
        capacity["kv_tokens"] = table["num_gpu_blocks"] * table.get(
            "block_size", default_of(EngineConfig, "block_size")
        )
    return {name: value for name, value in capacity.items() if isinstance(value, int) and value > 0}
