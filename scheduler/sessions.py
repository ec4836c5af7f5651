"""Where the last request of each session went: what one scheduler remembers, lost with it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from predictor.request import PREFILL
from scheduler.candidates import Candidates
from scheduler.placement import PlacementRequest

MAX_SESSIONS = 65_536
MAX_ID_CHARACTERS = 256  # longer ones are cut, as callers choose them
SESSION_HERE = "session_here"  # the indicator


class SessionMemory:
    """The instance of each session's last request; the session that is unused for longest is forgotten first.

    A session belongs to a model and a tenant. Prefill legs are remembered apart from what answers requests.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        """Start without any session."""
        self._max_sessions = max_sessions
        self._instances: OrderedDict[Hashable, str] = OrderedDict()

    def __len__(self) -> int:
        """The number of sessions."""
        return len(self._instances)

    def instance_of(self, request: PlacementRequest) -> str | None:
        """Return the instance of the session's last request, if it is known."""
        return self._instances.get(_key(request)) if request.session_id else None

    def placed(self, request: PlacementRequest, instance_id: str) -> None:
        """Remember where a request goes."""
        if not request.session_id:
            return
        key = _key(request)
        self._instances[key] = instance_id
        self._instances.move_to_end(key)
        if len(self._instances) > self._max_sessions:
            self._instances.popitem(last=False)

    def look_up(self, request: PlacementRequest, candidates: Candidates) -> None:
        """Add `session_here` to the candidates of a request whose session is known; it is 0 otherwise."""
        instance_id = self.instance_of(request)
        if instance_id is not None:
            here = [name == instance_id for name in candidates.instance_ids]
            candidates.add({SESSION_HERE: np.array(here, np.float64)})


def _key(request: PlacementRequest) -> Hashable:
    names = (request.model, request.client_id, request.session_id)
    return (request.leg == PREFILL, *(name[:MAX_ID_CHARACTERS] for name in names))
