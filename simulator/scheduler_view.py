"""A simulated scheduler, and what it knows of the instances by what they told and what it sent them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from predictor.state import NOBODY
from scheduler.candidates import Candidates
from scheduler.holding import Queue, Refusals
from scheduler.indicators import ROW_OF
from scheduler.instance_table import InstanceTable
from scheduler.policy import Policy
from scheduler.prefix import PrefixIndex

FINISHED_TOTAL = ROW_OF["num_finished_total"]
ON_ITS_WAY = [ROW_OF[name] for name in ("num_reserved", "num_reserved_blocks", "queued_prefill_tokens")]


@dataclass(slots=True, kw_only=True)
class SchedulerView:
    """One scheduler: its policy, what it knows of the instances, and what it sent lately."""

    policy: Policy
    table: InstanceTable
    prefixes: PrefixIndex | None
    refusals: Refusals
    held: Queue = field(default_factory=Queue)
    sent: deque[tuple[float, int, tuple[float, float, float]]] = field(default_factory=deque)

    def hear(self, told_at_s: float, told: npt.NDArray[np.float64]) -> None:
        """Take what instances told then; what was sent them since counts on top."""
        known = self.table.known
        known.told[:] = told
        known.told_s[:] = told_at_s
        while self.sent and self.sent[0][0] <= told_at_s:
            self.sent.popleft()
        for _, place, share in self.sent:
            known.told[ON_ITS_WAY, place] += share

    def note_sent(self, place: int, shown_s: float, prompt_tokens: int, block_size: int) -> None:
        """Count a request as on its way, until instances tell that know of it from `shown_s` on."""
        share = (1.0, float(-(-prompt_tokens // block_size)), float(prompt_tokens))
        self.sent.append((shown_s, place, share))
        self.table.known.told[ON_ITS_WAY, place] += share

    def best_admitting(self, among: Candidates, now_s: float) -> int:
        """Find the best of those that admit a request, or nobody."""
        finished = self.table.known.told[FINISHED_TOTAL]
        admits = self.policy.admits(among)
        places = np.arange(len(finished)) if among.places is None else among.places
        self.refusals.note(~admits, finished[places], now_s, places)
        admitting = np.flatnonzero(admits)
        if len(admitting) == 0:
            return NOBODY
        return int(admitting[self.policy.choose(among.only(admitting))])

    def worth_asking(self, places: npt.NDArray[np.intp] | None, now_s: float) -> npt.NDArray[np.intp]:
        """Leave out those that have just admitted nobody."""
        finished = self.table.known.told[FINISHED_TOTAL]
        worth = self.refusals.worth_asking(finished if places is None else finished[places], now_s, places)
        return np.flatnonzero(worth) if places is None else places[worth]
