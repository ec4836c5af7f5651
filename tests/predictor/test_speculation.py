"""What is learnt of draft tokens, and what forecasts expect of them."""

from __future__ import annotations

import math
import random
import re

import pytest

from predictor.config import EngineConfig
from predictor.speculation import (
    METHODS,
    Acceptance,
    AcceptanceLearner,
    DraftTotals,
    ExpectedDrafts,
    approximations_of,
    configured_drafts,
    expected_drafts,
    require_counts,
)


def test_what_is_configured_is_expected_before_anything_is_learnt() -> None:
    """Each token is accepted with one probability after the one before it."""
    drafts = configured_drafts(3, 0.5, 1.0)
    assert drafts.accepted == (0.0, 0.5, 0.75, 0.875)
    assert drafts.rate == pytest.approx(0.875 / 3)


def test_the_rate_is_learnt_by_position() -> None:
    """After thousands of drafts, the expectation is the measured mean at each position."""
    draws = random.Random(1)
    learner = AcceptanceLearner(configured_drafts(3, 0.9, 1.0))
    drafts, accepted = 0, [0, 0, 0]
    for _ in range(200):
        for _ in range(20):
            drafts += 1
            for position, chance in enumerate((0.8, 0.5, 0.1)):
                if draws.random() >= chance:
                    break
                accepted[position] += 1
        learner.observe(DraftTotals(num_drafts=drafts, num_draft_tokens=3 * drafts, accepted=tuple(accepted)))
    found = learner.expected
    assert found.accepted == pytest.approx((0, 0.8, 1.2, 1.24), abs=0.03)
    assert (found.proposed_tokens, found.num_seen) == (3, 4000)


def test_recent_drafts_count_more() -> None:
    """When the answers change, the rate follows within some thousands of drafts."""
    acceptance = Acceptance()
    for _ in range(50):
        acceptance = acceptance.observe(num_drafts=1000, num_draft_tokens=2000, accepted=(900, 800))
    for _ in range(20):
        acceptance = acceptance.observe(num_drafts=1000, num_draft_tokens=2000, accepted=(100, 0))
    assert acceptance.rate == pytest.approx(0.05, abs=0.03)


def test_steps_without_a_draft_are_learnt_too() -> None:
    """N-gram look-up proposes nothing for most steps of some texts."""
    learnt = Acceptance().observe(num_drafts=300, num_draft_tokens=900, accepted=(150, 90, 60), num_chances=3000)
    found = expected_drafts(configured_drafts(3, 0.6, 1.0), learnt)
    assert found.proposal_share == pytest.approx(0.1, abs=0.01)
    assert found.accepted[3] == pytest.approx(1.0, abs=0.05)


def test_short_drafts_are_expected_to_stay_short() -> None:
    """The usual number of tokens is the mean, rounded."""
    learnt = Acceptance().observe(num_drafts=1000, num_draft_tokens=1400, accepted=(500, 100, 0))
    assert expected_drafts(configured_drafts(3, 0.6, 1.0), learnt).proposed_tokens == 1


def test_an_engine_that_restarts_counts_from_zero() -> None:
    """Counters that became lower are all new."""
    learner = AcceptanceLearner(configured_drafts(1, 0.5, 1.0))
    assert learner.observe(DraftTotals(num_drafts=100, num_draft_tokens=100, accepted=(80,)))
    assert learner.observe(DraftTotals(num_drafts=10, num_draft_tokens=10, accepted=(8,)))
    assert learner.expected.num_seen == 110
    assert not learner.observe(DraftTotals(num_drafts=10, num_draft_tokens=10, accepted=(8,)))


def test_nothing_is_known_without_drafts() -> None:
    """The rates of no draft are no numbers."""
    assert math.isnan(Acceptance().rate)
    assert math.isnan(Acceptance().mean_drafted)
    assert math.isnan(Acceptance().proposal_share)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((-1, 0, ()), "num_drafts: must be at least 0, not -1"),
        ((5, 4, ()), "num_draft_tokens: 4 are fewer than num_drafts 5"),
        ((5, 9, (6,)), "accepted.0: must lie between 0 and 5, not 6"),
        ((5, 9, (4, 5)), "accepted.1: must lie between 0 and 4, not 5"),
        ((5, 6, (4, 4)), "accepted: 8 tokens are more than num_draft_tokens 6"),
    ],
)
def test_impossible_counts_are_refused(counts: tuple[int, int, tuple[int, ...]], message: str) -> None:
    """The error names the count."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require_counts(*counts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"accepted": (0.5,)}, "accepted: must start with 0, for no draft token"),
        ({"accepted": (0.0, 1.5)}, "accepted.1: must lie between 0.0 and 1.0, not 1.5"),
        ({"proposal_share": 1.5}, "proposal_share: must lie between 0 and 1, not 1.5"),
        ({"proposed_tokens": 1}, "proposed_tokens: must be below 1, not 1"),
    ],
)
def test_impossible_expectations_are_refused(fields: dict[str, object], message: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ExpectedDrafts(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"speculative_method": "guess"},
            "speculative_method: must be one of ngram, draft_model, eagle, mtp, or empty, not 'guess'",
        ),
        ({"speculative_method": "ngram"}, "num_speculative_tokens: must be at least 1 with speculative_method ngram"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens: must be 0 without one"),
        (
            {"speculative_method": "ngram", "num_speculative_tokens": 33},
            "num_speculative_tokens: must be at most 32, not 33",
        ),
        (
            {"speculative_method": "mtp", "num_speculative_tokens": 2, "num_prefill_lookahead_tokens": 3},
            "num_prefill_lookahead_tokens: 3 are more than num_speculative_tokens 2",
        ),
        ({"speculative_acceptance": 1.5}, "speculative_acceptance: must lie between 0 and 1, not 1.5"),
        ({"speculative_proposals": -1}, "speculative_proposals: must lie between 0 and 1, not -1"),
        ({"draft_step_s": -1.0}, "draft_step_s: must be a time from 0 on, not -1.0"),
        (
            {"speculative_method": "ngram", "num_speculative_tokens": 3, "kv_role": "kv_both"},
            "speculative_method: ngram is not modelled with kv_role kv_both",
        ),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    """The error names the setting and what is possible."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        EngineConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_only_drafters_with_a_cache_reserve_slots(method: str) -> None:
    """N-gram look-up writes no KV cache of its own."""
    config = EngineConfig(speculative_method=method, num_speculative_tokens=4)
    assert config.num_lookahead_tokens == (0 if method == "ngram" else 4)


def test_explanations_name_what_is_assumed() -> None:
    """They tell what was learnt from what was configured."""
    assert approximations_of("", configured_drafts(0, 0.6, 1.0)) == ()
    assert approximations_of("eagle", configured_drafts(1, 0.6, 1.0)) == (
        "speculation (eagle): acceptance 0.60 as configured, no drafts seen",
    )
    learnt = ExpectedDrafts(accepted=(0.0, 0.62), proposed_tokens=1, proposal_share=0.25, num_seen=1234)
    assert approximations_of("ngram", learnt) == (
        "speculation (ngram): acceptance 0.62 learnt from 1,234 drafts, proposed in 0.25 of steps",
    )
