"""Which requests are recorded: the samplers that OpenTelemetry names, decided before any span is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from predictor.suggestions import unknown_choice
from services.http.trace_context import TraceParent

SAMPLER, ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
DEFAULT, PARENT_BASED, RATIO = "parentbased_always_on", "parentbased_", "traceidratio"
SHARES = {"always_on": 1.0, "always_off": 0.0, RATIO: None}  # None: by the argument
SPACE = 1 << 64  # of the random part of a trace id, at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A share of the requests; those that come from a span go by its decision where `parent_based`."""

    share: float = 1.0
    parent_based: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Sampling:
        """Read OpenTelemetry's variables."""
        name = environment.get(SAMPLER) or DEFAULT
        root = name.removeprefix(PARENT_BASED)
        if root not in SHARES:
            raise unknown_choice(SAMPLER, name, (*SHARES, *(f"{PARENT_BASED}{one}" for one in SHARES)))
        share = SHARES[root]
        return cls(share=_ratio(environment) if share is None else share, parent_based=root != name)

    def takes(self, parent: TraceParent | None, draw: float) -> bool:
        """Return whether a request is recorded; `draw` is a random number from 0 to 1 for one without a parent."""
        if parent is None:
            return draw < self.share
        if self.parent_based:
            return parent.is_sampled
        return int(parent.trace_id, 16) % SPACE < self.share * SPACE


def _ratio(environment: Mapping[str, str]) -> float:
    text = environment.get(ARGUMENT) or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise ValueError(f"{ARGUMENT}: must be a number from 0 to 1, not {text!r}")
    return ratio
