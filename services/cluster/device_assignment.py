"""Which accelerators or cores each engine of a machine gets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
WITHIN_S = 30.0
WIDTHS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")  # devices of an engine are their product


def devices_here() -> tuple[str, ...]:
    """Name the accelerators that this process may use, as CUDA_VISIBLE_DEVICES does; none where there is none."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return tuple(name.strip() for name in told.split(",") if name.strip() not in ("", "-1"))
    program = shutil.which(QUERY[0])
    if program is None:
        return ()
    try:
        listed = subprocess.run([program, *QUERY[1:]], capture_output=True, text=True, check=True, timeout=WITHIN_S)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listed.stdout.split())


def devices_each(arguments: Sequence[str]) -> int:
    """Read from vLLM's arguments how many devices an engine spreads over."""
    product = 1
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in WIDTHS:
            value = value if equals else next(iter(arguments[place + 1 :]), "")
            if not value.isdigit() or int(value) < 1:
                raise ValueError(f"{name}: must be a whole number from 1 on, not {value!r}")
            product *= int(value)
    return product


def bound_to_devices(num: int, each: int, devices: Sequence[str]) -> list[Mapping[str, str]]:
    """Give each engine devices of its own."""
    if num * each > len(devices):
        raise ValueError(
            f"instances: {num} of {each} device{'s' if each > 1 else ''} are more than the {len(devices)} there are "
            f"({', '.join(devices) or 'none'})"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[place * each : (place + 1) * each])} for place in range(num)]


def bound_to_cores(num: int, each: int, cores: Sequence[int]) -> list[Mapping[str, str]]:
    """Give each engine of vLLM's CPU build cores of its own, in as many parts as it has workers; share too few."""
    share = len(cores) // (num * each)
    if share == 0:
        return [{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}] * num
    parts = [cores[place * share : (place + 1) * share] for place in range(num * each)]
    spelled = [",".join(map(str, part)) for part in parts]
    return [{"VLLM_CPU_OMP_THREADS_BIND": "|".join(spelled[place * each : (place + 1) * each])} for place in range(num)]


def places_for(num: int, arguments: Sequence[str], devices: Sequence[str]) -> list[Mapping[str, str]]:
    """Give each engine, as variables of its environment, devices; where there are none, cores.

    What the environment says of cores already is left as it is.
    """
    each = devices_each(arguments)
    found = tuple(devices) or devices_here()
    if found:
        return bound_to_devices(num, each, found)
    if "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return [{}] * num
    return bound_to_cores(num, each, sorted(os.sched_getaffinity(0)))
