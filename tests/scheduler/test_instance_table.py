"""What is known of instances: kept as they come and go, given with its age, corrected for what was sent since."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler.candidates import RequestIndicators
from scheduler.indicators import INDICATORS, IndicatorSource, require_indicator, roots_of
from scheduler.instance_table import InstanceTable
from services.rpc.messages import INDICATOR_FIELDS


def test_what_instances_tell_is_what_the_wire_carries() -> None:
    """The names are the same on the wire, in policies, and in explanations."""
    reported = {name for name, one in INDICATORS.items() if one.source is IndicatorSource.REPORTED} - {"age_s"}
    assert reported == set(INDICATOR_FIELDS)


def test_instances_are_in_the_order_of_their_ids() -> None:
    """So that the first of equals has the least id, however they were listed."""
    assert InstanceTable(["c", "a", "b", "a"]).candidates().instance_ids == ("a", "b", "c")


def test_who_stays_is_known_as_before_and_who_returns_is_new() -> None:
    """Numbers are never given twice; a stranger's indicators are not known."""
    table = InstanceTable("ac")
    table.replace("a", {"num_running": 3.0}, now_s=5.0)
    table.replace("c", {"num_running": 7.0}, now_s=5.0)
    table.sent("c", 6.0)
    a, c = table.known.numbers.tolist()
    table.follow("bc")
    candidates = table.candidates(now_s=7.0)
    assert candidates.instance_ids == ("b", "c")
    assert np.isnan(candidates["num_running"][0])
    assert candidates["num_running"][1] == 7.0
    assert candidates["requests_per_minute"].tolist() == [0.0, 1.0]
    assert candidates["age_s"].tolist() == [math.inf, 2.0]
    table.follow("abc")
    assert len({a, c, *table.known.numbers.tolist()}) == 4
    assert np.isnan(table.candidates()["num_running"][0])
    table.follow("")
    assert len(table.candidates(now_s=1e3)) == 0


def test_what_is_not_told_any_more_is_not_known_any_more() -> None:
    """A whole message replaces all; an update only what it names; names that nobody knows are passed over."""
    table = InstanceTable("a")
    table.replace("a", {"num_running": 3.0, "num_waiting": 1.0, "novelty": 9.0}, now_s=0.0)
    table.update("a", {"num_waiting": 2.0, "novelty": 9.0}, now_s=1.0, age_s=0.25)
    assert table.candidates()["num_running"].tolist() == [3.0]
    assert table.candidates()["batch_size"].tolist() == [5.0]
    assert table.candidates(now_s=2.0)["age_s"].tolist() == [1.25]
    table.replace("a", {"num_waiting": 4.0}, now_s=3.0)
    assert np.isnan(table.candidates()["num_running"]).all()
    assert np.isnan(table.candidates()["batch_size"]).all()
    assert table.candidates()["num_reserved"].tolist() == [0.0]


def test_a_request_that_was_sent_is_there_until_the_instance_tells() -> None:
    """Two decisions in a row do not rest on the same numbers."""
    table = InstanceTable("ab")
    for name in "ab":
        table.replace(name, {"num_running": 3.0, "num_waiting": 0.0, "queued_prefill_tokens": 0.0}, now_s=0.0)
    table.sent("a", 0.1, prefill_tokens=100.0, blocks=7.0)
    candidates = table.candidates(now_s=0.1)
    assert candidates["batch_size"].tolist() == [4.0, 3.0]
    assert candidates["queued_prefill_tokens"].tolist() == [100.0, 0.0]
    assert candidates["num_reserved_blocks"].tolist() == [7.0, 0.0]
    table.replace("a", {"num_running": 4.0, "num_waiting": 0.0, "queued_prefill_tokens": 0.0}, now_s=0.2)
    assert table.candidates(now_s=0.2)["batch_size"].tolist() == [4.0, 3.0]


def test_a_request_on_its_way_counts_whatever_is_told_meanwhile() -> None:
    """Two at once: the answer to one says nothing of the other; when both have arrived, what was reported holds."""
    table = InstanceTable("ab")
    reported = {"num_running": 0.0, "num_waiting": 0.0, "queued_prefill_tokens": 0.0}
    table.replace("a", {**reported, "num_reserved": 0.0}, now_s=0.0)

    def sizes() -> tuple[float, float]:
        candidates = table.candidates(now_s=0.1)
        return candidates["batch_size"][0], candidates["queued_prefill_tokens"][0]

    with table.in_flight("a", 0.1, prefill_tokens=100.0, blocks=7.0):
        with table.in_flight("a", 0.1, prefill_tokens=10.0, blocks=1.0):
            assert sizes() == (2.0, 110.0)
        table.replace("a", {**reported, "num_reserved": 1.0, "queued_prefill_tokens": 10.0}, now_s=0.2)
        assert sizes() == (2.0, 110.0)
    table.replace("a", {**reported, "num_reserved": 2.0, "queued_prefill_tokens": 110.0}, now_s=0.3)
    assert sizes() == (2.0, 110.0)
    assert table.candidates(now_s=0.3)["requests_per_minute"].tolist() == [2.0, 0.0]
    with table.in_flight("a", 0.4), table.in_flight("b", 0.4):
        table.follow("b")
        table.follow("ab")
        table.replace("a", {**reported, "num_reserved": 0.0}, now_s=0.5)
        assert sizes() == (0.0, 0.0)
    assert sizes() == (0.0, 0.0)


def test_some_of_some_are_still_who_they_are() -> None:
    """Rows and ids stay right through two choices, and so do columns of the request."""
    table = InstanceTable("abcdef")
    for place, name in enumerate("abcdef"):
        table.replace(name, {"num_running": float(place)}, now_s=0.0)
    candidates = table.candidates(RequestIndicators(prompt_tokens=10))
    candidates.add({"prefix_hit_tokens": np.arange(6.0)})
    few = candidates.only(np.array([1, 3, 5])).only(np.array([0, 2]))
    assert few.instance_ids == ("b", "f") == tuple(few.instance_id(which) for which in range(2))
    assert [few.row(which) for which in range(2)] == [1, 5]
    assert few["num_running"].tolist() == [1.0, 5.0] == few["prefix_hit_tokens"].tolist()
    assert few["new_prefill_tokens"].tolist() == [9.0, 5.0]
    assert few.numbers.tolist() == [1, 5]
    assert len(few) == 2


def test_new_prefill_is_at_least_one_token() -> None:
    """An engine computes the last token of a prompt even where all of it is cached."""
    candidates = InstanceTable("a").candidates(RequestIndicators(prompt_tokens=32, tag_tokens=7.0))
    candidates.add({"prefix_hit_tokens": np.array([32.0])})
    assert candidates["new_prefill_tokens"].tolist() == [1.0]
    assert candidates["prefix_hit_ratio"].tolist() == [1.0]
    assert candidates["prompt_tokens"].tolist() == [32.0]
    assert candidates["tag_tokens"].tolist() == [7.0]


def test_indicators_say_what_they_are() -> None:
    """Each has a name, a unit, a meaning; an unknown one is refused with the nearest."""
    for name, indicator in INDICATORS.items():
        assert name == indicator.name
        assert indicator.unit
        assert indicator.meaning
        assert (indicator.formula is not None) == bool(indicator.of) == (indicator.source is IndicatorSource.DERIVED)
    with pytest.raises(ValueError, match="did you mean num_running"):
        require_indicator("num_runing")
    assert {one.name for one in roots_of(["p_tokens"])} == {
        "queued_prefill_tokens",
        "prefix_hit_tokens",
        "prompt_tokens",
    }
