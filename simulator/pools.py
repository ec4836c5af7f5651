"""How many instances that only prefill and how many that decode, or co-located ones, meet latency targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from simulator.parallel import Runner
from simulator.scenario import Scenario
from simulator.sizing import SizingRun, SizingTarget, sized, smallest_size

Used = Callable[[int, int], float]  # numbers of prefill and of other instances to the share of the limit that is used


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTrial:
    """One run that shows whether pools meet a target; without prefill instances, all others are co-located."""

    scenario: Scenario
    policy: str
    num_prefill: int
    num_decode: int
    rate: float | None
    seed: int
    target: SizingTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPools:
    """Pools that were tried, and the largest ratio of a percentile to its limit: at most 1 meets the target."""

    num_prefill: int
    num_decode: int
    used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecommendation:
    """The smallest cluster of a policy that meets the target, and all that was tried; None where none meets it."""

    policy: str
    colocated: bool
    best: TriedPools | None
    tried: tuple[TriedPools, ...]

    @property
    def num_instances(self) -> int | None:
        """The number of all instances."""
        return None if self.best is None else self.best.num_prefill + self.best.num_decode


@dataclass(slots=True)
class PoolSearch:
    """Searches pools with known results kept; `used` measures pools."""

    measure: Used
    max_instances: int
    known: dict[tuple[int, int], float] = field(default_factory=dict)

    def used(self, num_prefill: int, num_decode: int) -> float:
        """Return the share of the limit that pools use."""
        key = num_prefill, num_decode
        if key not in self.known:
            self.known[key] = self.measure(*key)
        return self.known[key]

    def smallest(self, near: int, *, colocated: bool) -> TriedPools | None:
        """Find the smallest cluster that meets the target; the search starts near a size."""

        def share(num: int) -> float:
            return self._best_of(num, colocated=colocated).used

        num = smallest_size(share, near, self.max_instances, 1 if colocated else 2)
        return None if num is None else self._best_of(num, colocated=colocated)

    def _best_of(self, num: int, *, colocated: bool) -> TriedPools:
        """Return the split of so many instances that uses least of the limit; one that meets the target is enough."""
        if colocated:
            return TriedPools(num_prefill=0, num_decode=num, used=self.used(0, num))
        best = min(range(1, num), key=lambda one: abs(one - self._likely(num)))
        step = max(1, num // 4)
        while self.used(best, num - best) > 1:
            near = [one for one in (best - step, best + step) if 1 <= one < num]
            better = min(near, key=lambda one: self.used(one, num - one), default=best)
            if self.used(better, num - better) < self.used(best, num - best):
                best = better
            elif step > 1:
                step //= 2
            else:
                break
        return TriedPools(num_prefill=best, num_decode=num - best, used=self.used(best, num - best))

    def _likely(self, num: int) -> float:
        """Return the number of prefill instances that is likely best: the share that was best so far."""
        splits = {key: used for key, used in self.known.items() if key[0] > 0}
        if not splits:
            return num / 2
        prefill, decode = min(splits, key=splits.__getitem__)
        return num * prefill / (prefill + decode)


def used_by_pools(trial: PoolTrial) -> float:
    """Simulate pools; return the share of the limit that they use."""
    scenario = in_pools(trial.scenario, trial.num_prefill, trial.num_decode)
    return trial.target.used_by(SizingRun(scenario=scenario, policy=trial.policy, rate=trial.rate, seed=trial.seed))


def in_pools(scenario: Scenario, num_prefill: int, num_decode: int) -> Scenario:
    """Return a scenario with these numbers of instances."""
    return sized(scenario, num_prefill + num_decode).changed(instances={"num_prefill": num_prefill})


def recommend_pools(
    scenario: Scenario, colocated: Sequence[str], disaggregated: Sequence[str], target: SizingTarget, *,
    rate: float | None, seeds: int, max_instances: int, runner: Runner, on_progress: Callable[[str], None],
) -> Iterator[PoolRecommendation]:  # fmt: skip
    """Find the smallest cluster for each policy, of co-located instances or of pools."""

    def measured(policy: str) -> Used:
        def used(num_prefill: int, num_decode: int) -> float:
            on_progress(
                f"{policy}: {num_prefill} prefill, {num_decode} decode" if num_prefill else f"{policy}: {num_decode}"
            )
            trials = [
                PoolTrial(
                    scenario=scenario, policy=policy, num_prefill=num_prefill, num_decode=num_decode, rate=rate,
                    seed=seed, target=target,
                )
                for seed in range(seeds)
            ]  # fmt: skip
            return max(value for _, value in runner(used_by_pools, trials))

        return used

    near = 1
    for policies, is_colocated in ((colocated, True), (disaggregated, False)):
        for policy in policies:
            search = PoolSearch(measured(policy), max_instances)
            best = search.smallest(near, colocated=is_colocated)
            near = near if best is None else best.num_prefill + best.num_decode
            tried = tuple(
                TriedPools(num_prefill=prefill, num_decode=decode, used=used)
                for (prefill, decode), used in sorted(search.known.items())
            )
            yield PoolRecommendation(policy=policy, colocated=is_colocated, best=best, tried=tried)
