"""What an engine shows while it is measured: its steps, what became of requests, and whether others are there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from predictor.config import EngineConfig
from services.engine_state import layout
from services.engine_state.identity import client_id
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of
from services.engine_state.view import BUSY, UnreadableError


@dataclass(slots=True, kw_only=True)
class ObservedBatch:
    """What was seen since the last time: steps in `layout.STEP`, outcomes in `layout.OUTCOME`, strangers by name."""

    steps: list[np.ndarray] = field(default_factory=list)
    outcomes: list[np.ndarray] = field(default_factory=list)
    strangers: set[str] = field(default_factory=set)


class Watch:
    """Looks at one engine's state file again and again, and keeps what is new."""

    def __init__(self, state_file: str, mine: str) -> None:
        """Watch the engine that writes a file; requests whose names hold `mine` are ours."""
        self._reader = Reader(state_file)
        self._mine = mine
        view = self._reader.read()
        self._life = view.life
        self.config: EngineConfig = config_of(view)
        self.settings = view.settings
        self.clock_rate = view.clock_rate
        self.clock_origin_s = float(view.state["clock_origin_s"])
        self.num_preemptions = int(view.state["num_preemptions"])
        self._reader.new_steps()
        self._reader.new_outcomes()
        self._seen = ObservedBatch()
        self.is_idle = False
        self.look()

    def look(self) -> None:
        """Take in what is new; UnreadableError where the engine is gone, or is another."""
        try:
            view = self._reader.read()
            steps, outcomes = self._reader.new_steps(), self._reader.new_outcomes()
        except UnreadableError as error:
            if error.reason == BUSY:
                return
            raise
        if view.life != self._life:
            raise ValueError("engine: it was started anew meanwhile")
        self.num_preemptions = int(view.state["num_preemptions"])
        self.clock_origin_s = float(view.state["clock_origin_s"])
        self.is_idle = len(view.slots) == 0
        if len(steps):
            self._seen.steps.append(steps)
        if len(outcomes):
            self._seen.outcomes.append(outcomes)
        names = [self.name_of(row) for row in (*outcomes, *view.requests[view.slots])]
        self._seen.strangers.update(name for name in names if self._mine not in name)

    def take(self) -> ObservedBatch:
        """Give what was seen since the last time."""
        seen, self._seen = self._seen, ObservedBatch()
        return seen

    def wall_s(self, engine_s: float) -> float:
        """Put a time of the engine's as this machine's monotonic clock has it."""
        return self.clock_origin_s + engine_s / self.clock_rate

    @staticmethod
    def name_of(row: np.void) -> str:
        """How the client called a request, in a row of either kind."""
        return client_id(bytes(row["request_id"]).decode(errors="replace"))

    def close(self) -> None:
        """Let the file go."""
        self._reader.close()


def joined_steps(seen: ObservedBatch) -> np.ndarray:
    """All steps seen."""
    return np.concatenate([np.empty(0, layout.STEP), *seen.steps])


def joined_outcomes(seen: ObservedBatch) -> np.ndarray:
    """All outcomes seen."""
    return np.concatenate([np.empty(0, layout.OUTCOME), *seen.outcomes])
