"""Requests that wait get their turn so that few are late, and come to an end all the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from services.simulator.assembly import simulate
from services.simulator.conditions import Conditions
from services.simulator.holding import fewest_late, first_come
from services.simulator.measures import latencies
from services.simulator.run import FATES
from services.simulator.workload import noisy, tagged
from tests.services.simulator.small_clusters import poisson, units

ADMIT = "predicted_queue_s < 0.2 and others_preempted + predicted_preemptions < 1"


def num_late(order: tuple[int, ...] | list[int], takes_s: list[float], due_s: list[float]) -> int:
    """Count who ends after it was due when all go one after the other."""
    ends_s = np.cumsum([takes_s[number] for number in order])
    return sum(end_s > due_s[number] for number, end_s in zip(order, ends_s, strict=True))


def test_fewest_are_late() -> None:
    """No other order of a few requests has fewer late ones."""
    generator = np.random.default_rng(0)
    for _ in range(150):
        takes_s = generator.exponential(1.0, 6).tolist()
        due_s = np.sort(generator.uniform(0.0, 5.0, 6)).tolist()
        order = fewest_late(range(6), due_s.__getitem__, takes_s.__getitem__, 0.0)
        assert sorted(order) == list(range(6))
        least = min(num_late(other, takes_s, due_s) for other in permutations(range(6)))
        assert num_late(order, takes_s, due_s) == least


def test_the_late_come_last() -> None:
    """Who is late already waits for those who are not yet."""
    due_s = [1.0, 2.0, 3.0, 4.0]
    assert first_come([3, 1, 0, 2], due_s.__getitem__, 2.5) == [2, 3, 0, 1]
    assert fewest_late([3, 1, 0, 2], due_s.__getitem__, lambda _: 0.1, 2.5) == [2, 3, 0, 1]


@pytest.mark.parametrize("turn", ["first_come", "fewest_late"])
@pytest.mark.parametrize("num_schedulers", [1, 3])
def test_held_requests_are_conserved(turn: str, num_schedulers: int) -> None:
    """Every request that was held back is served in the end."""
    work = tagged(poisson(300, 25.0), noisy(0.4), np.random.default_rng(3))
    conditions = Conditions(admit=ADMIT, late_s=1.0, turn=turn, num_schedulers=num_schedulers)
    result = simulate(units(), work, "block", conditions, seed=2)
    assert (result.decisions.fate == FATES.index("finished")).all()
    assert (result.outcomes.produced_tokens == work.lengths.output_tokens).all()


def test_holding_back_avoids_preemptions() -> None:
    """With true lengths nobody is preempted where nobody is admitted who would cause it."""
    made, work = units(num_gpu_blocks=60), poisson(300, 25.0)
    plain, held = (simulate(made, work, "block", conditions) for conditions in (Conditions(), Conditions(admit=ADMIT)))
    assert plain.outcomes.num_preemptions.sum() > 20
    assert held.outcomes.num_preemptions.sum() == 0


def test_fewer_are_late_by_turns() -> None:
    """In an overload the order matters most."""
    work = poisson(400, 22.0)
    first, fewest = (
        latencies(simulate(units(), work, "block", Conditions(admit=ADMIT, late_s=1.0, turn=turn))).ttft_s
        for turn in ("first_come", "fewest_late")
    )
    plain = latencies(simulate(units(), work, "block")).ttft_s
    assert (fewest > 1.0).sum() < (first > 1.0).sum() < (plain > 1.0).sum()


def test_what_is_admitted_can_be_said_with_indicators() -> None:
    """A formula over indicators alone holds requests back from a full batch, and needs no forecast."""
    work = poisson(200, 25.0)
    result = simulate(units(), work, "jsq", Conditions(admit="batch_size < 8"))
    waited_s = result.outcomes.scheduled_s - work.arrival_s
    assert (result.decisions.fate == FATES.index("finished")).all()
    assert np.isnan(result.decisions.predicted_e2e_s).all()
    assert waited_s.max() > 0.5


@pytest.mark.parametrize(
    ("bad", "name"), [({"turn": "last"}, "turn"), ({"late_s": 0.0}, "late_s"), ({"retry_s": 0.0}, "retry_s")]
)
def test_bad_conditions_are_refused(bad: dict[str, object], name: str) -> None:
    """Each by its name."""
    with pytest.raises(ValueError, match=name):
        replace(Conditions(), **bad)
    with pytest.raises(ValueError, match="admit"):
        simulate(units(1), poisson(3, 1.0), "jsq", Conditions(admit="batch_size"))
