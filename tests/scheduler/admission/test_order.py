"""Orders of the admission queue, against all other orders of a few requests."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from scheduler.admission.order import fewest_late, late_last


def num_late(order: tuple[int, ...] | list[int], takes_s: list[float], due_s: list[float]) -> int:
    """Count the requests that end after they were due when all run one after the other."""
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


def test_late_requests_come_last() -> None:
    """A request that is late already waits for those that are not yet."""
    due_s = [1.0, 2.0, 3.0, 4.0]
    assert late_last([3, 1, 0, 2], due_s.__getitem__, 2.5) == [2, 3, 0, 1]
    assert fewest_late([3, 1, 0, 2], due_s.__getitem__, lambda _: 0.1, 2.5) == [2, 3, 0, 1]
