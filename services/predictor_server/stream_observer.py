"""What a proxy tells the mirror of one body that passes."""

from __future__ import annotations

from dataclasses import dataclass

from services.predictor_server.mirror import MirroredEngine
from services.predictor_server.token_counts import TokenCount


@dataclass(slots=True, kw_only=True)
class StreamObserver:
    """What is noted of one body, which may stand for several requests of the engine."""

    mirror: MirroredEngine
    names: tuple[str, ...]
    prompt_tokens: int | None = None
    _tokens: TokenCount | None = None
    _told: int | None = None
    _ended: bool = False

    @property
    def count_so_far(self) -> int:
        """How many tokens were counted."""
        return self._tokens.num_tokens if self._tokens is not None else 0

    def count(self, prompt_tokens: int) -> None:
        """Note the length of the prompt."""
        if not self._ended:
            for name in self.names:
                self.mirror.counted(name, prompt_tokens)

    def tokens(self, events: bytes) -> None:
        """Note the tokens that events bring."""
        if self._tokens is None:
            self._tokens = TokenCount()
        if self._tokens.feed(events) and len(self.names) == 1:
            self.mirror.produced(self.names[0], self._tokens.num_tokens, exact=self._tokens.exact)

    def told(self, num_tokens: int, prompt_tokens: int | None) -> None:
        """Note what the whole answer tells at its end."""
        self._told, self.prompt_tokens = num_tokens, prompt_tokens

    def end(self) -> None:
        """Note the end."""
        self._ended = True
        completed = self._told is not None
        num_tokens = self._told if self._told is not None else self.count_so_far
        exact = completed and self.prompt_tokens is not None  # the engine has counted, and not only its events were
        for name in self.names:
            self.mirror.ended(name, num_tokens // max(1, len(self.names)), completed=completed, exact=exact)
