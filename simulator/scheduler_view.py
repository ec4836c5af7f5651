"""A simulated scheduler: the decision core that live schedulers run, and what it knows of the instances."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.core import SchedulerCore
from scheduler.instance_table import IN_FLIGHT, InstanceTable
from scheduler.policy import Policy


@dataclass(slots=True, kw_only=True)
class SchedulerView:
    """One scheduler. Where instances report late, it adds what it sent to them since."""

    core: SchedulerCore
    sent: deque[tuple[float, int, tuple[float, float, float]]] = field(default_factory=deque)

    @property
    def policy(self) -> Policy:
        """The policy that it decides by."""
        return self.core.policy

    @property
    def table(self) -> InstanceTable:
        """What it knows of the instances."""
        return self.core.instances.table

    def take_reports(self, reported_s: float, reported: npt.NDArray[np.float64]) -> None:
        """Take what all instances reported at a time; requests sent since are added."""
        known = self.table.known
        known.reported[:] = reported
        known.reported_s[:] = reported_s
        while self.sent and self.sent[0][0] <= reported_s:
            self.sent.popleft()
        for _, row, share in self.sent:
            known.reported[IN_FLIGHT, row] += share

    def note_sent(self, row: int, shown_s: float, prompt_tokens: int, block_size: int) -> None:
        """Count a request as in flight until a report that includes it, from `shown_s` on."""
        share = (1.0, float(-(-prompt_tokens // block_size)), float(prompt_tokens))
        self.sent.append((shown_s, row, share))
        self.table.known.reported[IN_FLIGHT, row] += share
