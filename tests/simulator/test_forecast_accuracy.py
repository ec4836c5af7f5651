"""Forecasts under random placement, compared with what would have happened on other instances."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.forecast_accuracy import forecast_accuracy
from simulator.scenario import scenario_from
from simulator.workload import RequestLengths, with_hotspot
from tests.simulator.test_capacity import SMALL


def test_exact_forecasts_often_find_the_best_instance() -> None:
    """With little later traffic, the best forecast is often right; a wrong predicted pace shows as an error."""
    scenario = scenario_from(SMALL).changed(instances={"count": 4})
    exact = forecast_accuracy(scenario, 1.0, 0, share=0.3)
    assert exact["best_share"] > 0.45  # a random choice is right in a quarter of the cases
    assert exact["e2e_error_p50"] < 0.1
    slow = forecast_accuracy(scenario.changed(instances={"foreseen_pace": 2.0}), 1.0, 0, share=0.3)
    assert slow["e2e_error_p50"] == pytest.approx(1.0, abs=0.2)


def test_more_traffic_makes_forecasts_worse() -> None:
    """Errors grow with the rate, because forecasts do not know later requests."""
    scenario = scenario_from(SMALL).changed(instances={"count": 4})
    errors = [forecast_accuracy(scenario, rate, 0, share=0.05)["e2e_error_mean"] for rate in (1.0, 20.0)]
    assert errors[0] < errors[1]


def test_hotspots_share_their_prompts() -> None:
    """Hot requests share new contents, and the others keep theirs."""
    lengths = RequestLengths(
        prompt_tokens=np.array([40, 40, 40]),
        output_tokens=np.array([5, 5, 5]),
        first_content=np.array([0, 2, 3, 5]),
        contents=np.array([0, 1, 2, 0, 3]),
        block_tokens=16,
    )
    hot = with_hotspot(lengths, np.array([False, True, True]), 48)
    assert hot.first_content.tolist() == [0, 2, 5, 8]
    assert hot.contents.tolist() == [0, 1, 4, 5, 6, 4, 5, 6]
    assert hot.prompt_tokens.tolist() == [40, 56, 56]
    with pytest.raises(ValueError, match="hot_tokens"):
        with_hotspot(lengths, np.array([True, True, True]), 15)
