"""The result of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.fleet import InstanceSpec
from simulator.workload import Workload

# The final status of a request.
FINISHED, REFUSED, LOST, UNFINISHED, SHED = "finished", "refused", "lost", "unfinished", "shed"
STATUSES = (UNFINISHED, FINISHED, REFUSED, LOST, SHED)

DECISION = np.dtype(
    [
        ("instance", "i4"),
        ("scheduler", "i4"),
        ("status", "i4"),
        ("num_sends", "i4"),
        ("prefill_instance", "i4"),  # of the prefill leg; NONE where the request was served whole
        ("admitted_in_time", "i4"),  # 1: placed where all its deadlines are kept by forecast, and those of others
        ("demoted", "i4"),  # 1: served as best effort, as no instance could keep its deadlines
        ("predicted_ttft_s", "f8"),
        ("predicted_e2e_s", "f8"),
        ("decided_s", "f8"),  # when the request was placed last, or shed; NaN where neither
        ("retry_after_s", "f8"),  # of a shed request; NaN where none
    ],
    align=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSample:
    """All instances at one moment, one value per instance."""

    time_s: float
    free_blocks: npt.NDArray[np.float64]
    num_running: npt.NDArray[np.float64]
    num_waiting: npt.NDArray[np.float64]
    num_preemptions: float
    num_fetching: npt.NDArray[np.float64]
    held_blocks: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The outcome of every request, in the order of arrival; times are on the simulation's clock."""

    work: Workload
    specs: tuple[InstanceSpec, ...]
    policy: str
    outcomes: np.recarray[Any, Any]  # fleet_arrays.OUTCOME
    decisions: np.recarray[Any, Any]  # DECISION
    legs: np.recarray[Any, Any]  # fleet_arrays.LEGS_OF_REQUEST
    samples: list[ClusterSample]
    end_s: float
    up_s: float  # total seconds that instances were up
