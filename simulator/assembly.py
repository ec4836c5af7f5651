"""From instances, a workload, a policy and conditions to a simulation, and to its result."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.gain import default_levels
from predictor.state import NONE
from scheduler.admission.order import ARRIVAL_TURN
from scheduler.core import DecisionRules, SchedulerCore
from scheduler.indicators import roots_of
from scheduler.instance_table import InstanceTable
from scheduler.instances import InstanceDirectory
from scheduler.policy import policy_from
from scheduler.prefix import PromptPrefixes
from simulator.available_instances import AvailableInstances
from simulator.conditions import WHOLE_QUEUE_TURNS, Conditions, require_outages
from simulator.coupled_run import CoupledSimulation
from simulator.events import OUT, SAMPLE, TICK
from simulator.fleet import InstanceSpec, has_roles, instance_names, make_fleet, noise_factors, residual_table
from simulator.fleet_adapters import FleetAdapters
from simulator.fleet_arrays import LEGS_OF_REQUEST, OUTCOME, REQUEST, Requests
from simulator.queue_order import QueueOrder
from simulator.result import DECISION, RunResult
from simulator.run import Simulation
from simulator.scheduler_view import SchedulerView
from simulator.simulated_forecasts import SimulatedForecasts
from simulator.workload import LONGEST, RequestLengths, Workload


def simulate(
    specs: Sequence[InstanceSpec],
    work: Workload,
    policy: str | Mapping[str, Any],
    conditions: Conditions | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int], bool | None] | None = None,
) -> RunResult:
    """Serve a workload with a policy; the same arguments give the same result."""
    return simulation(specs, work, policy, conditions or Conditions(), seed=seed).run(progress)


def simulation(
    specs: Sequence[InstanceSpec],
    work: Workload,
    policy: str | Mapping[str, Any],
    conditions: Conditions,
    *,
    seed: int = 0,
    whole_forecasts: bool = True,
) -> Simulation:
    """Make a cluster ready to run; without whole forecasts, they only have the times that the policy reads."""
    if len(work) == 0:
        raise ValueError("requests: must not be empty")
    require_outages(conditions.outages, len(specs))
    draws = np.random.default_rng([seed, 1])
    block_size = _block_size(specs, work.lengths)
    lengths = _in_blocks(work.lengths, block_size)
    fleet = make_fleet(
        specs,
        num_contents=lengths.num_contents,
        noise=noise_factors(conditions.step_noise, draws),
        residual=residual_table(conditions.residual),
        knows_lengths=bool(np.isnan(work.tag_median).all()),
        generator=draws,
    )
    queue_order = QueueOrder(work, specs, conditions, conditions.num_schedulers)
    schedulers = _schedulers(specs, policy, conditions, queue_order, draws, seed)
    made = schedulers[0].policy
    roots = {root.name for part in made.parts for root in roots_of(part.needs)}
    decisions = np.zeros(len(work), DECISION).view(np.recarray)
    decisions.instance = decisions.prefill_instance = NONE
    decisions.predicted_ttft_s = decisions.predicted_e2e_s = np.nan
    decisions.decided_s = decisions.retry_after_s = np.nan
    simulation = (CoupledSimulation if has_roles(specs) else Simulation)(
        specs=tuple(specs),
        work=work,
        schedulers=schedulers,
        conditions=conditions,
        fleet=fleet,
        requests=_requests(work, lengths, conditions.order_s_per_token),
        scheduler_of=_schedulers_of(work, conditions.num_schedulers, draws),
        queue_order=queue_order,
        forecasts=SimulatedForecasts(
            made,
            len(specs),
            deadline_margin_s=conditions.deadline_margin_s,
            network_s=conditions.network_s,
            whole=whole_forecasts,
        ),
        available=AvailableInstances(len(specs), _possible(specs, lengths)),
        reported=np.zeros_like(schedulers[0].table.known.reported),
        decisions=decisions,
        minute=[deque() for _ in specs],
        watches_minute="requests_per_minute" in roots,
        watches_drain="drained_s" in roots,
    )
    _begin(simulation)
    return simulation


def _schedulers(
    specs: Sequence[InstanceSpec],
    policy: str | Mapping[str, Any],
    conditions: Conditions,
    queue_order: QueueOrder,
    draws: np.random.Generator,
    seed: int,
) -> list[SchedulerView]:
    ids = instance_names(len(specs))
    sizes = {name: spec.config.num_gpu_blocks for name, spec in zip(ids, specs, strict=True)}
    roles = {name: spec.role for name, spec in zip(ids, specs, strict=True)}
    pauses = np.random.default_rng([seed, 2])
    schedulers = []
    for _ in range(conditions.num_schedulers):
        made = policy_from(policy, seed=int(draws.integers(1 << 62)))
        table = InstanceTable(ids)
        core = SchedulerCore(
            made,
            InstanceDirectory(table, roles),
            random=pauses.random,
            rules=_rules(conditions),
            order=queue_order.order if conditions.admission_turn in WHOLE_QUEUE_TURNS else None,
            prefixes=PromptPrefixes(table, sizes),
        )
        schedulers.append(SchedulerView(core=core))
    return schedulers


def _begin(simulation: Simulation) -> None:
    """Give schedulers the first indicators, and schedule reports, outages and samples."""
    conditions, work = simulation.conditions, simulation.work
    if work.adapter is not None:
        for scheduler in simulation.schedulers:
            scheduler.table.known.adapters = FleetAdapters(lambda: simulation.fleet)
    simulation.refresh(0.0)
    for which, scheduler in enumerate(simulation.schedulers):
        known = scheduler.table.known
        if conditions.has_fresh_indicators:
            known.reported = simulation.reported
        else:
            simulation.events.schedule(conditions.indicator_period_s * which / conditions.num_schedulers, TICK, which)
            known.reported[:] = simulation.reported
            known.reported_s[:] = 0.0
    for outage in conditions.outages:
        simulation.events.schedule(outage.from_s, OUT, outage)
    if conditions.sample_s > 0:
        simulation.events.schedule(float(work.arrival_s[0]), SAMPLE)


def _rules(conditions: Conditions) -> DecisionRules:
    sorts_all = conditions.admission_turn in WHOLE_QUEUE_TURNS
    return DecisionRules(
        max_held=_limit(conditions.max_held),
        max_held_tokens=math.inf if conditions.max_held_tokens is None else conditions.max_held_tokens,
        max_held_of_tenant=_limit(conditions.max_held_of_tenant),
        max_held_best_effort=_limit(conditions.max_held_best_effort),
        max_held_real_time=_limit(conditions.max_held_real_time),
        admission_turn=ARRIVAL_TURN if sorts_all else conditions.admission_turn,
        tenant_weights=dict(conditions.tenant_weights),
        best_effort_share=conditions.best_effort_share,
        explains=False,
        hand_over_s=conditions.hop_s,
    )


def _limit(number: int | None) -> int:
    return sys.maxsize if number is None else number


def _schedulers_of(work: Workload, num_schedulers: int, draws: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw the scheduler of each request; as gateways do, all requests of a session go to the same one."""
    if num_schedulers == 1:
        return np.zeros(len(work), np.int64)
    drawn = draws.integers(0, num_schedulers, len(work))
    if work.session is None:
        return drawn
    of_session = draws.integers(0, num_schedulers, int(work.session.max()) + 1)
    return np.where(work.session >= 0, of_session[work.session], drawn)


def _block_size(specs: Sequence[InstanceSpec], lengths: RequestLengths) -> int:
    if lengths.num_contents == 0:
        return lengths.block_tokens
    sizes = {spec.config.block_size for spec in specs}
    if len(sizes) > 1:
        raise ValueError(f"block_size: must be the same everywhere where prompts' contents are known, not {sizes}")
    (size,) = sizes
    if lengths.block_tokens % size:
        raise ValueError(f"block_size: {size} does not divide the {lengths.block_tokens} tokens of the trace's blocks")
    return size


def _in_blocks(lengths: RequestLengths, block_size: int) -> RequestLengths:
    """Name contents of blocks as small as the engines'."""
    ratio = lengths.block_tokens // block_size
    if lengths.num_contents == 0 or ratio == 1:
        return lengths
    contents = (lengths.contents[:, None] * ratio + np.arange(ratio)).ravel()
    return RequestLengths(
        prompt_tokens=lengths.prompt_tokens,
        output_tokens=lengths.output_tokens,
        first_content=lengths.first_content * ratio,
        contents=contents,
        block_tokens=block_size,
    )


def _requests(work: Workload, lengths: RequestLengths, order_s_per_token: float) -> Requests:
    facts = np.zeros(len(work), REQUEST).view(np.recarray)
    facts.prompt_tokens, facts.output_tokens = lengths.prompt_tokens, lengths.output_tokens
    facts.max_tokens = LONGEST
    facts.arrival_s = work.arrival_s
    facts.log_median, facts.spread = np.log(work.tag_median), work.tag_spread
    service = work.service or default_levels(len(work))
    for name in ("ttft_slo_s", "tpot_slo_s", "weight", "priority", "request_class"):
        facts[name] = getattr(service, name)
    if order_s_per_token > 0:
        tokens = np.where(np.isnan(work.tag_median), lengths.output_tokens, work.tag_median) + lengths.prompt_tokens
        facts.priority = np.round(1000 * (work.arrival_s + order_s_per_token * tokens))
    if work.adapter is not None:
        facts.adapter = work.adapter
    if lengths.num_contents:
        facts.first_content = lengths.first_content[:-1]
        facts.num_contents = np.diff(lengths.first_content)
    outcomes = np.zeros(len(work), OUTCOME).view(np.recarray)
    outcomes.scheduled_s = outcomes.first_token_s = outcomes.finished_s = outcomes.tokens_on_time = NONE
    legs = np.zeros(len(work), LEGS_OF_REQUEST).view(np.recarray)
    for name in ("prefill", "prefill_slot", "decode", "decode_slot", "scheduled_s", "prefilled_s", "fetched_s"):
        legs[name] = NONE
    return Requests(facts=facts, contents=lengths.contents, outcomes=outcomes, legs=legs)


def _possible(specs: Sequence[InstanceSpec], lengths: RequestLengths) -> npt.NDArray[np.bool_] | None:
    """Return which instances could ever serve which request; None where all could serve all."""
    columns = []
    for spec in specs:
        config = spec.config
        tokens = np.minimum(lengths.prompt_tokens + lengths.output_tokens, config.max_model_len)
        fits = -(-tokens // config.block_size) <= config.num_gpu_blocks - 1
        columns.append(fits & (lengths.prompt_tokens < config.max_model_len))
    possible = np.stack(columns, axis=1)
    return None if possible.all() else possible
