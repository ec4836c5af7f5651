"""Data-parallel ranks of a model with experts, which step together.

In vLLM 0.32 each rank is an engine core (`DPEngineCoreProc`). The layers of experts exchange tokens between all ranks
in every forward pass, so all passes start and end together: a pass takes as long as on its slowest rank, and a rank
without a batch runs a dummy batch. The ranks run from the first request on until they agree that none of them has any
(a *wave*); they compare at some steps only, so that idle ranks go on with dummy batches for a while.

`LockstepGroup` simulates all ranks together. `predictor.lockstep_forecast` forecasts requests on one of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from predictor import steps
from predictor.compiled import direct
from predictor.data_parallel import DEFAULT_RULES, LockstepRules
from predictor.engine import Engine
from predictor.loop import FOREVER
from predictor.state import NONE, State
from predictor.step_time import DECODE_REGION
from predictor.tabulated_costs import step_seconds

retire = direct(steps.retire)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepPass:
    """One forward pass of all ranks; `busy` says which ranks have a batch in it, the others run a dummy batch.

    `number` counts the passes of a wave from 1.
    """

    wave: int
    number: int
    planned_s: float
    start_s: float
    end_s: float
    busy: tuple[bool, ...]


class LockstepGroup:
    """Simulates engines as the ranks of one model with experts; they must not be advanced otherwise."""

    def __init__(self, engines: Sequence[Engine], rules: LockstepRules = DEFAULT_RULES) -> None:
        """Combine engines of the same pipeline depth, all of them without a step in flight."""
        depths = {engine.config.pipeline_depth for engine in engines}
        if len(depths) != 1:
            raise ValueError("async_scheduling: must be the same on all ranks")
        self.engines = list(engines)
        self.rules = rules
        self.wave = 0
        self.step_counter = 0
        self.is_running = False
        self.now_s = 0.0
        self._depth = depths.pop()
        self._ends: deque[float] = deque()  # of the passes in flight
        self._busy: deque[tuple[bool, ...]] = (
            deque()
        )  # which ranks have an own step in each of them, maybe an empty one
        self._last_end_s = -math.inf

    @property
    def next_end_s(self) -> float:
        """When the oldest pass in flight ends; infinite without one."""
        return self._ends[0] if self._ends else math.inf

    def advance(self, until_s: float = FOREVER) -> None:
        """Run all ranks until no event is left before `until_s`."""
        while self.next_pass(until_s) is not None:
            pass

    def next_pass(self, until_s: float = FOREVER) -> LockstepPass | None:
        """Run the ranks until one more pass is planned; None where none is before `until_s`.

        Without a time the run ends when no request is left that could make progress.
        """
        while True:
            starts_s = self._next_plan_s()
            if self._ends and self._ends[0] <= starts_s:
                if self._ends[0] > until_s:
                    return None
                self._end_pass()
                continue
            if starts_s > until_s or (until_s == FOREVER and not self._can_progress()):
                return None
            return self._plan(starts_s)

    def _next_plan_s(self) -> float:
        """Return when the next pass can be planned; infinite while the pipeline is full, or no request is there."""
        if len(self._ends) >= self._depth:
            return math.inf
        if self.is_running:
            return self.now_s
        return max(self.now_s, min(map(_next_work_s, self.engines)))

    def _can_progress(self) -> bool:
        return any(any(busy) for busy in self._busy) or any(map(_has_work, self.engines))

    def _plan(self, now_s: float) -> LockstepPass:
        self.now_s = now_s
        start_s = max(now_s, self._last_end_s)
        seconds = []
        own, busy = [], []
        for engine in self.engines:
            has_step = plan_step(engine, now_s)
            has_batch = has_step and bool(last_step(engine.state).num_scheduled)
            own.append(has_step)
            busy.append(has_batch)
            seconds.append(_seconds(last_step(engine.state)) if has_batch else dummy_seconds(engine.state))
        end_s = start_s + max(seconds)
        for engine, has_step in zip(self.engines, own, strict=True):
            if has_step:
                step = last_step(engine.state)
                step.start_s, step.end_s = start_s, end_s
        self.is_running = True
        self._last_end_s = end_s
        self._ends.append(end_s)
        self._busy.append(tuple(own))
        planned = LockstepPass(
            wave=self.wave, number=self.step_counter + 1, planned_s=now_s, start_s=start_s, end_s=end_s,
            busy=tuple(busy),
        )  # fmt: skip
        if len(self._ends) < self._depth:
            self._complete_step()
        return planned

    def _end_pass(self) -> None:
        """End the oldest pass; while the ranks run, this completes the step that was planned last."""
        was_full = len(self._ends) == self._depth
        self.now_s = max(self.now_s, self._ends.popleft())
        for engine, has_step in zip(self.engines, self._busy.popleft(), strict=True):
            if has_step:
                retire(engine.state)
        if self.is_running and was_full:
            self._complete_step()

    def _complete_step(self) -> None:
        """Count a step; mirrors vLLM 0.32 `DPEngineCoreProc._has_global_unfinished_reqs`."""
        self.step_counter += 1
        if self.rules.compares_after(self.step_counter) and not any(map(_is_unfinished, self.engines)):
            self.is_running = False
            self.wave += 1
            self.step_counter = 0


def plan_step(engine: Engine, now_s: float) -> bool:
    """Have an engine plan its next step at a time; return False where it has none, so that its rank runs a dummy batch.

    Its steps in flight must end later.
    """
    head = engine.state.engine[0]
    head.now_s = max(head.now_s, now_s)
    head.steady = 0
    num_steps = int(head.num_steps)
    engine.drive(engine.state, float(now_s), num_steps + 1, NONE)
    return bool(engine.state.engine[0].num_steps > num_steps)


def last_step(state: State) -> Any:
    """Return the step that was planned last."""
    head = state.engine[0]
    return state.steps[(head.oldest + head.num_in_flight - 1) % 2]


def dummy_seconds(state: State) -> float:
    """Return how long a rank's dummy batch takes: a decode of one token without context."""
    head = state.engine[0]
    pace = head.pace * head.region_pace[DECODE_REGION]
    return float(pace * step_seconds(state.costs, 1, 1, 1, 1.0, 0, 0.0, 0.0, 1.0))


def _seconds(step: Any) -> float:
    return float(step.end_s - step.start_s)


def _is_unfinished(engine: Engine) -> bool:
    head = engine.state.engine[0]
    return bool(head.num_running + head.num_waiting)


def _has_work(engine: Engine) -> bool:
    head = engine.state.engine[0]
    return bool(head.num_pending or (not head.stuck and head.num_running + head.num_waiting))


def _next_work_s(engine: Engine) -> float:
    """Return when an engine has a request: now, or at its next arrival."""
    state = engine.state
    if _is_unfinished(engine):
        return -math.inf
    head = state.engine[0]
    if not head.num_pending:
        return math.inf
    return float(state.requests[state.pending[head.pending_head]].arrival_s)
