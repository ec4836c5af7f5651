"""Settings of the checks of a latency profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.settings import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWatchSettings:
    """How often the profile is checked, how long it is observed for, and what counts as a deviation."""

    interval_s: Annotated[
        float,
        Option(
            "Interval between two checks of the latency profile against what the engine served, in seconds; 0: none.",
            name="profile_check_s",
        ),
    ] = 0.0
    window_s: Annotated[
        float, Option("How long the engine is observed for a check, in seconds.", name="profile_check_window_s")
    ] = 30.0
    tolerance: Annotated[
        float, Option("Relative bias up to which the latency profile holds.", name="profile_check_tolerance")
    ] = 0.1

    def __post_init__(self) -> None:
        """Refuse values with which nothing could be checked."""
        if not 0 <= self.interval_s < 1e9:
            raise ValueError(f"interval_s: must be a time from 0 on, not {self.interval_s}")
        if not 0 < self.window_s < 1e6:
            raise ValueError(f"window_s: must be a time above 0, not {self.window_s}")
        if not 0 < self.tolerance < 1e3:
            raise ValueError(f"tolerance: must be above 0, not {self.tolerance}")
