"""A tracker beside an engine that hides tokens from its clients, and only counts them in its metrics."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from statistics import mean

import pytest

from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.mirror.step_tally import StepTally
from predictor.mirror.token_reconciliation import TokenReconciliation
from predictor.mirror.tracker import Tracker
from tests.predictor.mirror.tracked_engine import (
    A30,
    DELAY_S,
    ROOMY,
    EngineMoment,
    as_seen_by_proxy,
    moments_of,
    random_requests,
)

SCRAPE_S = 0.5
PACE = 1.6


@dataclass(slots=True, kw_only=True)
class Comparison:
    """The tracker's errors at every moment since it has learnt the pace."""

    paces: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # mean tokens that running requests are behind


def follow(tracker: Tracker, hidden: float, seed: int, num_unknown: int = 0, *, scrapes: bool = True) -> Comparison:
    """Report an event for each token, except for those of hidden steps, and metrics twice a second.

    The tokens of a hidden step arrive with the next step's, as one event, as with vLLM's busy frontend.
    """
    requests = random_requests(seed, num=60)
    reconciliation, scraped_s, comparison = TokenReconciliation(tracker, 0.01), 0.0, Comparison()
    coming = sorted(requests, key=lambda one: one.arrival_s)
    lengths = {one.request_id: one.output_tokens for one in requests}
    events, reported = dict.fromkeys(lengths, 0), dict.fromkeys(lengths, 0)
    draw = random.Random(seed)
    for num_moments, moment in enumerate(moments_of(tracker.engine.config, requests, PACE)):
        now_s = moment.at_s + DELAY_S
        while coming and coming[0].arrival_s <= now_s:
            tracker.add(as_seen_by_proxy(coming.pop(0)), streamed=True)
        is_hidden = draw.random() < hidden
        for name, count in moment.output_tokens.items():
            ended = count == lengths[name]
            if count == reported[name] or (is_hidden and not ended):
                continue
            reported[name] = count
            events[name] += 1
            tracker.receive(name, count if ended else events[name], now_s, ended=ended, exact=ended)
        tracker.advance(now_s)
        if scrapes and now_s - scraped_s > SCRAPE_S:
            scraped_s = now_s
            reconciliation.reconcile(metrics_at(moment, num_unknown, num_moments), now_s)
        if now_s > 3.0 and len(moment.running) == ROOMY.max_num_seqs:
            compare(tracker, moment, comparison)
    return comparison


def metrics_at(moment: EngineMoment, num_unknown: int, num_moments: int) -> ScrapedMetrics:
    """Return the engine's metrics, unknown requests included."""
    return ScrapedMetrics(
        generation_tokens=float(sum(moment.output_tokens.values()) + num_unknown * num_moments),
        running=float(len(moment.running) + num_unknown),
        waiting=float(len(moment.waiting)),
    )


def compare(tracker: Tracker, moment: EngineMoment, comparison: Comparison) -> None:
    """Record the tracker's errors."""
    comparison.paces.append(tracker.correction.factor)
    comparison.lags.append(
        mean(
            moment.output_tokens[name] - tracker.engine.output_tokens(name)
            for name in moment.running
            if name in tracker.requests
        )
    )


@pytest.mark.parametrize("hidden", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("is_async", [False, True])
def test_hidden_steps_are_counted_by_the_metrics(hidden: float, is_async: bool) -> None:
    """However many steps no client sees, the pace is learnt, and the model keeps up with the engine."""
    config = replace(ROOMY, async_scheduling=is_async)
    comparison = follow(Tracker(config, A30.step_time, 0.0), hidden, seed=1)
    assert len(comparison.paces) > 300
    assert mean(comparison.paces) == pytest.approx(PACE, rel=0.05)
    assert max(abs(pace / PACE - 1) for pace in comparison.paces) < (0.05 if not hidden else 0.3)
    assert abs(mean(comparison.lags)) < 1 + 10 * hidden


def test_without_metrics_hidden_steps_look_like_slow_ones() -> None:
    """Only the engine's token counter distinguishes them."""
    comparison = follow(Tracker(ROOMY, A30.step_time, 0.0), 0.5, seed=1, scrapes=False)
    assert mean(comparison.paces) > 1.3 * PACE


def test_token_counts_of_other_requests_are_ignored() -> None:
    """Where the engine runs unknown requests too, its token counter does not show the progress of the known ones."""
    comparison = follow(Tracker(ROOMY, A30.step_time, 0.0), 0.0, seed=1, num_unknown=4)
    assert max(map(abs, comparison.lags)) <= 1
    assert set(comparison.paces) == {1.0}


def test_a_tally_sums_up_ended_steps() -> None:
    """A step that was replaced counts for nothing, its time for the one instead; the last one may be discarded."""
    tally = StepTally()
    tally.plan(1.0, 0.1)
    tally.plan(1.2, 0.1)
    tally.close(1.2, 1)
    assert tally.take() is None
    tally.cut(1.2, 1)
    tally.plan(1.2, 0.3)
    tally.close(1.8, 0)
    assert tally.take() == (pytest.approx(2.0), 1)
    tally.plan(1.8, 0.3)
    tally.close(3.6, 0)
    tally.discard_last()
    assert tally.take() == (pytest.approx(2.0), 1)
    tally.plan(4.0, 0.1)
    tally.close(4.1, 0)
    assert tally.take() is None
