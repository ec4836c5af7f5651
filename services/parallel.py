"""Running many simulations at once: one process per core, or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from simulator.parallel import Runner, one_by_one

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def processes(num: int | None = None) -> Iterator[Runner]:
    """Have one process per core; with a single one, this one."""
    num = num or len(os.sched_getaffinity(0))
    if num == 1:
        yield one_by_one
        return
    with ProcessPoolExecutor(num, mp_context=get_context("forkserver")) as pool:

        def runner(measure: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[tuple[int, R]]:
            places = {pool.submit(measure, task): place for place, task in enumerate(tasks)}
            for future in as_completed(places):
                yield places[future], future.result()

        try:
            yield runner
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def ray_cluster(address: str) -> Iterator[Runner]:
    """Have a Ray cluster: `local` starts one on this machine, `auto` or an address joins one that runs."""
    try:
        import ray
    except ImportError:
        raise ValueError("--ray: Ray is not installed (pip install 'block-serving[ray]')") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
    if address == "local":
        ray.init(address="local", **quiet)
    else:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:

        def runner(measure: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[tuple[int, R]]:
            remote = ray.remote(measure)
            places = {remote.remote(task): place for place, task in enumerate(tasks)}
            left = list(places)
            while left:
                (done,), left = ray.wait(left, num_returns=1)
                yield places[done], ray.get(done)

        yield runner
    finally:
        ray.shutdown()
