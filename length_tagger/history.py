"""`history`: the lengths of recent answers, LightLLM's past-future idea without the future.

LightLLM predicts each running request from the distribution of recently finished ones, given that it is longer than
what it has produced already. Here are the recent ones; the condition is for whoever forecasts.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from length_tagger.estimate import MOST_SPREAD, Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.keys import key, template_keys_of

NAME = "history"


class HistoryTagger:
    """Remembers the last lengths under every name that an answer goes by, and estimates from the most telling one.

    Names are, from the most telling: the session, what the prompt says, the client, the model, and anything at all.
    One counts as soon as it has `enough` lengths. Each keeps at most `window`, and there are at most `most_windows`
    of them: the ones not heard of for longest are forgotten.
    """

    def __init__(self, *, window: int, enough: int, most_windows: int) -> None:
        """Start knowing nothing."""
        self._window = window
        self._enough = enough
        self._most_windows = most_windows
        self._windows: OrderedDict[int, Window] = OrderedDict()

    def estimate(self, query: Query) -> Estimate | None:
        """Summarise the recent answers that are most like this one."""
        for name in names(query):
            window = self._windows.get(name)
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
        """Remember a length under all its names."""
        for name in names(outcome):
            window = self._windows.setdefault(name, Window(self._window))
            window.add(outcome.output_tokens)
            self._windows.move_to_end(name)
        while len(self._windows) > self._most_windows:
            self._windows.popitem(last=False)

    def __len__(self) -> int:
        """How many names are remembered."""
        return len(self._windows)


def names(of: Query | LengthOutcome) -> Iterator[int]:
    """Under which names a request is remembered, the most telling one first."""
    if of.session_id:
        yield key("session", of.model, of.session_id)
    yield from template_keys_of(of.keys)
    if of.client_id:
        yield key("client", of.model, of.client_id)
    if of.model:
        yield key("model", of.model)
    yield key("anything")


class Window:
    """The last so many lengths, and their median and spread."""

    __slots__ = ("_lengths", "_most", "_oldest", "_summary")

    def __init__(self, most: int) -> None:
        """Start empty."""
        self._most = most
        self._lengths = array("I")
        self._oldest = 0
        self._summary: tuple[float, float] | None = None

    def __len__(self) -> int:
        """How many lengths there are."""
        return len(self._lengths)

    def add(self, tokens: int) -> None:
        """Take in a length, in the place of the oldest where it is full."""
        if len(self._lengths) < self._most:
            self._lengths.append(tokens)
        else:
            self._lengths[self._oldest] = tokens
            self._oldest = (self._oldest + 1) % self._most
        self._summary = None

    def summary(self) -> tuple[float, float]:
        """Give the median, and the spread of the log-normal that has the same 16th and 84th percentiles.

        Percentiles, for a handful of very short answers would pull a standard deviation of logarithms far out.
        """
        if self._summary is None:
            ordered = sorted(self._lengths)
            low, median, high = (quantile(ordered, share) for share in (0.1587, 0.5, 0.8413))
            self._summary = median, min(MOST_SPREAD, math.log(high / low) / 2)
        return self._summary


def quantile(ordered: list[int], share: float) -> float:
    """Interpolate between the two nearest of some sorted numbers."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
