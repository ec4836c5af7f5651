"""What a client asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from predictor.config import require_count
from predictor.lengths import DEFAULT_RESIDUAL, Tag, expected_tokens

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
                raise ValueError(f"{name}: must be above 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. Its answer is `output_tokens` long where that is known, else as long as its `tag` predicts.

    `max_tokens` is where the engine would cut the answer, and all that the engine knows of its length.
    `prefix_hashes` names the content of the leading full blocks, each hash standing for all tokens up to the end of
    its block.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    request_id: str
    prompt_tokens: int
    output_tokens: int | None = None
    tag: Tag | float | None = None
    arrival_s: float = 0.0
    max_tokens: int | None = None
    priority: int = 0
    prefix_hashes: tuple[int | str, ...] = ()
    request_class: str = REAL_TIME
    slo: Slo | None = None

    def __post_init__(self) -> None:
        """Refuse what no engine could serve."""
        require_count("prompt_tokens", self.prompt_tokens, at_least=1)
        for name in ("output_tokens", "max_tokens"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), at_least=1)
        if isinstance(self.tag, int | float):
            try:
                object.__setattr__(self, "tag", Tag(median_tokens=self.tag))
            except ValueError as error:
                raise ValueError(f"tag.{error}") from None
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"arrival_s: must be a time from 0 on, not {self.arrival_s}")
        if abs(self.priority) > 2**31:
            raise ValueError(f"priority: must lie within 32 bits, not {self.priority}")
        if self.request_class not in (REAL_TIME, BEST_EFFORT):
            raise ValueError(f"request_class: {self.request_class!r} is neither {REAL_TIME} nor {BEST_EFFORT}")

    def length(self, tokens_so_far: int = 0, residual: str = DEFAULT_RESIDUAL) -> int | None:
        """How long the answer is, or is expected to be after so many tokens of it; None when nothing tells."""
        if self.output_tokens is not None:
            return max(self.output_tokens, tokens_so_far + 1)
        if isinstance(self.tag, Tag):
            return expected_tokens(self.tag, tokens_so_far, residual)
        return None
