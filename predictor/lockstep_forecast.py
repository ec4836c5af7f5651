"""Forecasts on one of several ranks that step together, each pass as long as on the slowest rank.

What a rank has in its next steps depends on its own requests alone. So the other ranks are run first, each by itself,
to see how long their steps take; in a forecast each step of the own rank lasts at least as long as those of the others
in the same pass. This equals the simulation of all ranks together (`predictor.lockstep`) as long as no request arrives
meanwhile at a rank without any, and no local scheduler decides by the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from predictor import forecast_kernels, loop, queues
from predictor.compiled import direct, kernel
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.loop import ANY_NUMBER, FOREVER
from predictor.state import NONE, State
from predictor.state_copies import copy_into, layer, stack_like

MAX_PASSES = 512  # of the other ranks, whose steps are known; then each rank is on its own


@kernel
def record_passes(workspace: State, source: State, seconds: np.ndarray) -> int:
    """Record how long each step of an engine takes after the oldest one in flight; return their number."""
    state = layer(workspace, source, 0)
    copy_into(state, source)
    engine = state.engine[0]
    count = 0
    if engine.num_in_flight > 1:
        younger = state.steps[(engine.oldest + 1) % 2]
        seconds[0] = younger.end_s - younger.start_s
        count = 1
    while count < len(seconds):
        engine.steady = 0
        num_steps = engine.num_steps
        loop.run(state, np.inf, num_steps + 1, NONE)
        if engine.num_steps == num_steps:
            break
        last = state.steps[(engine.oldest + engine.num_in_flight - 1) % 2]
        seconds[count] = last.end_s - last.start_s
        count += 1
    return count


@kernel
def drive_in_group(state: State, least_s: np.ndarray, first_step: int, watched: int) -> None:
    """Run a rank as `loop.drive` does, with steps that are at least as long as those of the other ranks."""
    engine = state.engine[0]
    while True:
        num_steps = engine.num_steps
        place = num_steps - first_step
        if not 0 <= place < len(least_s):
            loop.run(state, FOREVER, ANY_NUMBER, watched)
            return
        engine.steady = 0  # each may have another length than the one before
        loop.run(state, FOREVER, num_steps + 1, watched)
        if engine.num_steps == num_steps:
            return
        last = state.steps[(engine.oldest + engine.num_in_flight - 1) % 2]
        last.end_s = max(last.end_s, last.start_s + least_s[place])
        engine.steady = 0


@kernel
def hold_until(state: State, end_s: float, younger_s: float) -> None:
    """Have the pass under way end when it ends on the slowest rank; a rank without a step waits for its end."""
    engine = state.engine[0]
    engine.steady = 0
    if engine.num_in_flight == 0:
        engine.now_s = max(engine.now_s, end_s)
        return
    oldest = state.steps[engine.oldest]
    oldest.end_s = max(oldest.end_s, end_s)
    if engine.num_in_flight > 1:
        younger = state.steps[(engine.oldest + 1) % 2]
        seconds = max(younger.end_s - younger.start_s, younger_s)
        younger.start_s = max(younger.start_s, oldest.end_s)
        younger.end_s = younger.start_s + seconds


@kernel
def simulate_in_group(
    source: State,
    workspace: State,
    slots: np.ndarray,
    ends: np.ndarray,
    now_s: float,
    delays: bool,
    ready: np.ndarray,
    results: np.ndarray,
    least_s: np.ndarray,
    end_s: float,
    younger_s: float,
) -> None:
    """Simulate a rank with each candidate as `forecast_kernels.simulate` does, with the steps of the other ranks.

    `least_s` are the least seconds of the steps that follow; `end_s` is when the pass under way ends on the slowest
    rank, and `younger_s` how long the pass takes that is already planned behind it.
    """
    first_step = source.engine[0].num_steps
    shared = layer(workspace, source, forecast_kernels.SHARED)
    purpose = forecast_kernels.HAS_TOKENS_ON_TIME if delays else forecast_kernels.HAS_TIMES
    if ready[forecast_kernels.SHARED] < purpose:
        copy_into(shared, source)
        if not delays:
            forecast_kernels.stop_counting_on_time(shared)
        shared.engine[0].least_slack_s = np.inf
        shared.engine[0].unmeasured_s = 0.0
        hold_until(shared, end_s, younger_s)
        if not shared.engine[0].by_priority and queues.last_arrival_s(shared) <= now_s:
            drive_in_group(shared, least_s, first_step, loop.TAIL_OF_QUEUE)
            ready[forecast_kernels.SHARED] = purpose
    alone = layer(workspace, source, forecast_kernels.ALONE)
    if delays and ready[forecast_kernels.ALONE] < purpose:
        copy_into(alone, shared)
        drive_in_group(alone, least_s, first_step, NONE)
        ready[forecast_kernels.ALONE] = purpose
    after = layer(workspace, source, forecast_kernels.WITH_CANDIDATE)
    first = 0
    for candidate in range(len(ends)):
        end = ends[candidate]
        copy_into(after, shared)
        if purpose < ready[forecast_kernels.SHARED]:
            forecast_kernels.stop_counting_on_time(after)
        forecast_kernels.announce_all(after, source, slots, first, end)
        for position in range(first, first + 1 if delays else end):
            drive_in_group(after, least_s, first_step, NONE if delays else slots[position])
        for position in range(first, end):
            forecast_kernels.read_result(after, slots[position], now_s, results[position])
        if delays:
            forecast_kernels.compare(source, shared, alone, after, slots[first], results[first])
            forecast_kernels.count_others_of_group(after, slots, first, end, results[first])
        first = end


record = direct(record_passes)
simulate = direct(simulate_in_group)


class RankPasses:
    """How long the next steps of one rank take, as far as its engine model knows."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.num = 0
        self.num_in_flight = 0
        self.end_s = -math.inf  # of the oldest step in flight
        self.seconds = np.zeros(MAX_PASSES)  # of those after it
        self._workspace: Any = None
        self._shaped_like: Any = None

    def follow(self, engine: Engine) -> None:
        """Run a copy of an engine."""
        state = engine.state
        if state is not self._shaped_like:
            self._shaped_like, self._workspace = state, stack_like(state, 1)
        head = state.engine[0]
        self.num_in_flight = int(head.num_in_flight)
        self.end_s = float(state.steps[head.oldest].end_s) if self.num_in_flight else -math.inf
        self.num = int(record(self._workspace, state, self.seconds))


class LockstepForecaster(Forecaster):
    """Forecasts candidates on one rank beside the other ranks of its group."""

    def __init__(self, engine: Engine) -> None:
        """Forecast without other ranks, until `beside` names some."""
        super().__init__(engine)
        self._least_s = np.zeros(MAX_PASSES)
        self._num_least = 0
        self._end_s, self._younger_s = -math.inf, 0.0
        self._simulate = self._simulate_beside
        self._has_verdicts = False  # only whole forecasts follow the other ranks

    def beside(self, others: Sequence[RankPasses]) -> None:
        """Take the steps of the other ranks; what candidates share is made again."""
        head = self.engine.state.engine[0]
        own = int(head.num_in_flight)
        in_flight = max((one.num_in_flight for one in others), default=0)
        first = max(own, 1) if own else max(in_flight, 1)  # pass that the next step of this rank belongs to
        self._num_least = max([0, *(one.num - (first - 1) for one in others)])
        self._least_s[: self._num_least] = 0.0
        for one in others:
            count = one.num - (first - 1)
            if count > 0:
                known = one.seconds[first - 1 : one.num]
                np.maximum(self._least_s[:count], known, out=self._least_s[:count])
        self._younger_s = max((float(one.seconds[0]) for one in others if one.num), default=0.0)
        self._end_s = max((one.end_s for one in others), default=-math.inf)
        if not own and first > 1:
            self._end_s += self._younger_s
        self._keep_shared(None)

    def _simulate_beside(self, *arguments: Any) -> None:
        more: tuple[Any, ...] = (self._least_s[: self._num_least], self._end_s, self._younger_s)
        simulate(*arguments, *more)
