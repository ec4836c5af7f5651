"""Those whom a decision did not look at one by one, as it saw them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from scheduler.candidate_ranking import Candidate, CandidateStatus
from scheduler.candidates import Candidates
from scheduler.indicators import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Unranked:
    """Who was scored, in columns, which cost little where there are many; and who was left out before that, and why."""

    looked: Candidates
    scores: Column | None = None  # none where forecasts are compared: those are told of one by one
    read: Mapping[str, Column] = field(default_factory=dict)
    age_s: Column | None = None

    def __len__(self) -> int:
        """How many it tells of at most."""
        trail = self.looked.trail
        places = trail[0][1] if trail else self.looked.places
        return len(self.looked.known.instance_ids) if places is None else len(places)

    def candidates(self, but: Collection[str]) -> Iterator[Candidate]:
        """Tell of all but some."""
        for name, why in self.looked.left_out():
            if name not in but:
                yield Candidate(instance_id=name, fate=CandidateStatus.NOT_SHORTLISTED, note=why)
        if self.scores is None or self.age_s is None:
            return
        fate = CandidateStatus.INDICATORS if self.read else CandidateStatus.UNASKED
        for place, name in enumerate(self.looked.instance_ids):
            if name not in but:
                age_s = float(self.age_s[place])
                yield Candidate(
                    instance_id=name,
                    fate=fate,
                    score=float(self.scores[place]),
                    read={indicator: float(column[place]) for indicator, column in self.read.items()},
                    age_s=age_s if age_s < math.inf else 0.0,
                )


def unranked_of(looked: Candidates, scores: Column | None = None, read: Mapping[str, Column] | None = None) -> Unranked:
    """Keep what a decision saw: copies, as instances tell more of themselves all the time."""
    bare = replace(looked, columns={})
    if scores is None:
        return Unranked(looked=bare)
    return Unranked(
        looked=bare,
        scores=scores.copy(),
        read={name: column.copy() for name, column in (read or {}).items()},
        age_s=looked["age_s"],
    )
