"""Comparison of provisioning rules: the paper's two with each other, and headroom with both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulator.experiments.autoscaling_shapes import COLD, COLD_SHAPES, FIGURE, PAPER_RULES, SHAPES

HEADROOM = "headroom"
COMPARED = ("p99_e2e_s", "instance_s")
GRID_S = 5.0  # of the charts

Results = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def dominates(results: Results, shape: str) -> bool:
    """Whether headroom needs no more instance-seconds than either rule of the paper, at no higher P99."""
    return all(
        np.mean(_values(results, shape, HEADROOM, number)) <= np.mean(_values(results, shape, rule, number))
        for rule in PAPER_RULES
        for number in COMPARED
    )


def seeds_dominated(results: Results, shape: str) -> tuple[int, int]:
    """Return the number of seeds for which headroom dominates, and the number of all seeds."""
    of = len(results[shape, HEADROOM])
    each = [{case: [by_seed[seed]] for case, by_seed in results.items() if case[0] == shape} for seed in range(of)]
    return sum(dominates(one, shape) for one in each), of


def ratios(results: Results) -> dict[str, list[float]]:
    """Return the ratios between rules by name, one per seed; none if a divisor is 0."""
    compared: dict[str, list[float]] = {}
    for number in (*COMPARED, "over_threshold_requests"):
        _divide(compared, results, f"{number}.preempt_over_relief", (FIGURE, "preempt", "relief", number))
    for shape in (*SHAPES, *COLD_SHAPES):
        for rule in PAPER_RULES:
            for number in COMPARED:
                _divide(compared, results, f"{number}.headroom_over_{rule}.{shape}", (shape, HEADROOM, rule, number))
    return compared


def dominated_shapes(results: Results) -> dict[str, tuple[list[str], list[str]]]:
    """Return the shapes that headroom dominates and all that were run, for usual and for long cold starts."""
    groups = {}
    for suffix, names in (("", SHAPES), (COLD, COLD_SHAPES)):
        run = [name for name in names if all((name, rule) in results for rule in (HEADROOM, *PAPER_RULES))]
        if run:
            groups[suffix] = ([name for name in run if dominates(results, name)], run)
    return groups


def sizes_over_time(timelines: Sequence[Sequence[Sequence[float]]], until_s: float) -> list[tuple[float, float, float]]:
    """Return the mean number of instances over time."""
    points = np.arange(0.0, until_s + GRID_S, GRID_S)
    known = []
    for line in timelines:
        since_s, num = np.array(line, float).T
        known.append(num[np.searchsorted(since_s, points, side="right") - 1])
    return [(float(at_s), float(num), 0.0) for at_s, num in zip(points, np.mean(known, axis=0), strict=True)]


def _values(results: Results, shape: str, rule: str, number: str) -> list[float]:
    return [float(one[number]) for one in results[shape, rule]]


def _divide(compared: dict[str, list[float]], results: Results, name: str, what: tuple[str, str, str, str]) -> None:
    shape, rule, other, number = what
    if (shape, rule) not in results or (shape, other) not in results:
        return
    below = _values(results, shape, other, number)
    if all(below):
        above = _values(results, shape, rule, number)
        compared[name] = [one / two for one, two in zip(above, below, strict=True)]
