"""Checks now and then whether the latency profile still holds: observes the engine for a while, and replays that.

Both is done by `block accuracy` in a process of its own at low priority, so that no forecast is delayed. A mirrored
engine is observed here, as its proxy sees it, in bounded memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from predictor.config import EngineConfig
from predictor.profile import Profile, profile_to_json
from services.logs import log_event
from services.predictor_server.metrics import InstanceMetrics
from services.predictor_server.profile_watch_settings import ProfileWatchSettings

if TYPE_CHECKING:
    from services.observing.traffic import TrafficObservation

log = logging.getLogger(__name__)

HELD, BROKEN, UNKNOWN, FAILED = "holds", "does_not_hold", "inconclusive", "failed"
COMMAND = (sys.executable, "-m", "services.cli", "accuracy")
NICENESS = 10
REPLAY_S = 180.0  # maximum time of the process beyond that of the window
MAX_MESSAGE = 300
WARM_UP_SHARE = 1 / 3  # of a mirrored engine's window, whose requests are replayed, but not compared
DOES_NOT_HOLD = "profile does not hold: measure this engine (block profile measure), or recalibrate (block accuracy -o)"


class MirroredTraffic(Protocol):
    """A mirrored engine, which lends its events to an observation."""

    observation: TrafficObservation | None

    @property
    def config(self) -> EngineConfig | None:
        """The engine's settings; None before they are known."""

    @property
    def speed(self) -> float:
        """Engine seconds per second."""


class ProfileWatch:
    """The checks of one instance, one after the other; those of a node take turns by a lock."""

    def __init__(  # noqa: PLR0913 - what is checked, and how
        self,
        settings: ProfileWatchSettings,
        metrics: InstanceMetrics,
        turn: asyncio.Lock,
        *,
        state_file: str = "",
        traffic: MirroredTraffic | None = None,
        profile: Profile | None = None,
    ) -> None:
        """Check an engine that exports its state, or a mirrored one; without a profile, that which the engine names."""
        self._settings = settings
        self._metrics = metrics
        self._turn = turn
        self._state_file = state_file
        self._traffic = traffic
        self._profile = profile
        self._holds: bool | None = None

    async def run(self) -> None:
        """Check at every interval; returns at once if that is 0."""
        while self._settings.interval_s > 0:
            await asyncio.sleep(self._settings.interval_s)
            async with self._turn:
                await self.check()

    async def check(self) -> None:
        """Observe, replay, and set the metrics; a failure is counted and logged, and the next check tries again."""
        try:
            with tempfile.TemporaryDirectory(prefix="block-profile-check-") as folder:
                report = await self._report(Path(folder))
        except (OSError, ValueError, TimeoutError) as error:
            self._metrics.count_profile_check(FAILED)
            log_event(log, logging.WARNING, "profile check failed", reason=str(error) or type(error).__name__)
            return
        self._take(report)

    def _take(self, report: Mapping[str, Any]) -> None:
        holds = report["holds"]
        if holds is None:
            self._metrics.count_profile_check(UNKNOWN)
            return
        self._metrics.count_profile_check(HELD if holds else BROKEN)
        biases = {name: one["bias"] for name, one in (report["errors"] or {}).items()}
        if (steps := report["steps"].get("all")) is not None:
            biases["step"] = steps["bias"]
        self._metrics.set_profile(holds=holds, biases={name: bias for name, bias in biases.items() if bias is not None})
        if holds is not self._holds and (self._holds is not None or not holds):
            level, event = (logging.INFO, "profile holds again") if holds else (logging.WARNING, DOES_NOT_HOLD)
            log_event(log, level, event, profile=report["profile"], finding=report["verdict"])
        self._holds = holds

    async def _report(self, folder: Path) -> dict[str, Any]:
        words = ["--json", "--no-recalibrate", "--tolerance", str(self._settings.tolerance)]
        if self._profile is not None:
            (folder / "profile.json").write_text(profile_to_json(self._profile), encoding="utf-8")
            words += ["--profile", str(folder / "profile.json")]
        if self._traffic is None:
            words += ["--state-file", self._state_file, "--duration", f"{self._settings.window_s:f}s"]
        else:
            await self._observe(self._traffic, folder / "window.jsonl")
            words.append(str(folder / "window.jsonl"))
        report: dict[str, Any] = json.loads(await _output([*COMMAND, *words], self._settings.window_s + REPLAY_S))
        return report

    async def _observe(self, traffic: MirroredTraffic, path: Path) -> None:
        """Observe a mirrored engine; the first part of the time only shows what the engine is busy with."""
        from services.observing.traffic import TrafficObservation  # sidecars that check nothing start without it
        from services.observing.window_writing import write_window

        traffic.observation = observation = TrafficObservation(clock_rate=traffic.speed)
        try:
            await asyncio.sleep(self._settings.window_s)
        finally:
            traffic.observation = None
        if (config := traffic.config) is None:
            raise ValueError("the engine's settings are not known yet")
        window = observation.window(
            config, profile=self._profile or "", source="a mirror", warm_up_s=WARM_UP_SHARE * self._settings.window_s
        )
        await asyncio.to_thread(write_window, window, path)


async def _output(command: list[str], within_s: float) -> bytes:
    """Run a command at low priority and return its output; ValueError with its message where it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        out, error = await asyncio.wait_for(process.communicate(), within_s)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        message = " ".join(error.decode(errors="replace").split())
        raise ValueError(message[-MAX_MESSAGE:] or f"it exited with status {process.returncode}")
    return out
