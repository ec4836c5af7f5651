"""The compilation of grammars is estimated, counted once for each grammar, and learnt."""

from __future__ import annotations

import pytest

from predictor.grammar_times import MAX_COMPILE_S, MAX_GRAMMARS, GrammarTimes


def test_only_the_first_request_with_a_grammar_waits_for_all_of_it() -> None:
    """The next one waits for the rest, and later ones not at all; neither do requests without a grammar."""
    times = GrammarTimes(0.5)
    assert times.delay_s(b"", 10.0) == 0.0
    assert times.delay_s(b"a", 10.0) == 0.5
    times.begin(b"a", 10.0, request_id="one", ttft_s=None)
    assert times.delay_s(b"a", 10.2) == pytest.approx(0.3)
    assert times.delay_s(b"a", 11.0) == 0.0
    assert times.delay_s(b"b", 11.0) == 0.5
    times.forget_engine()
    assert times.delay_s(b"a", 11.0) == 0.5


def test_the_time_is_learnt_from_first_tokens() -> None:
    """After some requests the estimate is what first tokens take longer than without a compilation."""
    times = GrammarTimes(0.05)
    for number in range(40):
        name, grammar = str(number), str(number).encode()
        times.begin(grammar, float(number), request_id=name, ttft_s=0.1 + times.delay_s(grammar, float(number)))
        times.observe(name, 0.1 + 0.4)
    assert times.compile_s == pytest.approx(0.4, rel=0.01)


def test_other_requests_and_outliers_teach_little() -> None:
    """Requests without a new grammar teach nothing, and one outlier counts as at most ten seconds."""
    times = GrammarTimes(0.05)
    times.observe("unknown", 9.0)
    times.begin(b"a", 0.0, request_id="one", ttft_s=0.15)
    times.begin(b"a", 0.1, request_id="two", ttft_s=0.15)
    times.observe("two", 9.0)
    times.observe("one", None)
    times.observe("one", 9.0)
    assert times.compile_s == 0.05
    times.begin(b"b", 1.0, request_id="three", ttft_s=0.15)
    times.observe("three", 1e6)
    assert times.compile_s <= 0.05 + 0.2 * MAX_COMPILE_S
    times.begin(b"c", 2.0, request_id="four", ttft_s=9.0)
    times.observe("four", 0.01)  # faster than forecast: it took no time
    assert times.compile_s > 0


def test_the_oldest_grammars_are_forgotten() -> None:
    """The memory is bounded."""
    times = GrammarTimes(0.5)
    for number in range(MAX_GRAMMARS + 1):
        times.begin(str(number).encode(), 0.0, request_id=str(number), ttft_s=1.0)
    assert times.delay_s(b"0", 100.0) == 0.5
    assert times.delay_s(b"1", 100.0) == 0.0
