"""How good forecasts are where nobody heeds them: their errors, and whether the best instance is known (Block §6.2).

Requests are placed at random. Of a sample of them, the forecasts of all instances are kept; afterwards each instance's
share of the traffic is served once more with the request in it, to see where it would really have ended first. As
random placement looks at nothing, nothing else would have been different.
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
FORETELLING = "random: hold = 'predicted_e2e_s > 0'"  # always true, and has every instance foretell every request
SAMPLED = 0.01


def ranked(scenario: Scenario, rate: float, seed: int, share: float = SAMPLED) -> dict[str, Any]:
    """Run, and compare forecasts with what became of their requests."""
    changed = scenario.changed(conditions={"sample_s": 0.0})
    units, work = changed.units(), changed.workload(rate, seed)
    chosen = np.flatnonzero(np.random.default_rng([seed, 17]).random(len(work)) < share)
    running = simulation(units, work, FORETELLING, changed.conditions, seed=seed)
    foretold: dict[int, npt.NDArray[np.float64]] = {}
    running.decided = _keep(foretold, set(chosen.tolist()))
    result = running.run()
    took = latencies(result)
    errors = np.abs(result.decisions.predicted_e2e_s / took.e2e_s - 1)
    ranks = [_rank(result, number, e2e_s) for number, e2e_s in foretold.items()]
    there = np.array([rank for rank in ranks if rank is not None])
    return {
        "e2e_error_mean": float(np.nanmean(errors)),
        "e2e_error_p50": float(np.nanmedian(errors)),
        "best_share": float(np.mean(there == 0)) if len(there) else None,
        "first_three_share": float(np.mean(there < 3)) if len(there) else None,
        "rank_mean": float(np.mean(there) + 1) if len(there) else None,
    }


def _keep(
    foretold: dict[int, npt.NDArray[np.float64]], sample: set[int]
) -> Callable[[int, int, float, npt.NDArray[np.float64]], None]:
    def decided(number: int, _index: int, _now_s: float, e2e_s: npt.NDArray[np.float64]) -> None:
        if number in sample:
            foretold[number] = e2e_s.copy()

    return decided


def _rank(result: RunResult, number: int, foretold_s: npt.NDArray[np.float64]) -> int | None:
    """Rank by its real e2e the instance that was foretold to be the best, 0 for the best of all."""
    real = np.array([_would_take_s(result, number, index) for index in range(len(result.units))])
    if np.isnan(real).any():
        return None
    return int((real < real[int(foretold_s.argmin())]).sum())


def _would_take_s(result: RunResult, number: int, index: int) -> float:
    """What the request's e2e is on an instance that has all else that it had."""
    work = result.work
    mine = np.flatnonzero((result.decisions.instance == index) | (np.arange(len(work)) == number))
    # what came long after it cannot matter to it, and neither does what had ended long before
    mine = mine[np.abs(work.arrival_s[mine] - work.arrival_s[number]) < HORIZON_S]
    part = Workload(
        lengths=RequestLengths(
            prompt_tokens=work.lengths.prompt_tokens[mine], output_tokens=work.lengths.output_tokens[mine]
        ),
        arrival_s=work.arrival_s[mine],
        tag_median=work.tag_median[mine],
        tag_spread=work.tag_spread[mine],
    )
    alone = simulate([result.units[index]], part, POLICY, Conditions(sample_s=0.0))
    place = int(np.searchsorted(mine, number))
    return float(latencies(alone).e2e_s[place])


HORIZON_S = 150.0
