"""vLLM 0.32's cache of encoder outputs in plain Python: which images each request refers to, and which can be removed."""

from __future__ import annotations

from typing import Any

Image = dict[str, Any]  # position, tokens, identity


class EncoderCache:
    """Outputs by identity, the requests that refer to each, and those without one, the oldest first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.holders: dict[str, set[str]] = {}
        self.tokens: dict[str, int] = {}
        self.unused: list[str] = []
        self.inputs: dict[str, set[int]] = {}  # by request: the places of its images whose outputs it refers to

    def used(self, *, also_unused: bool) -> int:
        """Return the tokens of all outputs, or of those that requests refer to."""
        return sum(count for name, count in self.tokens.items() if also_unused or name not in self.unused)

    def refer(self, request: str, place: int, image: Image) -> bool:
        """Let a request refer to the output of one of its images, if it is there."""
        name = image["identity"]
        if name not in self.holders:
            return False
        if name in self.unused:
            self.unused.remove(name)
        self.holders[name].add(request)
        self.inputs.setdefault(request, set()).add(place)
        return True

    def make_room(self, tokens: int) -> bool:
        """Remove unused outputs, the oldest first, until so many tokens are free."""
        if tokens > self.size - self.used(also_unused=False):
            return False
        while tokens > self.size - self.used(also_unused=True):
            name = self.unused.pop(0)
            del self.holders[name], self.tokens[name]
        return True

    def add(self, request: str, place: int, image: Image) -> None:
        """Add the output of an image that a step computes."""
        name = image["identity"]
        self.holders.setdefault(name, set()).add(request)
        self.tokens[name] = image["tokens"]
        self.inputs.setdefault(request, set()).add(place)

    def release(self, request: str, images: list[Image], places: list[int]) -> None:
        """Let a request refer to these images no more."""
        for place in places:
            self.inputs[request].discard(place)
            name = images[place]["identity"]
            if any(images[other]["identity"] == name for other in self.inputs[request]):
                continue
            self.holders[name].discard(request)
            if not self.holders[name]:
                self.unused.append(name)
