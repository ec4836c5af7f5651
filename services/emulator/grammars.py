"""The compilation of grammars by an emulated engine: a fixed time for each new one."""

from __future__ import annotations

import math
import time

MAX_GRAMMARS = 4096  # that stay compiled


class GrammarCompiler:
    """Knows which grammars are compiled, and until when others are."""

    def __init__(self, compile_s: float) -> None:
        """Set the time of a compilation on the wall clock."""
        if not (math.isfinite(compile_s) and compile_s >= 0):
            raise ValueError(f"grammar_compile_s: must be a time from 0 on, not {compile_s}")
        self._compile_s = compile_s
        self._ready_s: dict[bytes, float] = {}

    def delay_s(self, grammar: bytes) -> float:
        """Return how long a request with a grammar has to wait; the first one starts the compilation."""
        if not grammar:
            return 0.0
        now_s = time.monotonic()
        if grammar not in self._ready_s:
            if len(self._ready_s) >= MAX_GRAMMARS:
                del self._ready_s[next(iter(self._ready_s))]
            self._ready_s[grammar] = now_s + self._compile_s
        return max(0.0, self._ready_s[grammar] - now_s)
