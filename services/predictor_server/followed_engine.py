"""An engine whose state file is followed: its last view, its replica, and what is known of its requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictor.engine_replica import EngineReplica
from predictor.forecast import Forecaster
from services.engine_state.view import View


@dataclass(slots=True)
class FollowedEngine:
    """One engine process, with one size of its state file, and the replica that follows it.

    By slot, `serials` has the request that was there at the last read; the other arrays have what is known about it.
    """

    view: View
    replica: EngineReplica
    forecaster: Forecaster
    serials: np.ndarray
    known_tokens: np.ndarray
    tag_median: np.ndarray
    tag_spread: np.ndarray
    held_s: np.ndarray  # for which the blocks of a prefill leg are expected to be held; NaN: for the lease
    learned: np.ndarray  # by slot, the request whose fetch has ended, and has been compared with its prediction

    @classmethod
    def with_replica(cls, view: View, replica: EngineReplica, forecaster: Forecaster) -> FollowedEngine:
        """Start without knowledge of the requests."""
        num_slots = len(view.live)
        return cls(
            view=view,
            replica=replica,
            forecaster=forecaster,
            serials=np.zeros(num_slots, np.uint64),
            known_tokens=np.zeros(num_slots, np.int64),
            tag_median=np.full(num_slots, np.nan),
            tag_spread=np.zeros(num_slots),
            held_s=np.full(num_slots, np.nan),
            learned=np.zeros(num_slots, np.uint64),
        )

    def is_of(self, view: View) -> bool:
        """Return whether a view is of the same process and the same size of its file."""
        return (view.life, view.generation) == (self.view.life, self.view.generation)
