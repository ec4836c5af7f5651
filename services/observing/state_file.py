"""Observes an engine by its state file: requests, steps, and its state at the beginning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from predictor.profile import Profile
from predictor.request import DECODE
from predictor.snapshot import Snapshot
from services.engine_state import layout
from services.engine_state.observer import EngineObserver
from services.engine_state.snapshot import facts_of, snapshot_from_view
from services.engine_state.view import UnreadableError
from simulator.accuracy.window import (
    STEP_COLUMNS,
    ObservedRequest,
    ObservedSteps,
    ObservedWindow,
    WindowHeader,
    steps_from,
)

MAX_REQUESTS = 200_000
MAX_STEPS = 2_000_000
NO_HASHES = np.empty(0, np.uint64)


@dataclass(slots=True)
class _SeenRequest:
    """What the file has shown of a request while it was there."""

    row: Any
    hashes: np.ndarray
    live: Any


class StateFileObservation:
    """An observation that goes on; `poll` must be called before a ring of the file is full."""

    def __init__(self, state_file: str) -> None:
        """Begin to observe; ValueError where the file cannot be read."""
        try:
            self._observer = EngineObserver(state_file, contents=True)
            self._path = Path(state_file)
            view = self._observer.view
            published_s = (int(view.state["written_ns"]) / 1e9 - self._observer.clock_origin_s) * view.clock_rate
            self._begin_s = min(view.now_s, max(0.0, published_s))
            # a step that is under way in it may have ended since, so that only its start is certain
            taken_s = min([self._begin_s, *(max(0.0, start_s) for start_s, _ in view.steps)])
            self._state: Snapshot = replace(snapshot_from_view(view), taken_s=taken_s)
        except UnreadableError as error:
            raise ValueError(f"state_file: {error}") from None
        self._end_s = view.now_s
        self._seen: dict[int, _SeenRequest] = {}  # by serial
        self._num_steps = self._num_outcomes = 0
        self._steps: list[np.ndarray] = []
        self._outcomes: list[np.ndarray] = []
        self._note_requests()
        self._first = frozenset(self._seen)  # that were there at the beginning

    @property
    def is_full(self) -> bool:
        """Return whether the observation has as many requests or steps as it may keep."""
        return max(len(self._seen), self._num_outcomes) >= MAX_REQUESTS or self._num_steps >= MAX_STEPS

    @property
    def num_steps(self) -> int:
        """Return the number of steps so far."""
        return self._num_steps

    @property
    def num_ended(self) -> int:
        """Return the number of requests that have ended so far."""
        return self._num_outcomes

    def poll(self) -> None:
        """Read what is new; ValueError where the engine has exited or was restarted."""
        try:
            self._observer.poll()
        except UnreadableError as error:
            raise ValueError(f"engine: has exited: {error}") from None
        self._end_s = self._observer.view.now_s
        observed = self._observer.take()
        for new in observed.steps:
            self._steps.append(new)
            self._num_steps += len(new)
        for new in observed.outcomes:
            self._outcomes.append(new)
            self._num_outcomes += len(new)
        self._note_requests()

    def close(self) -> None:
        """Close the file."""
        self._observer.close()

    def window(self, *, profile: Profile | str = "", instance: str = "") -> ObservedWindow:
        """Return what has been observed so far.

        `profile` is that of the engine: its name, or a whole one; without it the one that the engine names.
        """
        view = self._observer.view
        settings = self._observer.settings
        name = profile.name if isinstance(profile, Profile) else profile or settings.get("profile", "")
        ended = {int(row["serial"]): row for rows in self._outcomes for row in rows}
        present = {int(view.live["serial"][slot]) for slot in view.slots.tolist()}
        model = str(settings.get("model", ""))
        requests = [
            *(
                self._ended(row, model)
                for serial, row in ended.items()
                if serial in self._first or row["finished_s"] > self._begin_s
            ),
            *(
                _running(seen, model)
                for serial, seen in self._seen.items()
                if serial in present and serial not in ended
            ),
        ]
        return ObservedWindow(
            header=WindowHeader(
                engine=self._observer.config,
                begin_s=self._begin_s,
                end_s=self._end_s,
                clock_rate=self._observer.clock_rate,
                profile=name if isinstance(name, str) else "",
                instance=instance or self._path.stem,
                model=model,
                source=str(settings.get("source", "a state file")),
            ),
            requests=tuple(sorted(requests, key=lambda one: (one.facts.arrival_s, one.facts.request_id))),
            steps=_steps_of(self._steps),
            state=self._state,
            profile=profile if isinstance(profile, Profile) else None,
        )

    def _note_requests(self) -> None:
        """Keep the facts of new requests, and the present state of all."""
        view = self._observer.view
        slots = view.slots.tolist()
        hashes: Iterable[np.ndarray] = view.contents.hashes if view.contents else [NO_HASHES] * len(slots)
        for slot, mine in zip(slots, hashes, strict=True):
            serial = int(view.live["serial"][slot])
            seen = self._seen.get(serial)
            if seen is None:
                self._seen[serial] = _SeenRequest(view.requests[slot].copy(), mine, view.live[slot])
            else:
                seen.hashes, seen.live = mine, view.live[slot]

    def _ended(self, row: np.void, model: str) -> ObservedRequest:
        """Return a request that has ended; one that no view has shown has only what its outcome says."""
        seen = self._seen.get(int(row["serial"]))
        facts_row = np.zeros((), layout.REQUEST)
        if seen is None:
            for name in ("serial", "request_id", "arrival_s", "prompt_tokens"):
                facts_row[name] = row[name]
            facts_row["weight"], facts_row["max_tokens"] = 1.0, max(1, int(row["output_tokens"]))
            for name in ("tag_tokens", "ttft_slo_s", "tpot_slo_s"):
                facts_row[name] = np.nan
        facts = facts_of(
            facts_row[()] if seen is None else seen.row, model=model, hashes=NO_HASHES if seen is None else seen.hashes
        )
        if seen is not None and facts.leg == DECODE and seen.live["fetch_ended_s"] >= seen.live["fetch_started_s"] > 0:
            facts = replace(facts, transfer_s=float(seen.live["fetch_ended_s"] - seen.live["fetch_started_s"]))
        reason = int(row["reason"])
        tokens = int(row["output_tokens"])
        times = _in_order(
            facts.arrival_s, *(float(row[name]) for name in ("scheduled_s", "first_token_s", "finished_s"))
        )
        return ObservedRequest(
            facts=replace(facts, output_tokens=tokens if tokens > 0 else None),
            ended=_end_of(reason, tokens),
            cached_tokens=min(facts.prompt_tokens, max(0, int(row["hit_tokens"]))),
            scheduled_s=times[0],
            first_token_s=times[1],
            last_token_s=times[2],
        )


def _end_of(reason: int, tokens: int) -> str:
    name = layout.REASONS[reason] if 0 <= reason < len(layout.REASONS) else "error"
    return name if tokens > 0 or name not in ("stop", "length") else "error"


def _running(seen: _SeenRequest, model: str) -> ObservedRequest:
    """Return a request that has not ended."""
    facts = facts_of(seen.row, model=model, hashes=seen.hashes)
    tokens = int(seen.live["output_tokens"])
    times = _in_order(facts.arrival_s, float(seen.live["scheduled_s"]), float(seen.live["first_token_s"]), -1.0)
    return ObservedRequest(
        facts=replace(facts, output_tokens=tokens if tokens > 0 else None),
        cached_tokens=min(facts.prompt_tokens, max(0, int(seen.live["hit_tokens"]))),
        scheduled_s=times[0],
        first_token_s=times[1],
    )


def _in_order(arrival_s: float, *times_s: float) -> list[float | None]:
    """Return times that have happened; a step counts from the end of the one before, which may precede an arrival."""
    ordered: list[float | None] = []
    least_s = arrival_s
    for time_s in times_s:
        if time_s < 0:
            ordered.append(None)
            continue
        least_s = max(least_s, time_s)
        ordered.append(least_s)
    return ordered


def _steps_of(parts: list[np.ndarray]) -> ObservedSteps:
    records = np.concatenate([np.empty(0, layout.STEP), *parts])
    records = records[(records["seconds"] > 0) & (records["num_tokens"] > 0)]
    return steps_from({name: records[name].astype(np.float64) for name in STEP_COLUMNS})
