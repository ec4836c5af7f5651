"""Runners that run many simulations at once: in one process per core, or on a Ray cluster."""

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

OBJECT_STORE_BYTES = 100 * 2**20  # tasks and results are small; Ray's default is 30 % of the memory


@contextmanager
def processes(num: int | None = None) -> Iterator[Runner]:
    """Run tasks in `num` processes, by default one per core; with one, in this process."""
    num = num or len(os.sched_getaffinity(0))
    if num == 1:
        yield one_by_one
        return
    with ProcessPoolExecutor(num, mp_context=get_context("forkserver")) as pool:

        def runner(measure: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[tuple[int, R]]:
            indices = {pool.submit(measure, task): index for index, task in enumerate(tasks)}
            for future in as_completed(indices):
                yield indices[future], future.result()

        try:
            yield runner
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def ray_cluster(address: str, num_cpus: int | None = None) -> Iterator[Runner]:
    """Run tasks on a Ray cluster: `local` starts one with `num_cpus`, `auto` or an address joins a running one."""
    try:
        import ray
    except ImportError:
        raise ValueError("--ray: Ray is not installed (pip install 'block-serving[ray]')") from None
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
    ray.init(address=address, **options)
    try:

        def runner(measure: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[tuple[int, R]]:
            remote = ray.remote(measure)
            indices = {remote.remote(task): index for index, task in enumerate(tasks)}
            pending = list(indices)
            while pending:
                (done,), pending = ray.wait(pending, num_returns=1)
                yield indices[done], ray.get(done)

        yield runner
    finally:
        ray.shutdown()
