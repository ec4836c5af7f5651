"""A window: what one engine served for a while, as it was observed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from predictor.config import EngineConfig, require_count
from predictor.fitting.regression import COLUMNS, Steps
from predictor.profile import Profile
from predictor.request import RequestFacts
from predictor.snapshot import Snapshot
from predictor.suggestions import require_choice

Array = NDArray[np.float64]

VERSION = 1
LATEST_S = 1e15  # beyond it a clock cannot tell seconds
ENGINE, CLIENT = "engine", "client"  # where times were taken: a client's include the way to the engine and back
CLOCKS = (ENGINE, CLIENT)
STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"
ENDS = ("", STOP, LENGTH, ABORT, ERROR)
STEP_COLUMNS = ("number", "start_s", *COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRequest:
    """One request: its facts, whose `output_tokens` are those that it got, and when they came.

    `ended` is empty for a request that still ran, or waited, when the window ended. Times that were not observed are
    None.
    """

    facts: RequestFacts
    ended: str = ""
    cached_tokens: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse impossible ends and times."""
        require_choice("ended", self.ended, ENDS[1:], or_empty=True)
        require_count("cached_tokens", self.cached_tokens, at_least=0)
        if self.cached_tokens > self.facts.prompt_tokens:
            raise ValueError(f"cached_tokens: {self.cached_tokens} are more than its prompt_tokens")
        before_s, before = self.facts.arrival_s, "arrival_s"
        for name in TIMES:
            time_s = getattr(self, name)
            if time_s is None:
                continue
            if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not abs(time_s) < LATEST_S:
                raise ValueError(f"{name}: must be a time or null, not {str(time_s)[:40]}")
            if time_s < before_s:
                raise ValueError(f"{name}: {time_s} is before {before}, {before_s}")
            before_s, before = time_s, name
        if self.is_complete and (self.facts.output_tokens is None or self.last_token_s is None):
            missing = "output_tokens" if self.facts.output_tokens is None else "last_token_s"
            raise ValueError(f"{missing}: is missing from a request that ended by {self.ended!r}")

    @property
    def is_complete(self) -> bool:
        """Return whether the response came to its end."""
        return self.ended in (STOP, LENGTH)


TIMES = ("scheduled_s", "first_token_s", "last_token_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSteps:
    """Steps in the order in which they ended: numbers that count up, starts, and the columns of `Steps`."""

    number: Array
    start_s: Array
    columns: Steps

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.number)

    @property
    def num_lost(self) -> int:
        """Return how many steps between the first and the last one are missing."""
        return 0 if len(self) < 2 else int(self.number[-1] - self.number[0]) + 1 - len(self)

    def where(self, chosen: NDArray[np.bool_]) -> ObservedSteps:
        """Return the chosen steps."""
        return ObservedSteps(
            number=self.number[chosen], start_s=self.start_s[chosen], columns=self.columns.where(chosen)
        )


def steps_from(columns: dict[str, Array]) -> ObservedSteps:
    """Make steps from columns by name, in the order of their numbers."""
    order = np.argsort(columns["number"], kind="stable")
    ordered = {name: np.asarray(columns[name], np.float64)[order] for name in STEP_COLUMNS}
    return ObservedSteps(
        number=ordered["number"], start_s=ordered["start_s"], columns=Steps(**{name: ordered[name] for name in COLUMNS})
    )


NO_STEPS = steps_from({name: np.empty(0) for name in STEP_COLUMNS})


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowHeader:
    """What a window is of: the engine and its settings, the profile that was in use, and when it was observed.

    All times of a window are seconds on one clock; `clock_rate` of them pass in a second. `profile` is the name of a
    shipped profile, or a whole one, or nothing where none is known.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    version: int = VERSION
    engine: EngineConfig
    begin_s: float
    end_s: float
    clock: str = ENGINE
    clock_rate: float = 1.0
    profile: str = ""
    instance: str = ""
    model: str = ""
    source: str = ""  # what it was observed by

    def __post_init__(self) -> None:
        """Refuse other versions, and times that no window has."""
        if self.version != VERSION:
            raise ValueError(f"version: {self.version} is not {VERSION}, the one that can be read here")
        if self.clock not in CLOCKS:
            raise ValueError(f"clock: {self.clock!r} is neither {ENGINE} nor {CLIENT}")
        if not (math.isfinite(self.clock_rate) and self.clock_rate > 0):
            raise ValueError(f"clock_rate: must be above 0, not {self.clock_rate}")
        if not (0 <= self.begin_s <= self.end_s < math.inf):
            raise ValueError(f"end_s: must be a time from begin_s, {self.begin_s}, on, not {self.end_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWindow:
    """What one engine served between two moments.

    `state` is the engine's at the beginning, where it is known; else the engine is taken to have been idle.
    `profile` is the one that came with the window in full.
    """

    header: WindowHeader
    requests: tuple[ObservedRequest, ...]
    steps: ObservedSteps = field(default=NO_STEPS)
    state: Snapshot | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        """Refuse requests of the same id."""
        seen: set[str] = set()
        for request in self.requests:
            if request.facts.request_id in seen:
                raise ValueError(f"request_id: {request.facts.request_id!r} is a duplicate")
            seen.add(request.facts.request_id)

    @property
    def num_complete(self) -> int:
        """Return the number of requests whose responses came to their end."""
        return sum(one.is_complete for one in self.requests)

    def with_engine(self, config: EngineConfig) -> ObservedWindow:
        """Return the window with other settings of the engine."""
        state = None if self.state is None else replace(self.state, config=config)
        return replace(self, header=replace(self.header, engine=config), state=state)


HEADER_FIELDS = tuple(spec.name for spec in fields(WindowHeader))
