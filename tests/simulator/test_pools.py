"""Recommendations of pools find the smallest cluster and its best split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from simulator.pools import PoolSearch, PoolTrial, recommend_pools
from simulator.scenario import scenario_from
from simulator.sizing import Target
from tests.simulator.test_capacity import SMALL

TARGET = Target(ttft_s=1.0)


def load(prefill_work: float, decode_work: float) -> Callable[[int, int], float]:
    """Pools whose use is that of the busier one; co-located instances have both kinds of work, and a loss."""

    def used(num_prefill: int, num_decode: int) -> float:
        if num_prefill == 0:
            return 1.2 * (prefill_work + decode_work) / num_decode
        return max(prefill_work / num_prefill, decode_work / num_decode)

    return used


@pytest.mark.parametrize("work", [(0.5, 0.7), (1.5, 5.2), (9.1, 2.3), (4.0, 14.5), (30.0, 1.0)])
@pytest.mark.parametrize("near", [1, 7, 40])
def test_finds_the_smallest_pools(work: tuple[float, float], near: int) -> None:
    """The size equals that of an exhaustive search, with far fewer trials, and its split meets the target."""
    used = load(*work)
    search = PoolSearch(used, 64)
    found = search.smallest(near, colocated=False)
    assert found is not None
    smallest = min(
        prefill + decode for prefill in range(1, 64) for decode in range(1, 64) if used(prefill, decode) <= 1
    )
    assert found.num_prefill + found.num_decode == smallest
    assert found.used == used(found.num_prefill, found.num_decode) <= 1
    assert len(search.known) < 80


def test_pools_that_never_suffice() -> None:
    """None is found where the largest cluster misses the target."""
    search = PoolSearch(load(9.0, 9.0), 12)
    assert search.smallest(3, colocated=False) is None
    assert search.smallest(3, colocated=True) is None


def test_recommends_by_policy() -> None:
    """Co-located policies get no prefill instances, the others a split; each has all that was tried."""
    used = load(2.0, 5.0)

    def runner(_: Callable[[PoolTrial], float], trials: Sequence[PoolTrial], /) -> Iterator[tuple[int, Any]]:
        for index, trial in enumerate(trials):
            yield index, used(trial.num_prefill, trial.num_decode)

    found = recommend_pools(
        scenario_from(SMALL), ["jsq"], ["pd_least"], TARGET, rate=5.0, seeds=2, max_instances=30, runner=runner,
        on_progress=lambda _: None,
    )  # fmt: skip
    alone, pools = found
    assert (alone.policy, alone.num_instances, pools.policy, pools.num_instances) == ("jsq", 9, "pd_least", 7)
    assert pools.best is not None
    assert (pools.best.num_prefill, pools.best.num_decode) == (2, 5)
    assert all(one.num_prefill == 0 for one in alone.tried)
    assert pools.best in pools.tried
