"""Windows of engines that a script loads: recorded, kept, and the errors of the engine model on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from predictor.profile import Profile
from scripts.report import row
from services.observing.state_file import StateFileObservation
from services.observing.window_writing import write_window
from simulator.accuracy.online_correction import corrected
from simulator.accuracy.recalibration import recalibrate
from simulator.accuracy.replayed_window import (
    RequestTimes,
    compared_requests,
    forecast_times,
    measured_times,
    replayed_times,
)
from simulator.accuracy.request_errors import relative_errors
from simulator.accuracy.step_errors import pace_of, step_errors
from simulator.accuracy.window import ObservedWindow

OBSERVE_S = 0.1  # far less than 256 steps take


@asynccontextmanager
async def observing(engines: Mapping[str, tuple[str, Profile]]) -> AsyncIterator[dict[str, ObservedWindow]]:
    """Observe engines by their state files while the block runs; the windows are there at its end."""
    observations = {name: StateFileObservation(state_file) for name, (state_file, _) in engines.items()}
    windows: dict[str, ObservedWindow] = {}

    async def poll() -> None:
        while True:
            await asyncio.sleep(OBSERVE_S)
            for observation in observations.values():
                observation.poll()

    polling = asyncio.create_task(poll())
    try:
        yield windows
        for name, observation in observations.items():
            observation.poll()
            windows[name] = observation.window(profile=engines[name][1], instance=name)
    finally:
        polling.cancel()
        for observation in observations.values():
            observation.close()


def keep(folder: Path, mode: str, windows: Mapping[str, ObservedWindow]) -> None:
    """Write the windows to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, window in windows.items():
        write_window(window, folder / f"{mode}.{name}.jsonl")


def errors_by_part(windows: Mapping[str, ObservedWindow]) -> list[dict[str, Any]]:
    """Return what the errors are made of, over the requests of all engines, and how far off the step times are."""
    rows: list[dict[str, Any]] = []
    parts: dict[str, list[tuple[RequestTimes, RequestTimes]]] = {}
    for engine, window in windows.items():
        profile = window.profile
        if profile is None:
            raise ValueError(f"profile: is missing from the window of {engine}")
        requests = compared_requests(window)
        measured = measured_times(requests)
        better = recalibrate(window, profile).profile
        pace_at = pace_of(window.steps, profile.step_time)
        replayed = replayed_times(window, requests, profile.step_time)
        forecast = forecast_times(window, requests, profile.step_time)
        for part, times, truth in (
            ("replay", replayed, measured),
            ("forecast_at_arrival", corrected(forecast, measured), measured),
            ("later_arrivals", corrected(forecast, replayed), replayed),
            ("measured_pace", replayed_times(window, requests, profile.step_time, pace_at=pace_at), measured),
            ("recalibrated", replayed_times(window, requests, better.step_time), measured),
        ):
            parts.setdefault(part, []).append((times, truth))
        steps = step_errors(window.steps, profile.step_time)[0]
        rows += [
            row(f"steps.{figure}.{engine}", getattr(steps, figure), "ratio", steps.num_steps)
            for figure in ("bias", "error", "noise", "drift")
        ]
        rows.append(row(f"lost_steps.{engine}", window.steps.num_lost, "steps", steps.num_steps))
    for part, pairs in parts.items():
        for name in ("ttft", "tpot", "e2e"):
            errors = np.concatenate(
                [relative_errors(getattr(ours, f"{name}_s"), getattr(theirs, f"{name}_s")) for ours, theirs in pairs]
            )
            rows.append(row(f"{part}.{name}_error.median", float(np.median(np.abs(errors))), "ratio", len(errors)))
            rows.append(row(f"{part}.{name}_error.bias", float(np.median(errors)), "ratio", len(errors)))
    return rows
