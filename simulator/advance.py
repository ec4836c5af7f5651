"""Compiled code that runs the engines of a simulated cluster until a time."""

from __future__ import annotations

import numpy as np

from predictor import loop
from predictor.compiled import direct, kernel, small_kernel
from predictor.loop import ANY_NUMBER
from predictor.state import NONE
from simulator.fleet_arrays import EngineArrays, Requests, engine_at
from simulator.indicator_kernels import write_changed
from simulator.request_slots import FULL, SENT, send


@kernel
def refresh(
    fleet: EngineArrays, requests: Requests, number: int, index: int, arrives_s: float, visible_s: float, now_s: float,
    rows: np.ndarray, indicators: np.ndarray,
) -> int:  # fmt: skip
    """Send request `number` unless it is negative, run all engines until now, and write the indicators that changed."""
    if number >= 0 and send(fleet, requests, number, index, arrives_s, visible_s) == FULL:
        return FULL
    advance(fleet, now_s)
    write_changed(fleet, now_s, rows, indicators)
    return SENT


@kernel
def advance(fleet: EngineArrays, until_s: float) -> None:
    """Run all engines until a time."""
    for index in range(len(fleet.instances)):
        advance_one(fleet, index, until_s)


@small_kernel
def advance_one(fleet: EngineArrays, index: int, until_s: float) -> None:
    """Run one engine until a time, if it is up and has something to do."""
    instance = fleet.instances[index]
    if instance.up and not is_quiet(fleet, index, until_s):
        run_engine(fleet, index, until_s)
        instance.changed = 1


@kernel
def run_engine(fleet: EngineArrays, index: int, until_s: float) -> None:
    """Run one engine until a time; with noise, step by step."""
    state = engine_at(fleet.stack, fleet.stack.costs, index)
    engine, instance = state.engine[0], fleet.instances[index]
    size = len(fleet.noise)
    engine.pace = instance.pace
    if size == 1:
        loop.run(state, until_s, ANY_NUMBER, NONE)
        return
    before = np.int64(-1)
    while engine.num_steps != before:
        before = engine.num_steps
        engine.pace = instance.pace * fleet.noise[(instance.first_noise + before) % size]
        loop.run(state, until_s, before + 1, NONE)


@small_kernel
def is_quiet(fleet: EngineArrays, index: int, until_s: float) -> bool:
    """Return True if an engine certainly does nothing until a time; a cheap check that may miss some."""
    engine = fleet.stack.engine[index, 0]
    if engine.num_in_flight == engine.pipeline_depth:
        return fleet.stack.steps[index, engine.oldest].end_s > until_s
    if engine.num_in_flight + engine.num_running + engine.num_waiting > 0:
        return False
    pending = fleet.stack.pending[index, engine.pending_head]
    if engine.next_transfer_s <= until_s:
        return False
    return engine.num_pending == 0 or fleet.stack.requests[index, pending].arrival_s > until_s


refresh_directly = direct(refresh)
