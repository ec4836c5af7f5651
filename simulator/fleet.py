"""The engines of a simulated cluster as one stack of arrays: how it is made, grown, and freed of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtri_exp

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.lengths import QUANTILES
from predictor.state import NONE, State
from predictor.state_allocation import no_facts
from predictor.state_copies import stack_like
from predictor.step_time import StepTime
from predictor.tabulated_costs import Costs, tabulate
from scheduler.instances import BOTH, ROLES
from simulator.fleet_arrays import INSTANCE, SLOT, EngineArrays
from simulator.forecast_kernels import FIRST_OF_ENGINES, LAYERS_OF_ENGINE
from simulator.predicted_lengths import RESIDUAL_HIGH, RESIDUAL_LOW

COSTS = State._fields.index("costs")
RINGS = {"waiting": "waiting_head", "pending": "pending_head"}
NUM_NOISE = 1 << 16
NUM_RESIDUAL = 4097


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """One instance: its engine, its real speed, the speed that its predictor assumes, and its role."""

    config: EngineConfig
    step_time: StepTime
    predicted_step_time: StepTime | None = None  # of the predictor's profile, if it is another one
    pace: float = 1.0  # real over profiled step time
    predicted_pace: float = 1.0
    role: str = BOTH


def has_roles(specs: Sequence[InstanceSpec]) -> bool:
    """Return whether some instances serve only one leg of a request."""
    return any(spec.role != BOTH for spec in specs)


def instance_names(num: int) -> tuple[str, ...]:
    """Return the names of a cluster's instances, in alphabetical order."""
    width = len(str(num - 1))
    return tuple(f"instance-{index:0{width}d}" for index in range(num))


def residual_table(rule: str) -> npt.NDArray[np.float64]:
    """Tabulate the predicted total length by the produced length, both as standard scores of their logarithms."""
    if rule not in QUANTILES:
        return np.empty(0)
    scores = np.linspace(RESIDUAL_LOW, RESIDUAL_HIGH, NUM_RESIDUAL)
    table: npt.NDArray[np.float64] = -ndtri_exp(log_ndtr(-scores) + math.log1p(-QUANTILES[rule]))
    return table


def noise_factors(spread: float, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw log-normal factors of step times, with a mean of one."""
    if spread == 0:
        return np.ones(1)
    return np.exp(spread * generator.standard_normal(NUM_NOISE) - spread**2 / 2)


def make_fleet(
    specs: Sequence[InstanceSpec],
    *,
    num_contents: int,
    noise: npt.NDArray[np.float64],
    residual: npt.NDArray[np.float64],
    knows_lengths: bool,
    generator: np.random.Generator,
) -> EngineArrays:
    """Stack idle engines; without prompt contents, KV blocks are only counted."""
    if not specs:
        raise ValueError("instances: must not be empty")
    singles = [Engine(spec.config, spec.step_time).state for spec in specs]
    slots = 2 * max(spec.config.max_num_seqs for spec in specs) + 32
    longest = max(-(-spec.config.max_model_len // spec.config.block_size) for spec in specs)
    width = longest + 1 if any(state.engine[0].prefix_caching for state in singles) else 1
    stack = _stacked(singles, slots=slots, width=width, num_contents=max(1, num_contents))
    costs = [state.costs for state in singles]
    predicted = [_predicted_costs(spec, own) for spec, own in zip(specs, costs, strict=True)]
    records = np.zeros(len(specs), INSTANCE).view(np.recarray)
    records.up = records.changed = 1
    records.pace = [spec.pace for spec in specs]
    records.predicted_pace = [spec.predicted_pace for spec in specs]
    records.deterministic = [
        knows_lengths and len(noise) == 1 and spec.predicted_step_time is None and spec.pace == spec.predicted_pace
        for spec in specs
    ]
    records.lease_s = [spec.config.kv_lease_s for spec in specs]
    records.role = [ROLES.index(spec.role) for spec in specs]
    if has_roles(specs):  # a leg that waits for its transfer leaves its seat to the tail of the queue
        records.deterministic = 0
    records.first_noise = generator.integers(0, NUM_NOISE, len(specs))
    fleet = EngineArrays(
        stack=stack._replace(costs=_costs(costs)),
        predicted_costs=_costs(predicted),
        instances=records,
        slots=_empty_slots(len(specs), slots),
        free_slots=np.zeros((len(specs), slots), np.int64),
        underway=np.zeros((len(specs), slots), np.int64),
        noise=noise,
        residual=residual,
    )
    for index in range(len(specs)):
        free_all(fleet, index)
    return fleet


def workspace_for(fleet: EngineArrays) -> State:
    """Allocate the states that forecasts of one engine need, and those that each engine has to itself."""
    arrays: list[Any] = [array[0] for array in fleet.stack[:COSTS]]
    fleet.instances.has_lookahead = 0
    depth = FIRST_OF_ENGINES + len(LAYERS_OF_ENGINE) * len(fleet.instances)
    return stack_like(State(*arrays, *[Costs(*(array[0] for array in fleet.stack.costs))]), depth)


def with_more_slots(fleet: EngineArrays) -> EngineArrays:
    """Double the number of request slots of every engine."""
    old = fleet.slots.shape[1]
    new = 2 * old
    stack = fleet.stack
    for ring, head in RINGS.items():
        array = getattr(stack, ring)
        for index in range(len(array)):
            array[index] = np.roll(array[index], -stack.engine[index, 0][head])
        stack.engine[head] = 0
    grown: dict[str, Any] = {}
    for name in (
        "requests",
        "running",
        "transfers",
        "preempted",
        "turns",
        "ranks",
        "waiting",
        "pending",
        "tables",
        "facts",
        "hashes",
    ):
        grown[name] = _wider(getattr(stack, name), 1, new)
    grown["batch"] = _wider(stack.batch, 2, new)
    slots = _empty_slots(len(fleet.instances), new)
    slots[:, :old] = fleet.slots
    wide = fleet._replace(
        stack=stack._replace(**grown),
        slots=slots,
        free_slots=_wider(fleet.free_slots, 1, new),
        underway=_wider(fleet.underway, 1, new),
    )
    for spec, free in zip(wide.instances, wide.free_slots, strict=True):
        free[spec.num_free_slots : spec.num_free_slots + old] = np.arange(new - 1, old - 1, -1)
        spec.num_free_slots += old
    return wide


def free_all(fleet: EngineArrays, index: int) -> None:
    """Mark all slots of an engine free, except the first, which is reserved for forecasts."""
    num_slots = fleet.slots.shape[1]
    fleet.slots.number[index] = NONE
    fleet.free_slots[index, : num_slots - 1] = np.arange(num_slots - 1, 0, -1)
    fleet.instances[index].num_free_slots = num_slots - 1
    fleet.instances[index].num_underway = 0


def restart(fleet: EngineArrays, index: int, spec: InstanceSpec, now_s: float) -> None:
    """Restart an engine with empty state."""
    fresh = Engine(spec.config, spec.step_time).state
    engine = fleet.stack.engine[index, 0]
    preemptions = int(engine.num_preemptions)
    fleet.stack.engine[index] = fresh.engine
    engine.now_s, engine.num_preemptions = now_s, preemptions
    fleet.stack.blocks[index, : len(fresh.blocks)] = fresh.blocks
    fleet.stack.two_ended_blocks[index, : len(fresh.two_ended_blocks)] = fresh.two_ended_blocks
    fleet.stack.cached[index] = NONE
    free_all(fleet, index)
    fleet.instances[index].changed = 1
    fleet.instances[index].has_lookahead = 0


def _stacked(singles: Sequence[State], *, slots: int, width: int, num_contents: int) -> State:
    num = len(singles)
    first = singles[0]
    num_blocks = max(len(state.blocks) for state in singles)
    stack = State(
        engine=_records((num, 1), first.engine),
        requests=_records((num, slots), first.requests),
        running=np.zeros((num, slots), np.int32),
        waiting=np.zeros((num, slots), np.int32),
        pending=np.zeros((num, slots), np.int32),
        transfers=np.zeros((num, slots), np.int32),
        preempted=np.zeros((num, slots), np.int32),
        steps=_records((num, 2), first.steps),
        batch=_records((num, 2, slots), first.batch),
        turn_starts=np.zeros((num, max(len(state.turn_starts) for state in singles)), np.int32),
        turns=np.zeros((num, slots), np.int32),
        ranks=_records((num, slots), first.ranks),
        clients=_records((num, max(len(state.clients) for state in singles)), first.clients),
        two_ended_blocks=_records((num, max(len(state.two_ended_blocks) for state in singles)), first.two_ended_blocks),
        blocks=_records((num, num_blocks), first.blocks),
        tables=np.zeros((num, slots, width), np.int32),
        cached=np.full((num, num_contents), NONE, np.int32),
        adapters=_records((num, max(len(state.adapters) for state in singles)), first.adapters),
        step_adapters=np.zeros((num, max(len(state.step_adapters) for state in singles)), np.int64),
        encoder_cache=_records((num, max(len(state.encoder_cache) for state in singles)), first.encoder_cache),
        encoder_inputs=_records((num, slots, 1), first.encoder_inputs),
        facts=no_facts(num, slots),
        hashes=np.zeros((num, slots, width), np.int64),
        expected_accepted=np.zeros((num, max(len(state.expected_accepted) for state in singles))),
        costs=first.costs,
    )
    for index, state in enumerate(singles):
        stack.engine[index] = state.engine
        stack.expected_accepted[index, : len(state.expected_accepted)] = state.expected_accepted
        stack.blocks[index, : len(state.blocks)] = state.blocks
        stack.two_ended_blocks[index, : len(state.two_ended_blocks)] = state.two_ended_blocks
    return stack


def _records(shape: tuple[int, ...], like: np.ndarray) -> Any:
    return np.zeros(shape, like.dtype).view(np.recarray)


def _empty_slots(num: int, slots: int) -> Any:
    empty = np.zeros((num, slots), SLOT).view(np.recarray)
    empty.number = NONE
    return empty


def _predicted_costs(spec: InstanceSpec, own: Costs) -> Costs:
    if spec.predicted_step_time is None:
        return own
    return tabulate(spec.predicted_step_time, len(own.by_tokens) - 1, len(own.by_count) - 1)


def _costs(costs: Sequence[Costs]) -> Costs:
    """Stack tables of different lengths; entries beyond an engine's limits are never read."""
    tokens, counts = max(len(one.by_tokens) for one in costs), max(len(one.by_count) for one in costs)
    by_tokens = np.zeros((len(costs), tokens))
    by_count = np.zeros((len(costs), counts, max(one.by_count.shape[1] for one in costs)))
    for index, one in enumerate(costs):
        by_tokens[index, : len(one.by_tokens)] = one.by_tokens
        by_count[index, : len(one.by_count), : one.by_count.shape[1]] = one.by_count
    return Costs(coefficients=np.stack([one.coefficients for one in costs]), by_tokens=by_tokens, by_count=by_count)


def _wider(array: np.ndarray, axis: int, size: int) -> Any:
    shape = list(array.shape)
    shape[axis] = size
    wide = np.zeros(shape, array.dtype)
    wide[tuple(slice(length) for length in array.shape)] = array
    return wide.view(type(array))
