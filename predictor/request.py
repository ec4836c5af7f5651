"""What a client asks for, and how long the answer is thought to be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from predictor.config import require_count

REAL_TIME, BEST_EFFORT = "real-time", "best-effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """How late tokens may be; None where anything goes."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse targets that nothing could meet."""
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"slo.{name}: must be above 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: `output_tokens` is where its answer really ends, or is predicted to end.

    `max_tokens` is where the engine would cut it, and all the engine knows. `prefix_hashes` names the content of its
    leading full blocks, each hash standing for all tokens up to the end of its block.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    max_tokens: int | None = None
    priority: int = 0
    prefix_hashes: tuple[int | str, ...] = ()
    request_class: str = REAL_TIME
    slo: Slo | None = None

    def __post_init__(self) -> None:
        """Refuse what no engine could serve."""
        require_count("prompt_tokens", self.prompt_tokens, at_least=1)
        require_count("output_tokens", self.output_tokens, at_least=1)
        if self.max_tokens is not None:
            require_count("max_tokens", self.max_tokens, at_least=1)
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"arrival_s: must be a time from 0 on, not {self.arrival_s}")
        if abs(self.priority) > 2**31:
            raise ValueError(f"priority: must lie within 32 bits, not {self.priority}")
        if self.request_class not in (REAL_TIME, BEST_EFFORT):
            raise ValueError(f"request_class: {self.request_class!r} is neither {REAL_TIME} nor {BEST_EFFORT}")
