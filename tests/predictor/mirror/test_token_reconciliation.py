"""The tracker beside an engine that hides tokens from its clients, and tells only how many there were."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from statistics import mean

import pytest

from predictor.mirror.engine_totals import EngineTotals
from predictor.mirror.step_tally import StepTally
from predictor.mirror.token_reconciliation import TokenReconciliation
from predictor.mirror.tracker import Tracker
from tests.predictor.mirror.tracked_engine import (
    A30,
    DELAY_S,
    ROOMY,
    Moment,
    lived,
    requests,
    unknown_length,
)

EVERY_S = 0.5
PACE = 1.6


@dataclass(slots=True, kw_only=True)
class Seen:
    """How the tracker stood, moment by moment, since its pace was learnt."""

    paces: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)  # tokens of those that run, on average


def follow(tracker: Tracker, hides: float, seed: int, strangers: int = 0, *, reads: bool = True) -> Seen:
    """Tell it an event for each token but those of steps that are hidden, and totals twice a second.

    What a hidden step brought comes with the next one's tokens, as one event, as vLLM's busy frontend does it.
    """
    asked = requests(seed, num=60)
    reckoning, read_s, seen = TokenReconciliation(tracker, 0.01), 0.0, Seen()
    coming = sorted(asked, key=lambda one: one.arrival_s)
    lengths = {one.request_id: one.output_tokens for one in asked}
    events, came = dict.fromkeys(lengths, 0), dict.fromkeys(lengths, 0)
    draw = random.Random(seed)
    for num_moments, moment in enumerate(lived(tracker.engine.config, asked, PACE)):
        now_s = moment.at_s + DELAY_S
        while coming and coming[0].arrival_s <= now_s:
            tracker.add(unknown_length(coming.pop(0)), streamed=True)
        is_hidden = draw.random() < hides
        for name, count in moment.output_tokens.items():
            ended = count == lengths[name]
            if count == came[name] or (is_hidden and not ended):
                continue
            came[name] = count
            events[name] += 1
            tracker.produced(name, count if ended else events[name], now_s, ended=ended, exact=ended)
        tracker.run_to(now_s)
        if reads and now_s - read_s > EVERY_S:
            read_s = now_s
            reckoning.read(totals_at(moment, strangers, num_moments), now_s)
        if now_s > 3.0 and len(moment.running) == ROOMY.max_num_seqs:
            note(tracker, moment, seen)
    return seen


def totals_at(moment: Moment, strangers: int, num_moments: int) -> EngineTotals:
    """What the engine's metrics say, others' requests included."""
    return EngineTotals(
        generation_tokens=float(sum(moment.output_tokens.values()) + strangers * num_moments),
        running=float(len(moment.running) + strangers),
        waiting=float(len(moment.waiting)),
    )


def note(tracker: Tracker, moment: Moment, seen: Seen) -> None:
    """Write down how it stands."""
    rows = tracker.engine.state.requests
    seen.paces.append(tracker.correction.factor)
    seen.behind.append(
        mean(
            moment.output_tokens[name] - int(rows[tracker.requests[name].slot].output_tokens)
            for name in moment.running
            if name in tracker.requests
        )
    )


@pytest.mark.parametrize("hides", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("is_async", [False, True])
def test_tokens_that_come_as_one_event_do_not_lead_astray(hides: float, is_async: bool) -> None:
    """However many steps no client sees, their pace is learnt, and the model keeps up with the engine."""
    config = replace(ROOMY, async_scheduling=is_async)
    seen = follow(Tracker(config, A30.step_time, 0.0), hides, seed=1)
    assert len(seen.paces) > 300
    assert mean(seen.paces) == pytest.approx(PACE, rel=0.05)
    assert max(abs(pace / PACE - 1) for pace in seen.paces) < (0.05 if not hides else 0.3)
    assert abs(mean(seen.behind)) < 1 + 10 * hides


def test_without_totals_hidden_steps_look_like_slow_ones() -> None:
    """That is what the engine's count of its tokens is for."""
    seen = follow(Tracker(ROOMY, A30.step_time, 0.0), 0.5, seed=1, reads=False)
    assert mean(seen.paces) > 1.3 * PACE


def test_counts_of_other_requests_are_left_alone() -> None:
    """Where the engine runs more requests than are known, its tokens do not tell how far these have come."""
    seen = follow(Tracker(ROOMY, A30.step_time, 0.0), 0.0, seed=1, strangers=4)
    assert max(map(abs, seen.behind)) <= 1
    assert set(seen.paces) == {1.0}


def test_a_tally_goes_from_step_to_step() -> None:
    """A step that was given up counts for nothing, its time for the one that began instead; the last one may be lost."""
    tally = StepTally()
    tally.plan(1.0, 0.1)
    tally.plan(1.2, 0.1)
    tally.close(1.2, 1)
    assert tally.taken() is None
    tally.cut(1.2, 1)
    tally.plan(1.2, 0.3)
    tally.close(1.8, 0)
    assert tally.taken() == (pytest.approx(2.0), 1)
    tally.plan(1.8, 0.3)
    tally.close(3.6, 0)
    tally.lose()
    assert tally.taken() == (pytest.approx(2.0), 1)
    tally.plan(4.0, 0.1)
    tally.close(4.1, 0)
    assert tally.taken() is None
