"""An engine that is observed for a while by its state file."""

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
    """Steps (`layout.STEP`), outcomes (`layout.OUTCOME`), and the ids of requests that are not the observer's own."""

    steps: list[np.ndarray] = field(default_factory=list)
    outcomes: list[np.ndarray] = field(default_factory=list)
    other_requests: set[str] = field(default_factory=set)


class EngineObserver:
    """Polls an engine's state file, and collects new steps and outcomes."""

    def __init__(self, state_file: str, id_prefix: str = "", *, contents: bool = False) -> None:
        """Observe the engine that writes a state file; requests with `id_prefix` in their ids are the observer's own.

        With `contents` its views have the contents of KV blocks, where they are exported.
        """
        self._reader = Reader(state_file)
        self._id_prefix = id_prefix
        self._contents = contents
        self._reader.new_steps()
        self._reader.new_outcomes()
        self.view = view = self._reader.read(contents=contents)
        self._life = view.life
        self.config: EngineConfig = config_of(view)
        self.settings = view.settings
        self.clock_rate = view.clock_rate
        self.clock_origin_s = float(view.state["clock_origin_s"])
        self.num_preemptions = int(view.state["num_preemptions"])
        self._observed = ObservedBatch()
        self.is_idle = False
        self.poll()

    def poll(self) -> None:
        """Read what is new; UnreadableError if the engine has exited, ValueError if it was restarted."""
        try:
            view = self._reader.read(contents=self._contents)
            steps, outcomes = self._reader.new_steps(), self._reader.new_outcomes()
        except UnreadableError as error:
            if error.reason == BUSY:
                return
            raise
        if view.life != self._life:
            raise ValueError("engine: was restarted during the measurement")
        self.view = view
        self.num_preemptions = int(view.state["num_preemptions"])
        self.clock_origin_s = float(view.state["clock_origin_s"])
        self.is_idle = len(view.slots) == 0
        if len(steps):
            self._observed.steps.append(steps)
        if len(outcomes):
            self._observed.outcomes.append(outcomes)
        names = [self.client_id_of(row) for row in (*outcomes, *view.requests[view.slots])]
        self._observed.other_requests.update(name for name in names if self._id_prefix not in name)

    def take(self) -> ObservedBatch:
        """Return what was observed since the last call."""
        observed, self._observed = self._observed, ObservedBatch()
        return observed

    def wall_s(self, engine_s: float) -> float:
        """Convert a time of the engine to this machine's monotonic clock."""
        return self.clock_origin_s + engine_s / self.clock_rate

    @staticmethod
    def client_id_of(row: np.void) -> str:
        """Return the client's id of a request or an outcome."""
        return client_id(bytes(row["request_id"]).decode(errors="replace"))

    def close(self) -> None:
        """Close the state file."""
        self._reader.close()


def all_steps(observed: ObservedBatch) -> np.ndarray:
    """Return all observed steps."""
    return np.concatenate([np.empty(0, layout.STEP), *observed.steps])


def all_outcomes(observed: ObservedBatch) -> np.ndarray:
    """Return all observed outcomes."""
    return np.concatenate([np.empty(0, layout.OUTCOME), *observed.outcomes])
