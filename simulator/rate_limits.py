"""The rates between which a search for the largest rate makes sense.

Above the highest one, the requests of a run arrive within about one step, so that more requests/s change nothing. Below
the lowest one, hardly any request meets another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from predictor.tabulated_costs import step_seconds, tabulate
from simulator.conditions import Conditions
from simulator.fleet import InstanceSpec
from simulator.scenario import Scenario
from simulator.workload import Workload

LEAST_LOAD = 0.01  # share of the time in which one instance serves, at the lowest rate
LEAST_S = 1e-9  # of a step, for profiles whose steps take no time
LONG_S = 1e5  # trials that last longer have no samples of the cluster, which nothing in a search reads


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """The lowest and the highest rate of a search."""

    lowest: float = 0.0
    highest: float = math.inf


def rate_limits(scenario: Scenario, work: Workload) -> RateLimits:
    """Return the limits of a search with these requests, at whatever rate they arrive in `work`.

    With a schedule, a rate is a multiple of those in the schedule.
    """
    kinds = set(scenario.instance_specs())
    rates = [rate for _, rate in scenario.traffic.schedule if rate > 0] or [1.0]
    step_s = max(LEAST_S, min(_decode_step_s(spec, 1.0) for spec in kinds))
    alone_s = max(LEAST_S, *(_alone_s(spec, work) for spec in kinds))
    return RateLimits(lowest=LEAST_LOAD / alone_s / max(rates), highest=len(work) / step_s / min(rates))


def _alone_s(spec: InstanceSpec, work: Workload) -> float:
    """Return about how long the mean request takes on an idle instance."""
    prompt, output = (float(np.mean(tokens)) for tokens in (work.lengths.prompt_tokens, work.lengths.output_tokens))
    chunk = max(1, min(math.ceil(prompt), spec.config.max_num_batched_tokens))
    costs = tabulate(spec.step_time, spec.config.max_num_batched_tokens, spec.config.max_num_seqs)
    chunk_s = spec.pace * float(step_seconds(costs, chunk, 1, 0, 0.0, 1, float(chunk) ** 2, 0.0))
    return math.ceil(prompt / chunk) * chunk_s + output * _decode_step_s(spec, prompt + output / 2)


def _decode_step_s(spec: InstanceSpec, context: float) -> float:
    """Return the time of a step that decodes one request."""
    costs = tabulate(spec.step_time, spec.config.max_num_batched_tokens, spec.config.max_num_seqs)
    return spec.pace * float(step_seconds(costs, 1, 1, 1, context, 0, 0.0, 0.0, context))


def conditions_of_trial(conditions: Conditions, work: Workload) -> Conditions:
    """Return the conditions of one run of a search: without samples of the cluster if it is long."""
    is_long = work.arrival_s[-1] - work.arrival_s[0] > LONG_S
    return replace(conditions, sample_s=0.0) if is_long else conditions
