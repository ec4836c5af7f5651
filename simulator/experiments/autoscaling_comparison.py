"""How provisioning rules compare: the paper's with each other, and headroom with both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulator.experiments.autoscaling_shapes import COLD, COLD_SHAPES, FIGURE, PAPERS, SHAPES

HEADROOM = "headroom"
AT_STAKE = ("p99_e2e_s", "instance_s")
GRID_S = 5.0  # of what is drawn

Found = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def dominates(found: Found, shape: str) -> bool:
    """Tell whether headroom took no more instance-seconds than either rule of the paper, at no worse a P99."""
    return all(
        np.mean(_values(found, shape, HEADROOM, number)) <= np.mean(_values(found, shape, rule, number))
        for rule in PAPERS
        for number in AT_STAKE
    )


def seeds_dominated(found: Found, shape: str) -> tuple[int, int]:
    """Count the seeds of which the same holds by itself, and all."""
    of = len(found[shape, HEADROOM])
    each = [{case: [results[seed]] for case, results in found.items() if case[0] == shape} for seed in range(of)]
    return sum(dominates(one, shape) for one in each), of


def ratios(found: Found) -> dict[str, list[float]]:
    """Divide seed by seed, by name; what is nothing somewhere has no ratio."""
    compared: dict[str, list[float]] = {}
    for number in (*AT_STAKE, "over_threshold_requests"):
        _divide(compared, found, f"{number}.preempt_over_relief", (FIGURE, "preempt", "relief", number))
    for shape in (*SHAPES, *COLD_SHAPES):
        for rule in PAPERS:
            for number in AT_STAKE:
                _divide(compared, found, f"{number}.headroom_over_{rule}.{shape}", (shape, HEADROOM, rule, number))
    return compared


def judged(found: Found) -> dict[str, tuple[list[str], list[str]]]:
    """Name the shapes that headroom dominates, and those that were run, for usual and for long cold starts."""
    groups = {}
    for suffix, names in (("", SHAPES), (COLD, COLD_SHAPES)):
        run = [name for name in names if all((name, rule) in found for rule in (HEADROOM, *PAPERS))]
        if run:
            groups[suffix] = ([name for name in run if dominates(found, name)], run)
    return groups


def sizes(timelines: Sequence[Sequence[Sequence[float]]], until_s: float) -> list[tuple[float, float, float]]:
    """Tell how many instances there were over time, on average."""
    points = np.arange(0.0, until_s + GRID_S, GRID_S)
    known = []
    for line in timelines:
        since_s, num = np.array(line, float).T
        known.append(num[np.searchsorted(since_s, points, side="right") - 1])
    return [(float(at_s), float(num), 0.0) for at_s, num in zip(points, np.mean(known, axis=0), strict=True)]


def _values(found: Found, shape: str, rule: str, number: str) -> list[float]:
    return [float(one[number]) for one in found[shape, rule]]


def _divide(compared: dict[str, list[float]], found: Found, name: str, what: tuple[str, str, str, str]) -> None:
    shape, rule, other, number = what
    if (shape, rule) not in found or (shape, other) not in found:
        return
    below = _values(found, shape, other, number)
    if all(below):
        above = _values(found, shape, rule, number)
        compared[name] = [one / two for one, two in zip(above, below, strict=True)]
