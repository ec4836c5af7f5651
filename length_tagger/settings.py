"""Settings of the estimators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from length_tagger.estimate import MAX_SPREAD, MAX_TOKENS

MAX_REMEMBERED = 10_000_000  # lengths, of four bytes, over all windows


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggerSettings:
    """Parameters of all estimators; each is used by the estimator that it is named after.

    The constant is about ShareGPT's median, with a spread that covers most chats and code completions.
    """

    constant_tokens: Annotated[float, "Response length of `constant`, and without a tagger, in tokens."] = 256.0
    constant_spread: Annotated[float, "Spread of that length: standard deviation of its logarithm."] = 1.0
    hint_spread: Annotated[float, "Spread of a length that the client sent (nvext.agent_hints.osl)."] = 0.3
    history_window: Annotated[
        int, "Number of lengths that `history` keeps of a session, template, client or model."
    ] = 512
    history_enough: Annotated[int, "Minimum number of lengths for an estimate by `history`."] = 8
    history_windows: Annotated[
        int, "Maximum number of sessions, templates, clients and models that `history` keeps."
    ] = 4096
    cached_prompts: Annotated[int, "Maximum number of prompts that `cached` keeps response lengths of."] = 65_536
    linear_model: Annotated[str, "Model file (.npz) of `linear`, in place of the package's own."] = ""

    def __post_init__(self) -> None:
        """Refuse values that no estimator can work with."""
        if not (math.isfinite(self.constant_tokens) and 0 < self.constant_tokens <= MAX_TOKENS):
            raise ValueError(f"constant_tokens: must be above 0 and at most {MAX_TOKENS}, not {self.constant_tokens}")
        for name in ("constant_spread", "hint_spread"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= MAX_SPREAD):
                raise ValueError(f"{name}: must lie between 0 and {MAX_SPREAD:g}, not {value}")
        for name in ("history_window", "history_enough", "history_windows", "cached_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.history_enough > self.history_window:
            raise ValueError(f"history_enough: {self.history_enough} are more than history_window holds")
        if self.history_windows * self.history_window > MAX_REMEMBERED:
            raise ValueError(f"history_windows: with history_window more than {MAX_REMEMBERED} lengths in all")
