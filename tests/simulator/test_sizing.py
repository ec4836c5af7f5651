"""Sizing finds the smallest cluster and ranks the best policy first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from simulator.parallel import one_by_one
from simulator.scenario import scenario_from
from simulator.sizing import SizingRequest, Target, recommend
from tests.simulator.test_capacity import SMALL

TARGET = Target(ttft_s=1.0)


def fake_runner(needed: dict[str, int], seen: list[SizingRequest]) -> Any:
    """A runner for which clusters from a known size on meet the target."""

    def runner(
        _: Callable[[SizingRequest], float], requests: Sequence[SizingRequest], /
    ) -> Iterator[tuple[int, float]]:
        for index, request in enumerate(requests):
            seen.append(request)
            yield index, needed[request.policy] / request.num_instances * 0.99

    return runner


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 16, 29])
def test_finds_the_smallest_cluster(needed: int) -> None:
    """In any order of policies the size is exact, and one instance less is shown to be too few."""
    sizes = {"block": needed, "random": 20, "llumnix": 40}
    seen: list[SizingRequest] = []
    answers = recommend(
        scenario_from(SMALL), ["random", "block", "llumnix"], TARGET, rate=5.0, seeds=2, max_instances=30,
        runner=fake_runner(sizes, seen), on_progress=lambda _: None,
    )  # fmt: skip
    found = {answer.policy: answer.num_instances for answer in answers}
    assert found == {"block": needed, "random": 20, "llumnix": None}
    assert answers[-1].policy == "llumnix"
    for answer in answers:
        assert answer.num_instances is None or answer.used <= 1
        assert answer.used_with_one_less is None or answer.used_with_one_less > 0.98
    assert len(seen) < 80


def test_tunes_parameters_on_other_traffic() -> None:
    """The better parameter is found, on other seeds than those of the evaluation."""
    sizes = {f"linear: lambda = {value}": 5 + round(20 * abs(value - 0.6)) for value in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)}
    seen: list[SizingRequest] = []
    (answer,) = recommend(
        scenario_from(SMALL), ["linear"], TARGET, rate=5.0, seeds=2, max_instances=30,
        runner=fake_runner({**sizes, "linear": 9}, seen), on_progress=lambda _: None,
    )  # fmt: skip
    assert answer.policy == "linear: lambda = 0.6"
    assert answer.num_instances == 5
    tuning = [request for request in seen if request.seed >= 1000]
    assert {request.policy for request in tuning} == set(sizes)


def test_a_real_cluster_is_sized() -> None:
    """With real simulations, the size meets the target, and one instance less does not."""
    (answer,) = recommend(
        scenario_from(SMALL), ["jsq"], Target(ttft_s=0.5, tpot_s=0.2), rate=20.0, seeds=1, max_instances=16, runner=one_by_one,
        on_progress=lambda _: None,
    )  # fmt: skip
    assert answer.num_instances is not None
    assert answer.num_instances > 1
    assert answer.used <= 1 < answer.used_with_one_less


def test_targets_need_a_limit() -> None:
    """A target without a limit is refused."""
    with pytest.raises(ValueError, match="slo"):
        Target()
