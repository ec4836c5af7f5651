"""A cluster whose engines a provisioner starts and ends, instead of a fixed number of them."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cluster.child import Child, StartError

if TYPE_CHECKING:
    from services.cluster.settings import ClusterSettings

MOST_INSTANCES = 256
NAME = "provisioner"
LOOK_S = 0.2
FIRST_S = 300.0  # longest wait for the instances that there are to be at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Between how many instances a provisioner may choose."""

    least: int
    most: int


def span_from(text: str) -> Span:
    """Read MIN-MAX."""
    found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"provision: must be MIN-MAX, such as 2-5, not {text!r}")
    least, most = map(int, found.groups())
    if not 1 <= least <= most <= MOST_INSTANCES:
        raise ValueError(f"provision: must be 1 <= MIN <= MAX <= {MOST_INSTANCES}, not {text}")
    return Span(least=least, most=most)


def room_of(engine: Mapping[str, Any]) -> dict[str, int]:
    """Find in a table [engine] what a provisioner is to know of every engine, by its own flags' names."""
    table = {str(name).replace("-", "_"): value for name, value in engine.items()}
    room = {"seats": table.get("max_num_seqs", 0), "kv_tokens": 0}
    if "num_gpu_blocks" in table:
        room["kv_tokens"] = table["num_gpu_blocks"] * table.get("block_size", 16)
    return {name: value for name, value in room.items() if isinstance(value, int) and value > 0}


def provisioner_of(settings: ClusterSettings, span: Span, common: Sequence[str], folder: Path) -> Child:
    """Make the provisioner, whose engines and sidecars read the same file as everybody, and end when it ends."""
    flags = [word for name, value in settings.room.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    tables = () if settings.tables_file is None else ("--config", str(Path(settings.tables_file).absolute()))
    return Child(
        NAME, "provisioner", *common, "--folder", str(folder), "--min-instances", str(span.least), "--max-instances",
        str(span.most), "--hook", "process", "--end-instances", *flags,
        "--engine-flags", shlex.join([*tables, *settings.engine_flags]),
        "--sidecar-flags", shlex.join([*tables, *settings.sidecar_flags]),
    )  # fmt: skip


async def first_instances(instances_file: Path, num: int, within_s: float = FIRST_S) -> None:
    """Wait until so many instances are ready; StartError where they do not come."""
    deadline_s = asyncio.get_running_loop().time() + within_s
    while _num_ready(instances_file) < num:
        if asyncio.get_running_loop().time() > deadline_s:
            raise StartError(f"{NAME} brought {_num_ready(instances_file)} of {num} instances within {within_s:g} s")
        await asyncio.sleep(LOOK_S)


def _num_ready(instances_file: Path) -> int:
    if not instances_file.exists():
        return 0
    instances = json.loads(instances_file.read_text(encoding="utf-8"))["instances"]
    return sum(one["state"] == "ready" for one in instances)
