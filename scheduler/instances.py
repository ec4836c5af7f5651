"""What a scheduler knows of an instance when it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from predictor.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance as seen for one request: a forecast if its sidecar gave one, and its indicators, so old."""

    instance_id: str
    forecast: Forecast | None = None
    indicators: Mapping[str, float] = field(default_factory=dict)
    age_s: float = 0.0
