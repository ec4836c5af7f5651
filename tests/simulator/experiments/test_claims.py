"""Claims of a paper are evaluated on measurements; curves turn where they cross a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from simulator.experiments.claims import ClaimResult, Turn, claim_from, evaluate, turn_from, turning_points

METRICS, VARIANTS = ("ttft_p99_s", "hit_ratio"), ("block", "llumnix", "jsq")
MEASURED = {
    ("a", "block", 1.0): [1.0, 1.5],
    ("a", "llumnix", 1.0): [2.0, 2.0],
    ("a", "block", 2.0): [2.0, 1.0],
    ("a", "llumnix", 2.0): [1.0, 1.0],
    ("a", "block", 4.0): [8.0, 2.0],
}


def read(setting: str, variant: str, rate: float) -> Sequence[float]:
    """Read a small table of two seeds."""
    return MEASURED.get((setting, variant, rate), [])


def test_differences_are_taken_seed_by_seed() -> None:
    """The result is the mean over seeds, with an interval; rates that were not measured are left out."""
    claim = claim_from(
        {"metric": "ttft_p99_s", "of": "block", "over": "llumnix", "at": [1, 3]}, METRICS, VARIANTS
    )  # fmt: skip
    (one,) = evaluate(claim, ["a", "b"], read)
    assert (one.setting, one.rate, one.value) == ("a", 1.0, -0.375)
    assert one.half == pytest.approx(12.706 * 0.125, rel=1e-3)


def test_the_best_is_named() -> None:
    """The variant with the lowest or highest mean is named at each rate."""
    table = {"metric": "ttft_p99_s", "at": [1, 2]}
    lowest = claim_from(table | {"lowest": ["block", "llumnix", "jsq"]}, METRICS, VARIANTS)
    assert [one.name for one in evaluate(lowest, ["a"], read)] == ["block", "llumnix"]
    highest = claim_from(table | {"highest": ["block", "llumnix"]}, METRICS, VARIANTS)
    assert [one.name for one in evaluate(highest, ["a"], read)] == ["llumnix", "block"]


def test_values_of_one_seed_have_no_interval() -> None:
    """The difference between seeds is not known."""
    claim = claim_from({"metric": "hit_ratio", "of": "jsq", "at": 5}, METRICS, VARIANTS)
    assert evaluate(claim, ["a"], lambda *_: [0.25]) == [ClaimResult(setting="a", rate=5.0, value=0.25, half=None)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"metric": "speed"}, "metric"),
        ({"of": "blok"}, "blok"),
        ({"of": ""}, "no variant"),
        ({"at": []}, "no rate"),
        ({"among": ["jsq"]}, "among"),
    ],
)
def test_bad_claims_are_refused(change: dict[str, object], complaint: str) -> None:
    """The error names the bad part."""
    with pytest.raises(ValueError, match=complaint):
        claim_from({"metric": "hit_ratio", "of": "jsq", "at": 5} | change, METRICS, VARIANTS)


def test_curves_turn_where_they_cross_the_limit() -> None:
    """Values are interpolated logarithmically, seed by seed; a curve that stays below the limit never turns."""
    turn = turn_from({"metric": "ttft_p99_s", "limit": 4.0}, METRICS)
    first, second = turning_points(turn, "a", "block", [1.0, 2.0, 4.0], read)
    assert first == pytest.approx(3.0)  # halfway between 2 and 8 on a logarithmic scale
    assert second == math.inf
    assert turning_points(Turn(metric="ttft_p99_s", limit=0.5), "a", "block", [1.0, 2.0], read) == [1.0, 1.0]
    with pytest.raises(ValueError, match="turn"):
        turn_from({"metric": "ttft_p99_s"}, METRICS)
