"""How long an engine compiles the grammar of a structured output before it can schedule the request.

vLLM 0.32 compiles beside its loop (`StructuredOutputManager.grammar_init`), passes over the request meanwhile, and
keeps compiled grammars: the next request with the same one waits at most for the rest of a compilation under way.
"""

from __future__ import annotations

DEFAULT_COMPILE_S = 0.05
MAX_COMPILE_S = 10.0
WEIGHT = 0.2  # of each further observation
MAX_GRAMMARS = 1024  # that are remembered; the oldest are forgotten
MAX_PENDING = 1024


class GrammarTimes:
    """Estimates compilations of one engine, and learns from first tokens; times are of one clock."""

    def __init__(self, compile_s: float = DEFAULT_COMPILE_S) -> None:
        """Start with an estimate."""
        self.compile_s = compile_s
        self._ready_s: dict[bytes, float] = {}  # by grammar
        self._pending: dict[str, float] = {}  # by request, its time to the first token without the compilation

    def delay_s(self, grammar: bytes, now_s: float) -> float:
        """Return how long a request with this grammar is not ready; 0 without a grammar."""
        if not grammar:
            return 0.0
        ready_s = self._ready_s.get(grammar)
        return self.compile_s if ready_s is None else max(0.0, ready_s - now_s)

    def begin(self, grammar: bytes, now_s: float, *, request_id: str, ttft_s: float | None) -> None:
        """Note that a request is sent to the engine, with its forecast, which includes the compilation."""
        if not grammar or grammar in self._ready_s:
            return
        if ttft_s is not None:
            _make_room(self._pending, MAX_PENDING)
            self._pending[request_id] = ttft_s - self.compile_s
        _make_room(self._ready_s, MAX_GRAMMARS)
        self._ready_s[grammar] = now_s + self.compile_s

    def observe(self, request_id: str, ttft_s: float | None) -> None:
        """Learn from a request's time to the first token: what it is longer than without the compilation."""
        without_s = self._pending.pop(request_id, None)
        if without_s is None or ttft_s is None:
            return
        observed_s = min(MAX_COMPILE_S, max(0.0, ttft_s - without_s))
        self.compile_s += WEIGHT * (observed_s - self.compile_s)

    def forget_engine(self) -> None:
        """Forget which grammars are compiled, as the engine has restarted."""
        self._ready_s.clear()


def _make_room(known: dict[bytes, float] | dict[str, float], limit: int) -> None:
    while len(known) >= limit:
        del known[next(iter(known))]  # type: ignore[arg-type]  # of either kind
