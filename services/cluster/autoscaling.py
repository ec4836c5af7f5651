"""A cluster whose engines a provisioner starts and stops, in place of a fixed number of them."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from services.cluster.child import Child, StartError
from services.cluster.instance_range import InstanceRange
from services.cluster.link_security import LinkSecurity
from services.cluster.settings import ClusterSettings

NAME = "provisioner"
CHECK_S = 0.2
FIRST_INSTANCES_S = 300.0  # maximum time until the minimum number of instances is ready


def provisioner_of(
    settings: ClusterSettings,
    span: InstanceRange,
    common: Sequence[str],
    folder: Path,
    security: LinkSecurity | None,
) -> Child:
    """Make the provisioner; its engines and sidecars read the same settings file, and stop when it stops."""
    flags = [word for name, value in settings.capacity.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    tables = () if settings.tables_file is None else ("--config", str(Path(settings.tables_file).absolute()))
    of_engines, of_sidecars, scheme = [], [], []
    if security is not None:
        of_engines, of_sidecars = list(security.flags("engine")), list(security.flags("predictor"))
        scheme = ["--engine-scheme", "https"]
    return Child(
        NAME, "provisioner", *common, "--folder", str(folder), "--min-instances", str(span.minimum), "--max-instances",
        str(span.maximum), "--hook", "process", "--end-instances", *flags, *scheme,
        "--engine-flags", shlex.join([*tables, *of_engines, *settings.engine_flags]),
        "--sidecar-flags", shlex.join([*tables, *of_sidecars, *settings.sidecar_flags]),
    )  # fmt: skip


async def first_instances(instances_file: Path, num: int, within_s: float = FIRST_INSTANCES_S) -> None:
    """Wait until this number of instances is ready; StartError if that takes too long."""
    deadline_s = asyncio.get_running_loop().time() + within_s
    while _num_ready(instances_file) < num:
        if asyncio.get_running_loop().time() > deadline_s:
            raise StartError(f"{NAME} started {_num_ready(instances_file)} of {num} instances within {within_s:g} s")
        await asyncio.sleep(CHECK_S)


def _num_ready(instances_file: Path) -> int:
    if not instances_file.exists():
        return 0
    instances = json.loads(instances_file.read_text(encoding="utf-8"))["instances"]
    return sum(one["state"] == "ready" for one in instances)
