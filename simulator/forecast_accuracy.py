"""The accuracy of forecasts under random placement: their errors, and the real rank of the forecast best (Block §6.2).

Requests are placed at random. For a sample of them, the forecasts of all instances are recorded. After the run, each
instance's requests are simulated again with the sampled request added, to see on which instance it would have finished
first. Random placement depends on nothing, so all other placements would have been the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.assembly import simulate, simulation
from simulator.conditions import Conditions
from simulator.metrics import latencies
from simulator.result import RunResult
from simulator.scenario import Scenario
from simulator.workload import RequestLengths, Workload

POLICY = "random"
FORECASTING_POLICY = "random: hold = 'predicted_e2e_s > 0'"  # always holds, so all instances forecast
SAMPLE_SHARE = 0.01
HORIZON_S = 150.0  # requests that arrive further apart do not affect each other


def forecast_accuracy(scenario: Scenario, rate: float, seed: int, share: float = SAMPLE_SHARE) -> dict[str, Any]:
    """Simulate, and compare the forecasts with the outcomes of their requests."""
    changed = scenario.changed(conditions={"sample_s": 0.0})
    specs, work = changed.instance_specs(), changed.workload(rate, seed)
    chosen = np.flatnonzero(np.random.default_rng([seed, 17]).random(len(work)) < share)
    running = simulation(specs, work, FORECASTING_POLICY, changed.conditions, seed=seed)
    forecasts: dict[int, npt.NDArray[np.float64]] = {}
    running.decided = _recorder(forecasts, set(chosen.tolist()))
    result = running.run()
    took = latencies(result)
    errors = np.abs(result.decisions.predicted_e2e_s / took.e2e_s - 1)
    ranks = [_rank(result, number, e2e_s) for number, e2e_s in forecasts.items()]
    known = np.array([rank for rank in ranks if rank is not None])
    return {
        "e2e_error_mean": float(np.nanmean(errors)),
        "e2e_error_p50": float(np.nanmedian(errors)),
        "best_share": float(np.mean(known == 0)) if len(known) else None,
        "first_three_share": float(np.mean(known < 3)) if len(known) else None,
        "rank_mean": float(np.mean(known) + 1) if len(known) else None,
    }


def _recorder(
    forecasts: dict[int, npt.NDArray[np.float64]], sample: set[int]
) -> Callable[[int, int, float, npt.NDArray[np.float64]], None]:
    def decided(number: int, _index: int, _now_s: float, e2e_s: npt.NDArray[np.float64]) -> None:
        if number in sample:
            forecasts[number] = e2e_s.copy()

    return decided


def _rank(result: RunResult, number: int, predicted_s: npt.NDArray[np.float64]) -> int | None:
    """Return the rank, by real e2e, of the instance with the best forecast; 0 is the best."""
    real = np.array([_e2e_on(result, number, index) for index in range(len(result.specs))])
    if np.isnan(real).any():
        return None
    return int((real < real[int(predicted_s.argmin())]).sum())


def _e2e_on(result: RunResult, number: int, index: int) -> float:
    """Return a request's e2e on an instance that serves all its other requests as before."""
    work = result.work
    mine = np.flatnonzero((result.decisions.instance == index) | (np.arange(len(work)) == number))
    # requests that arrived long before or after do not affect it
    mine = mine[np.abs(work.arrival_s[mine] - work.arrival_s[number]) < HORIZON_S]
    part = Workload(
        lengths=RequestLengths(
            prompt_tokens=work.lengths.prompt_tokens[mine], output_tokens=work.lengths.output_tokens[mine]
        ),
        arrival_s=work.arrival_s[mine],
        tag_median=work.tag_median[mine],
        tag_spread=work.tag_spread[mine],
        service=None if work.service is None else work.service.chosen(mine),
    )
    alone = simulate([result.specs[index]], part, POLICY, Conditions(sample_s=0.0))
    position = int(np.searchsorted(mine, number))
    return float(latencies(alone).e2e_s[position])
