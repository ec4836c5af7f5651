"""Which instances of a simulated cluster may get a request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.fleet_arrays import EngineArrays


class AvailableInstances:
    """The instances that are up and do not leave, which of them could serve a request, and for how long they were up.

    An instance that leaves finishes what it has, and gets nothing new. One that was removed is not up, and an outage
    that ends does not bring it back.
    """

    def __init__(self, num_instances: int, possible: npt.NDArray[np.bool_] | None) -> None:
        """Start with all instances up; `possible` says per request and instance whether it is large enough.

        It is None where all instances can serve all requests.
        """
        self.possible = possible
        self.leaving: set[int] = set()
        self.removed: set[int] = set()
        self._up_since = dict.fromkeys(range(num_instances), 0.0)
        self._up_s = 0.0  # of instances that are down again
        self._rows: npt.NDArray[np.intp] | None = None  # those that may get requests; None where all may

    @property
    def up(self) -> list[int]:
        """The instances that are up."""
        return list(self._up_since)

    def up_s(self, end_s: float) -> float:
        """Return the time for which instances were up until the end, summed."""
        return self._up_s + sum(end_s - since_s for since_s in self._up_since.values())

    def came_up(self, fleet: EngineArrays, index: int, time_s: float) -> None:
        """Note that an instance is up again."""
        fleet.instances[index].up = fleet.instances[index].changed = 1
        self._up_since[index] = time_s
        self.update(fleet)

    def went_down(self, fleet: EngineArrays, index: int, time_s: float) -> None:
        """Note that an instance is no longer up."""
        fleet.instances[index].up = 0
        self._up_s += time_s - self._up_since.pop(index, time_s)  # it may be down already
        self.update(fleet)

    def update(self, fleet: EngineArrays) -> None:
        """Determine which instances may get requests, after a change of `leaving`."""
        up = fleet.instances.up.astype(bool)
        up[list(self.leaving)] = False
        self._rows = None if up.all() else np.flatnonzero(up)

    def able(self, number: int) -> npt.NDArray[np.intp] | None:
        """Return the instances that could serve a request now; None for all."""
        if self.possible is None:
            return self._rows
        able = self.possible[number]
        if self._rows is None:
            return None if able.all() else np.flatnonzero(able)
        some: npt.NDArray[np.intp] = self._rows[able[self._rows]]
        return some

    def is_ever_able(self, number: int) -> bool:
        """Return whether an instance could serve a request if it were up."""
        return self.possible is None or bool(self.possible[number].any())
