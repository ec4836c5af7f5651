"""The events of a mirrored engine that wait for the next view."""

from __future__ import annotations

from collections import deque

from predictor.mirror.events import OF_REQUESTS, SETTINGS_EVENTS, MirrorEvent, RequestEnded

MAX_EVENTS = 1 << 20
PRUNED_EVENTS = 4096  # that wait without a model, before those of ended requests are dropped


class EventBacklog:
    """Events with their times, in the order of their arrival; the oldest are lost where there are too many."""

    def __init__(self) -> None:
        """Start without events."""
        self._events: deque[tuple[float, MirrorEvent]] = deque(maxlen=MAX_EVENTS)
        self._pruned_events = PRUNED_EVENTS

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self._events)

    def add(self, event: MirrorEvent, at_s: float) -> None:
        """Keep an event."""
        self._events.append((at_s, event))

    def first(self, until_s: float) -> tuple[float, MirrorEvent] | None:
        """Return the first event, and its time; None where there is none until `until_s`."""
        return self._events[0] if self._events and self._events[0][0] <= until_s else None

    def drop_first(self) -> None:
        """Remove the first event."""
        self._events.popleft()

    def take_settings(self) -> list[tuple[float, MirrorEvent]]:
        """Remove the events with the engine's settings, and return them."""
        settings = [one for one in self._events if isinstance(one[1], SETTINGS_EVENTS)]
        for one in settings:
            self._events.remove(one)
        return settings

    def drop_ended(self) -> None:
        """Drop the events of ended requests, whenever twice as many events wait as were left the last time."""
        if len(self._events) < self._pruned_events:
            return
        ended = {event.name for _, event in self._events if isinstance(event, RequestEnded)}
        for _ in range(len(self._events)):
            kept = self._events.popleft()
            if not (isinstance(kept[1], OF_REQUESTS) and kept[1].name in ended):
                self._events.append(kept)
        self._pruned_events = max(PRUNED_EVENTS, 2 * len(self._events))

    def clear(self) -> None:
        """Drop all events."""
        self._events.clear()
