"""The steps of an emulated engine: the pace of each, and their records in metrics and the state file."""

from __future__ import annotations

from collections import deque
from operator import itemgetter

from predictor.engine import Engine
from predictor.state import STEP
from services.emulator.clock import Pace
from services.emulator.exporter import EngineStateExporter
from services.emulator.metrics import EngineMetrics
from services.emulator.speculation import DraftDraws
from services.emulator.state_arrays import StateArrays

# the fields of a step that a state file records
RECORDED = itemgetter(
    *map(
        list(STEP.names or ()).index,
        (
            "start_s", "end_s", "num_tokens", "num_sampled", "num_decodes", "num_prefills", "decode_context",
            "decode_longest", "prefill_qq", "prefill_qkv",
        ),
    )
)  # fmt: skip

Launched = tuple[float, tuple[float, ...], tuple[int, int]]  # its end, its row for the state file, adapters loaded


class StepRecorder:
    """Follows an engine's steps, each from its launch to its end."""

    def __init__(  # noqa: PLR0913 - these are its parts
        self,
        engine: Engine,
        arrays: StateArrays,
        pace: Pace,
        metrics: EngineMetrics,
        *,
        draws: DraftDraws | None,
        exporter: EngineStateExporter | None,
    ) -> None:
        """Draw the pace of the first step."""
        self._engine = engine
        self._arrays = arrays
        self._pace = pace
        self._metrics = metrics
        self._draws = draws
        self._exporter = exporter
        self._next_pace = pace.next()
        self._under_way: deque[Launched] = deque()
        self._loads = (0, 0)  # of adapters so far, into host memory and into GPU slots

    def set_next_pace(self) -> None:
        """Set the pace of the step that is planned next."""
        self._arrays.head["pace"] = self._next_pace

    def record(self, *, has_launched: bool) -> None:
        """Record the steps that have ended, and the one that was just launched, if any."""
        self.record_ended()
        if has_launched:
            self.note_launched(self._arrays.num_steps - 1)

    def note_loads(self) -> None:
        """Take note of adapters that were loaded by no step."""
        self._loads = self._arrays.adapter_loads

    def note_launched(self, number: int) -> None:
        """Note the step that was just launched, which has this number, and draw the pace of the next one."""
        index = (int(self._arrays.head["oldest"][0]) + self._arrays.num_in_flight - 1) % 2
        if self._draws is not None:
            self._draws.draw(self._engine.state, index)
        start_s, end_s, *counts = RECORDED(self._arrays.steps[index].item())
        loads, activations = self._loads
        self._loads = self._arrays.adapter_loads
        new = self._loads[0] - loads, self._loads[1] - activations
        self._under_way.append((end_s, (number, start_s, end_s - start_s, *counts), new))
        self._next_pace = self._pace.next()

    def record_ended(self) -> None:
        """Record the steps that have ended."""
        now_s = self._arrays.now_s
        while self._under_way and self._under_way[0][0] <= now_s:
            _, row, loads = self._under_way.popleft()
            # how many draft tokens are output is known when they are delivered
            self._metrics.step(int(row[3]), int(row[4]) if self._draws is None else 0)
            if self._exporter is not None:
                self._exporter.stepped(row, loads)
