"""The smallest cluster is found, and the better policy ranked first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from simulator.parallel import one_by_one
from simulator.scenario import scenario_from
from simulator.sizing import SizingRequest, Target, recommend
from tests.simulator.test_capacity import SMALL

TARGET = Target(ttft_s=1.0)


def pretending(needed: dict[str, int], asked: list[SizingRequest]) -> Any:
    """A runner for which a cluster holds from a known size on."""

    def runner(
        _: Callable[[SizingRequest], float], questions: Sequence[SizingRequest], /
    ) -> Iterator[tuple[int, float]]:
        for place, question in enumerate(questions):
            asked.append(question)
            yield place, needed[question.policy] / question.num_instances * 0.99

    return runner


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 16, 29])
def test_finds_the_smallest_cluster(needed: int) -> None:
    """Whatever comes first, the size is exact, and one less is shown to be too few."""
    sizes = {"block": needed, "random": 20, "llumnix": 40}
    asked: list[SizingRequest] = []
    answers = recommend(
        scenario_from(SMALL), ["random", "block", "llumnix"], TARGET, rate=5.0, seeds=2, most=30,
        runner=pretending(sizes, asked), told=lambda _: None,
    )  # fmt: skip
    found = {answer.policy: answer.num_instances for answer in answers}
    assert found == {"block": needed, "random": 20, "llumnix": None}
    assert answers[-1].policy == "llumnix"
    for answer in answers:
        assert answer.num_instances is None or answer.used <= 1
        assert answer.used_with_one_less is None or answer.used_with_one_less > 0.98
    assert len(asked) < 80


def test_tunes_parameters_on_other_traffic() -> None:
    """The better parameter is found, on seeds that are not those of the evidence."""
    sizes = {f"linear: lambda = {value}": 5 + round(20 * abs(value - 0.6)) for value in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)}
    asked: list[SizingRequest] = []
    (answer,) = recommend(
        scenario_from(SMALL), ["linear"], TARGET, rate=5.0, seeds=2, most=30,
        runner=pretending({**sizes, "linear": 9}, asked), told=lambda _: None,
    )  # fmt: skip
    assert answer.policy == "linear: lambda = 0.6"
    assert answer.num_instances == 5
    tuning = [question for question in asked if question.seed >= 1000]
    assert {question.policy for question in tuning} == set(sizes)


def test_a_real_cluster_is_sized() -> None:
    """With real simulations the size found holds, and one less does not."""
    (answer,) = recommend(
        scenario_from(SMALL), ["jsq"], Target(ttft_s=0.5, tpot_s=0.2), rate=20.0, seeds=1, most=16, runner=one_by_one,
        told=lambda _: None,
    )  # fmt: skip
    assert answer.num_instances is not None
    assert answer.num_instances > 1
    assert answer.used <= 1 < answer.used_with_one_less


def test_targets_must_ask_for_something() -> None:
    """A target without a limit is refused."""
    with pytest.raises(ValueError, match="slo"):
        Target()
