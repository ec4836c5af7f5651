"""The tally of attained targets."""

from __future__ import annotations

from predictor.gain import missed, response_attainment
from predictor.request import Slo
from services.attainment import MAX_PRIORITIES, MAX_WEIGHT, AttainmentTally
from services.bounded_label import OTHER


def test_counts_by_class_and_priority() -> None:
    """Tokens, their weights and targets are summed up; a request without a target does not count in it."""
    tally = AttainmentTally()
    whole = response_attainment(Slo(ttft_s=1.0, tpot_s=0.5), num_tokens=4, tokens_on_time=3, ttft_s=0.5, tpot_s=0.75)
    tally.add(whole, request_class="real-time", priority=0, weight=2.0)
    tally.add(missed(Slo(tpot_s=1.0), 0), request_class="real-time", priority=0, weight=1.0)
    tally.add(missed(Slo(ttft_s=1.0), 0), request_class="best-effort", priority=0, weight=1.0)
    groups = dict(tally.groups())
    assert list(groups) == [("real-time", "0"), ("best-effort", "0")]
    counts = groups["real-time", "0"]
    assert (counts.tokens_due, counts.tokens_on_time, counts.possible_gain, counts.gain) == (4, 3, 8.0, 6.0)
    assert counts.num_with == {"ttft": 1, "tpot": 2, "slo": 2, "deadlines": 1}
    assert counts.num_attained == {"ttft": 1, "tpot": 0, "slo": 0, "deadlines": 0}


def test_one_request_does_not_outweigh_all_others() -> None:
    """Clients choose weights; what is above the limit counts as the limit."""
    tally = AttainmentTally()
    for weight in (1e308, 1e308, 1.0):
        tally.add(missed(Slo(ttft_s=1.0), 0), request_class="real-time", priority=0, weight=weight)
    ((_, counts),) = tally.groups()
    assert counts.possible_gain == 2 * MAX_WEIGHT + 1


def test_labels_stay_few() -> None:
    """The first priorities have labels of their own, and keep them; all others share one."""
    tally = AttainmentTally()
    for priority in (*range(3 * MAX_PRIORITIES), 0, 3 * MAX_PRIORITIES):
        tally.add(missed(Slo(ttft_s=1.0), 0), request_class="real-time", priority=priority, weight=1.0)
    tokens = {label: counts.tokens_due for (_, label), counts in tally.groups()}
    assert len(tokens) == MAX_PRIORITIES + 1
    assert (tokens["0"], tokens[OTHER]) == (2, 2 * MAX_PRIORITIES + 1)
