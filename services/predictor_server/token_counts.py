"""How many tokens of an answer have passed, read from its events."""

from __future__ import annotations

import re
from dataclasses import dataclass

# In JSON texts a quotation mark is escaped, so these cannot stand inside an answer's own text.
_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})\b')
_ROLE_ONLY = re.compile(rb'"delta"\s*:\s*\{[^{}]*"role"\s*:[^{}]*"content"\s*:\s*(?:""|null)')
_CHOICE = re.compile(rb'"(?:delta|text)"\s*:')
DATA = b"data:"


@dataclass(slots=True)
class TokenCount:
    """Counts the tokens of one stream; `exact` where the engine itself tells with every event."""

    num_tokens: int = 0
    exact: bool = False

    def feed(self, events: bytes) -> bool:
        """Read whole events; tell whether they brought tokens."""
        before = self.num_tokens
        if b'"completion_tokens"' in events and (told := _USAGE.findall(events)):
            self.exact = self.exact or _CHOICE.search(events) is not None
            self.num_tokens = max(self.num_tokens, int(told[-1]))
        if not self.exact:
            self.num_tokens = max(self.num_tokens, before + self._events_with_text(events))
        return self.num_tokens > before

    @staticmethod
    def _events_with_text(events: bytes) -> int:
        """Count an event for a token, but for the one that only says who speaks."""
        return sum(
            1
            for event in events.split(b"\n\n")
            if event.startswith(DATA) and _CHOICE.search(event) is not None and _ROLE_ONLY.search(event) is None
        )
