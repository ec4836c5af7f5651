"""A cluster whose engines a provisioner starts and ends, instead of a fixed number of them."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from services.cluster.child import Child, StartError
from services.cluster.instance_range import InstanceRange
from services.cluster.settings import ClusterSettings

NAME = "provisioner"
LOOK_S = 0.2
FIRST_S = 300.0  # longest wait for the instances that there are to be at least


def provisioner_of(settings: ClusterSettings, span: InstanceRange, common: Sequence[str], folder: Path) -> Child:
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
