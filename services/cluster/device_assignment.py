"""The accelerators or CPU cores of each engine of a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
TIMEOUT_S = 30.0
WIDTHS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")  # devices of an engine are their product


def devices_here() -> tuple[str, ...]:
    """List the accelerators that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    program = shutil.which(QUERY[0])
    if program is None:
        return ()
    try:
        listed = subprocess.run([program, *QUERY[1:]], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listed.stdout.split())


def devices_each(arguments: Sequence[str]) -> int:
    """Read from vLLM's arguments the number of devices that an engine spreads over."""
    product = 1
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in WIDTHS:
            value = value if equals else next(iter(arguments[index + 1 :]), "")
            if not value.isdigit() or int(value) < 1:
                raise ValueError(f"{name}: must be a whole number from 1 on, not {value!r}")
            product *= int(value)
    return product


def bound_to_devices(num: int, each: int, devices: Sequence[str]) -> list[Mapping[str, str]]:
    """Assign devices to each engine."""
    if num * each > len(devices):
        raise ValueError(
            f"instances: {num} of {each} device{'s' if each > 1 else ''} are more than the {len(devices)} there are "
            f"({', '.join(devices) or 'none'})"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[index * each : (index + 1) * each])} for index in range(num)]


def bound_to_cores(num: int, each: int, cores: Sequence[int]) -> list[Mapping[str, str]]:
    """Assign cores to each engine of vLLM's CPU build, in one part for each worker; too few cores are shared."""
    share = len(cores) // (num * each)
    if share == 0:
        return [{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}] * num
    parts = [",".join(map(str, cores[index * share : (index + 1) * share])) for index in range(num * each)]
    return [{"VLLM_CPU_OMP_THREADS_BIND": "|".join(parts[index * each : (index + 1) * each])} for index in range(num)]


def environments_of(num: int, arguments: Sequence[str], devices: Sequence[str]) -> list[Mapping[str, str]]:
    """Make the environment variables that assign devices to each engine; without devices, CPU cores.

    Without devices, VLLM_CPU_OMP_THREADS_BIND of this process's environment counts, if it is set.
    """
    each = devices_each(arguments)
    found = tuple(devices) or devices_here()
    if found:
        return bound_to_devices(num, each, found)
    if "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return [{}] * num
    return bound_to_cores(num, each, sorted(os.sched_getaffinity(0)))
