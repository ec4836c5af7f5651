"""Compiles the kernels in several processes at the same time; `python -m services.compilation PART` is one of them.

A local scheduler is compiled with all that it calls, so the rules of several of them can be compiled apart, and then
the loops that call them. The cache of compiled kernels is what the processes share.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from numba.extending import is_jitted

from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.profile import constant_profile

SIMULATOR = "simulator"
NUM_PROCESSES = 2  # a third one would compile again most of what it shares with the others


def compile_rules(part: int, num_parts: int, on_rule: Callable[[], None] = lambda: None) -> bool:
    """Compile every `num_parts`-th local scheduler, from number `part` on; return whether the cache had all of them."""
    state = Engine(EngineConfig(), constant_profile().step_time).state
    were_cached = True
    for batcher in list(BATCHERS.values())[part::num_parts]:
        if is_jitted(batcher.schedule):
            kernel = batcher.schedule
            kernel.compile((kernel.typeof_pyval(state),))
            were_cached = were_cached and not kernel.stats.cache_misses
        on_rule()
    return were_cached


@contextmanager
def compiling_beside(parts: Sequence[str]) -> Iterator[None]:
    """Compile parts in processes of their own while the block runs; RuntimeError names one that failed."""
    command = [sys.executable, "-m", __name__]
    children = [subprocess.Popen([*command, part], stdout=subprocess.DEVNULL) for part in parts]  # noqa: S603 - ours
    try:
        yield
        for part, child in zip(parts, children, strict=True):
            if child.wait() != 0:
                raise RuntimeError(
                    f"kernels of part {part} cannot be compiled: the process ended with {child.returncode}"
                )
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
                child.wait()


def main(part: str) -> None:
    """Compile one part: the simulator, or PART/PARTS of the local schedulers."""
    if part == SIMULATOR:
        from simulator.warmup import warm_simulator

        warm_simulator()
    else:
        number, _, num_parts = part.partition("/")
        compile_rules(int(number), int(num_parts))


if __name__ == "__main__":
    main(sys.argv[1])
