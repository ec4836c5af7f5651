"""What a decision asks its driver to do, and what the driver gives back.

Ask(candidates, leg), AskLegs(asks)   ->  answers(...): an Answer for each instance
Reserve(instance, leg, if_version)    ->  reserved(...), conflict(...) or reservation_failed(...)
Release(instance)                     ->  released(...)
Wait(until)                           ->  tick(now), at that time or when the decision is in `core.ready`
Placed(placement), Shed(reason)           the end
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from predictor.forecast_result import TO_THE_END, Forecast
from predictor.request import SERVE
from scheduler.candidate import CandidateStatus
from scheduler.candidates import Candidates

if TYPE_CHECKING:
    from scheduler.decision import Decision


class Ask(NamedTuple):
    """Have instances forecast a leg of the request that arrives there in `in_s`.

    The policy compares `candidates`; `others` are asked as well. `until` says how far a forecast has to be simulated
    (`TO_THE_END`, `ALL_KEPT`, `OTHERS_KEPT`, `OTHERS_KEPT_AND_START` or `FIRST_TOKEN`; those of the others' deadlines
    may end where there is less slack than `min_slack_s`). A forecast that was simulated further is accepted too.
    """

    candidates: Candidates
    others: Sequence[str]
    with_delays: bool
    leg: str = SERVE
    in_s: float = 0.0
    until: int = TO_THE_END
    min_slack_s: float = 0.0

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """All instances to ask."""
        return (*self.candidates.instance_ids, *self.others)

    @property
    def asks(self) -> tuple[Ask, ...]:
        """The parts of the fan-out: this one."""
        return (self,)


class AskLegs(NamedTuple):
    """Have instances forecast in one fan-out, each of them one leg; the answers are given together."""

    asks: tuple[Ask, ...]

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """All instances to ask; no two parts ask the same one."""
        return tuple(name for ask in self.asks for name in ask.instance_ids)


class Reserve(NamedTuple):
    """Have an instance reserve a leg that arrives in `in_s`, if its count of reservations is still `if_version`.

    Without `if_version` it reserves in any case. `held_s` is how long the KV blocks of a prefill leg are predicted to
    be held after its end, None if that is unknown.
    """

    instance_id: str
    row: int
    if_version: int | None
    if_epoch: int | None
    forecast: Forecast | None
    leg: str = SERVE
    in_s: float = 0.0
    held_s: float | None = None


class Release(NamedTuple):
    """Have an instance end the reservation that this decision made there."""

    instance_id: str


class Wait(NamedTuple):
    """Wait in the admission queue."""

    until_s: float


class Placed(NamedTuple):
    """The request has a placement: that of the decision."""

    decision: Decision


class Shed(NamedTuple):
    """The request is refused: a ValueError blames the request, a ConnectionError the instances."""

    error: Exception
    retry_after_s: float | None = None


Intention = Ask | AskLegs | Reserve | Release | Wait | Placed | Shed


class Answer(NamedTuple):
    """What one instance answered when it was asked: a forecast, or the status and note of its failure."""

    status: CandidateStatus
    forecast: Forecast | None = None
    version: int = 0
    epoch: int = 0
    note: str = ""
    answered_s: float = 0.0


STATUS_OF, FORECAST_IN = itemgetter(0), itemgetter(1)
NO_ANSWER = Answer(CandidateStatus.LATE, note="no answer")
