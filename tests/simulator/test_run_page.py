"""Pages about served requests."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from simulator.experiments.charts import lane_chart, scatter_chart
from simulator.run_page import MAX_LANES, MAX_STEPS, ServedRun, run_page, under_way


def served(num: int, *, name: str = "block", instances: int = 3) -> ServedRun:
    """Make a run of requests, one per second, each of which waits half a second and takes four."""
    arrival_s = np.arange(num, dtype=np.float64)
    times = {"ttft_s": 0.6, "tpot_s": 0.02, "e2e_s": 4.0, "predicted_ttft_s": 0.5, "predicted_e2e_s": 5.0}
    return ServedRun(
        name=name,
        instance=np.array([f"engine-{number % instances:02}" for number in range(num)]),
        arrival_s=arrival_s,
        scheduled_s=arrival_s + 0.5,
        finished_s=arrival_s + 4.0,
        **{field: np.full(num, value) for field, value in times.items()},
    )


def test_page_is_self_contained_and_escapes_names() -> None:
    """No file or address is loaded, and a policy's name cannot add HTML."""
    page = run_page("a <script> title", [served(50), replace(served(50), name="<img src=x>", notes=("note <b>",))])
    assert not re.search(r"(src|href)\s*=|url\(|@import", page.replace("&lt;img src=x&gt;", ""))
    assert "<script" not in page
    assert "<img" not in page
    assert "note &lt;b&gt;" in page
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(chart)  # noqa: S314 - our own


def test_errors_are_those_of_the_columns() -> None:
    """A forecast of 5 s for 4 s is an error and a bias of 25 %."""
    page = run_page("title", [served(50)])
    assert "<td>block</td><td>e2e</td><td>50</td><td>25.0 %</td><td>25.0 %</td><td>25.0 %</td>" in page


def test_page_without_forecasts_or_starts() -> None:
    """What is not known is left out."""
    unknown = np.full(20, np.nan)
    run = replace(served(20), scheduled_s=unknown, predicted_ttft_s=unknown, predicted_e2e_s=unknown)
    page = run_page("title", [run])
    assert "Predicted and actual" not in page
    assert "under way" in page
    assert "waiting" not in page


def test_many_instances_are_cut_with_a_note() -> None:
    """A page with more instances than lanes says so."""
    page = run_page("title", [served(300, instances=MAX_LANES + 9)])
    assert f"the first {MAX_LANES} of {MAX_LANES + 9} instances" in page


def test_open_spans() -> None:
    """The number of open spans, at each change."""
    steps = under_way(np.array([0.0, 1.0, 2.0]), np.array([3.0, 1.5, 4.0]))
    assert steps == [(0.0, 1), (1.0, 2), (1.5, 1), (2.0, 2), (3.0, 1), (4.0, 0)]


def test_long_lists_keep_their_highest_values() -> None:
    """Thinning never hides a peak."""
    start_s = np.arange(5000, dtype=np.float64)
    steps = under_way(np.append(start_s, 2500.1), np.append(start_s + 0.5, 2500.2))
    assert len(steps) <= MAX_STEPS
    assert max(value for _, value in steps) == 2


@pytest.mark.parametrize("chart", [scatter_chart("t", "x", "y", {}), lane_chart("t", "x", {})])
def test_no_chart_without_data(chart: str) -> None:
    """Nothing is drawn of nothing."""
    assert chart == ""
