"""The arrays of a simulated cluster, which its compiled code works on: engines, instances, requests and their slots.

The engines are the layers of one stacked state; within a layer the engine model's own kernels run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from predictor.compiled import small_kernel
from predictor.state import State
from predictor.state_copies import layer_with
from predictor.tabulated_costs import Costs

CANDIDATE = 0  # the slot that is reserved for the request of a forecast

REQUEST = np.dtype(
    [
        ("prompt_tokens", "i8"),
        ("output_tokens", "i8"),  # the true response length
        ("max_tokens", "i8"),
        ("priority", "i8"),
        ("first_content", "i8"),
        ("num_contents", "i8"),
        ("arrival_s", "f8"),
        ("log_median", "f8"),  # of the tag; NaN if the true length is known
        ("spread", "f8"),
        ("ttft_slo_s", "f8"),  # NaN: no target
        ("tpot_slo_s", "f8"),
        ("weight", "f8"),
        ("request_class", "i8"),
        ("adapter", "i8"),  # `predictor.request.adapter_number`; 0: none
    ],
    align=True,
)

OUTCOME = np.dtype(
    [
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("finished_s", "f8"),
        ("num_preemptions", "i8"),
        ("hit_tokens", "i8"),
        ("produced_tokens", "i8"),
        ("tokens_on_time", "i8"),  # NONE where no token has a deadline
    ],
    align=True,
)

# The two legs of a request, where it has two.
LEGS_OF_REQUEST = np.dtype(
    [
        ("prefill", "i8"),  # instances and slots; NONE
        ("prefill_slot", "i8"),
        ("decode", "i8"),
        ("decode_slot", "i8"),
        ("scheduled_s", "f8"),  # of the prefill leg
        ("prefilled_s", "f8"),  # when it ended
        ("fetched_s", "f8"),
        ("hit_tokens", "i8"),  # of the prefill leg
    ],
    align=True,
)

SLOT = np.dtype(
    [
        ("number", "i8"),
        ("visible_s", "f8"),
        ("log_median", "f8"),
        ("spread", "f8"),
        ("is_awaited", "i8"),  # a decode leg that has not arrived
        ("due_s", "f8"),  # when it is predicted to arrive; of a prefill leg, for how long its blocks will be held
    ],
    align=True,
)

INSTANCE = np.dtype(
    [
        ("up", "i8"),
        ("changed", "i8"),  # since its indicators were last written
        ("num_free_slots", "i8"),
        ("num_finished", "i8"),
        ("pace", "f8"),  # real over profiled step time, without noise
        ("predicted_pace", "f8"),
        ("hit_share", "f8"),  # share of prompt tokens found cached, averaged over the last finished requests
        ("first_noise", "i8"),
        ("deterministic", "i8"),  # its forecasts are exact until another request joins
        ("role", "i8"),  # index in `scheduler.instances.ROLES`
        ("num_underway", "i8"),
        ("lease_s", "f8"),  # for how long the blocks of a prefill leg are held if nothing else is known
        ("has_lookahead", "i8"),  # the workspace holds a state of it that runs ahead: see forecast_kernels.py
    ],
    align=True,
)


class EngineArrays(NamedTuple):
    """The engines of a cluster, one per index of each array's first axis."""

    stack: State
    predicted_costs: Costs  # step times that forecasts use
    instances: np.recarray[Any, Any]
    slots: np.recarray[Any, Any]
    free_slots: np.ndarray
    underway: np.ndarray  # slots of legs that concern another engine, in any order: see coupled.py
    noise: np.ndarray  # factors of successive step times; a single 1 without noise
    residual: np.ndarray  # the table of `predicted_tokens`; empty for the rule `plus_ten`


class Requests(NamedTuple):
    """All requests of a run and their outcomes, indexed by number; `contents` joins the blocks of all prompts."""

    facts: np.recarray[Any, Any]
    contents: np.ndarray
    outcomes: np.recarray[Any, Any]
    legs: np.recarray[Any, Any]


@small_kernel
def engine_at(stack: State, costs: Costs, index: int) -> State:
    """Return one engine of the stack, with its real or its predicted step times."""
    return layer_with(
        stack, index, stack.facts[index], stack.hashes[index], stack.expected_accepted[index],
        Costs(costs.coefficients[index], costs.by_tokens[index], costs.by_count[index]),
    )  # fmt: skip
