"""The settings of all estimators."""

from __future__ import annotations

import math
from dataclasses import dataclass

from length_tagger.estimate import MAX_SPREAD, MAX_TOKENS

MAX_REMEMBERED = 10_000_000  # lengths of four bytes, over all windows


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggerSettings:
    """Parameters of all estimators; the prefix of each names its estimator.

    The constant is about ShareGPT's median, with a spread that covers most chats and code completions.
    """

    constant_tokens: float = 256.0
    constant_spread: float = 1.0
    hint_spread: float = 0.3
    history_window: int = 512
    history_enough: int = 8
    history_windows: int = 4096
    cached_prompts: int = 65_536
    linear_model: str = ""  # a file; the shipped model if empty

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
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
            raise ValueError(f"history_enough: {self.history_enough} is more than history_window")
        if self.history_windows * self.history_window > MAX_REMEMBERED:
            raise ValueError(f"history_windows: times history_window is more than {MAX_REMEMBERED} lengths")
