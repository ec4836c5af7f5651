"""`history`: the lengths of recent responses, as in LightLLM's past-future scheduler.

LightLLM predicts each running request from the distribution of recently finished ones, on the condition that it is
longer than what it has produced so far. This estimator has the distribution; the forecast applies the condition.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from length_tagger.estimate import MAX_SPREAD, Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.keys import key, template_keys_of

NAME = "history"


class HistoryTagger:
    """Keeps the last lengths under several keys of each response, and estimates from the most specific key.

    The keys are, from the most specific: the session, the prompt's template, the client, the model, and all requests. A
    key is used once it has `enough` lengths. Each keeps at most `window` lengths; there are at most `max_windows` keys,
    and the least recently used ones are dropped.
    """

    def __init__(self, *, window: int, enough: int, max_windows: int) -> None:
        """Start empty."""
        self._window = window
        self._enough = enough
        self._max_windows = max_windows
        self._windows: OrderedDict[int, Window] = OrderedDict()

    def estimate(self, query: Query) -> Estimate | None:
        """Summarise recent responses under the most specific key that has enough of them."""
        for request_key in keys_of(query):
            window = self._windows.get(request_key)
            if window is not None and len(window) >= self._enough:
                median_tokens, spread = window.summary()
                return Estimate(
                    median_tokens=median_tokens,
                    spread=spread,
                    confidence=chance_within_factor_two(spread) * len(window) / (len(window) + self._enough),
                    estimator=NAME,
                )
        return None

    def observe(self, outcome: LengthOutcome) -> None:
        """Record a length under all its keys."""
        for request_key in keys_of(outcome):
            window = self._windows.setdefault(request_key, Window(self._window))
            window.add(outcome.output_tokens)
            self._windows.move_to_end(request_key)
        while len(self._windows) > self._max_windows:
            self._windows.popitem(last=False)

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._windows)


def keys_of(of: Query | LengthOutcome) -> Iterator[int]:
    """Yield the keys of a request, the most specific one first."""
    if of.session_id:
        yield key("session", of.model, of.session_id)
    yield from template_keys_of(of.keys)
    if of.client_id:
        yield key("client", of.model, of.client_id)
    if of.model:
        yield key("model", of.model)
    yield key("anything")


class Window:
    """A window of the last lengths, with their median and spread."""

    __slots__ = ("_lengths", "_oldest", "_size", "_summary")

    def __init__(self, size: int) -> None:
        """Start empty."""
        self._size = size
        self._lengths = array("I")
        self._oldest = 0
        self._summary: tuple[float, float] | None = None

    def __len__(self) -> int:
        """The number of lengths."""
        return len(self._lengths)

    def add(self, tokens: int) -> None:
        """Add a length; a full window drops its oldest."""
        if len(self._lengths) < self._size:
            self._lengths.append(tokens)
        else:
            self._lengths[self._oldest] = tokens
            self._oldest = (self._oldest + 1) % self._size
        self._summary = None

    def summary(self) -> tuple[float, float]:
        """Return the median, and the spread of the log-normal with the same 16th and 84th percentiles.

        A standard deviation of logarithms would depend too much on a few very short responses.
        """
        if self._summary is None:
            ordered = sorted(self._lengths)
            low, median, high = (quantile(ordered, share) for share in (0.1587, 0.5, 0.8413))
            self._summary = median, min(MAX_SPREAD, math.log(high / low) / 2)
        return self._summary


def quantile(ordered: list[int], share: float) -> float:
    """Return a quantile of sorted numbers, by linear interpolation."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
