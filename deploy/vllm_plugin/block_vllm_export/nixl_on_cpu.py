"""Lets NIXL and vLLM's CPU build share few cores: BLOCK_NIXL_ON_CPU=1.

Without it, NIXL 1.5's progress thread polls without a pause, which takes a whole core of every engine, and vLLM 0.32
binds the worker's main thread to the last core of the machine, which is the same one for all engines.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

VARIABLE = "BLOCK_NIXL_ON_CPU"
POLL_US = 100_000  # maximum time that the progress thread sleeps; the arrival of data wakes it earlier
BINDINGS = ("nixl_cu12._bindings", "nixl_cu13._bindings")


def is_asked_for() -> bool:
    """Return whether the environment asks for it."""
    return os.environ.get(VARIABLE, "") in {"1", "true", "yes", "on"}


def adapt() -> None:
    """Adapt NIXL agents and workers that are made from now on in this process."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = classmethod(no_reserved_cores)  # its only use is to bind the worker
    for name in BINDINGS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            bindings = importlib.import_module(name)
            bindings.nixlAgentConfig = sleeping(bindings.nixlAgentConfig)


def no_reserved_cores(_: Any) -> list[list[int]]:
    """Name no core for KV transfers."""
    return []


def sleeping(config: type) -> type:
    """Make a class of configurations whose progress thread sleeps, whatever it is set to."""
    delay: Any = vars(config)["pthrDelay"]

    def set_delay(self: Any, _: int) -> None:
        delay.__set__(self, POLL_US)

    return type(config.__name__, (config,), {"pthrDelay": property(delay.__get__, set_delay)})
