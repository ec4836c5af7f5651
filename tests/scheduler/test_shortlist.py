"""Few of many: the lowest, or drawn ones; and how policies are put together from that, as users write them."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from scheduler.instance_table import InstanceTable
from scheduler.policy import policy_from
from scheduler.shortlist import RandomSampler, lowest
from scheduler.spec import spec_from
from tests.fleets import fleet, random_fleet


def test_the_lowest_are_those_that_a_full_sort_would_give() -> None:
    """With ties, infinities and what is not known, with and without a tie-break."""
    rng = np.random.default_rng(0)
    for _ in range(3000):
        num = int(rng.integers(1, 30))
        scores = rng.choice([-np.inf, -1.0, 0.0, 1.0, 2.0, np.inf, np.nan], num)
        ties = rng.choice([0.0, 1.0, np.nan], num)
        k = int(rng.integers(1, num + 1))
        ranks = np.where(np.isnan(scores), np.inf, scores)
        assert lowest(scores, k).tolist() == sorted(np.argsort(ranks, kind="stable")[:k])
        ordered = np.lexsort((np.where(np.isnan(ties), np.inf, ties), ranks))
        assert lowest(scores, k, ties).tolist() == sorted(ordered[:k])


def test_every_set_is_drawn_as_often() -> None:
    """Pairs of five: ten of them, evenly; in order, never one twice; seeded."""
    draws = RandomSampler(np.random.default_rng(1))
    counts = Counter(tuple(draws.sample(2, of=5).tolist()) for _ in range(5000))
    assert set(counts) == set(combinations(range(5), 2))
    assert max(counts.values()) - min(counts.values()) < 150
    again = RandomSampler(np.random.default_rng(1))
    assert Counter(tuple(again.sample(2, of=5).tolist()) for _ in range(5000)) == counts
    assert draws.sample(3, of=3).tolist() == [0, 1, 2]


FORECAST_FIELDS = {
    "num_running": [9, 1, 5, 3],
    "num_waiting": [0, 0, 0, 0],
    "queued_prefill_tokens": [0, 0, 0, 0],
    "predicted_e2e_s": [1.0, 4.0, 3.0, 2.0],
}


def decided(text: str) -> tuple[str, str]:
    """Who is forecast, and who is chosen."""
    policy = policy_from(text, seed=1)
    among = policy.shortlist(fleet(**FORECAST_FIELDS))
    return "".join(among.instance_ids), among.instance_id(policy.choose(among))


def test_a_shortlist_is_by_the_cheap_score_and_the_forecast_decides() -> None:
    """The busiest has the best forecast, and is looked at only where all are, or k is large enough."""
    assert decided("block") == ("abcd", "a") == decided('block: k = "all"')
    assert decided("block: k = 2") == ("bd", "d")
    assert decided("block: k = 3") == ("bcd", "d")
    assert decided("block: k = 4") == ("abcd", "a") == decided("block: k = 99")
    assert decided("block: k = 1") == ("b", "b")
    assert decided('block: k = 2, shortlist = "expr: -num_running"') == ("ac", "a")
    assert decided('block: k = 2, shortlist = "jsq: waiting_weight = 9"') == ("bd", "d")


def test_with_k_zero_the_cheap_score_decides_and_nothing_is_forecast() -> None:
    """The pure heuristic, under the name that it was given."""
    policy = policy_from("block: k = 0")
    assert not policy.needs_forecast
    assert policy.text == "block: k = 0"
    assert decided("block: k = 0") == ("abcd", "b")
    assert decided('block: k = 0, shortlist = "expr: -num_running"') == ("abcd", "a")


def test_a_filter_leaves_out_and_never_all() -> None:
    """Those of whom the condition is not known to hold are left out, unless nobody were left."""
    assert decided("block: filter = 'num_running < 5'") == ("bd", "d")
    assert decided("block: filter = 'num_running > 99'") == ("abcd", "a")
    assert decided("block: filter = 'step_s < 1'") == ("abcd", "a")
    assert decided("block: filter = 'num_running > 2', k = 1") == ("d", "d")
    assert decided("expr: score = 'num_running', filter = 'num_running > 1'") == ("acd", "d")


def test_a_tie_break_of_ones_own() -> None:
    """It decides among equals, in the place of the policy's own."""
    assert decided("expr: score = '1', tie_break = '-num_running'")[1] == "a"
    assert decided("expr: 1")[1] == "a"
    assert decided("expr: score = '1', tie_break = 'num_running'")[1] == "b"
    assert decided("lmetric: tie_break = 'num_waiting', detector = 0")[1] == "b"


def test_what_a_policy_needs_is_known_from_its_parts() -> None:
    """So that a scheduler asks for nothing else."""

    def needs(text: str) -> tuple[bool, ...]:
        policy = policy_from(text)
        return policy.needs_forecast, policy.needs_delays, policy.needs_prefix, policy.reads_no_indicators

    assert needs("block") == (True, False, False, False)
    assert needs("block: k = 2") == (True, False, True, False)
    assert needs("block: k = 2, shortlist = 'jsq'") == (True, False, False, False)
    assert needs("marginal") == (True, True, False, False)
    assert needs("lmetric") == (False, False, True, False)
    assert needs("jsq") == (False, False, False, False)
    assert needs("random") == (False, False, False, True)
    assert needs("round_robin: filter = 'age_s < 1'") == (False, False, False, False)
    assert needs("expr: delay_worst_s + p_tokens") == (True, True, True, False)


def test_a_score_without_forecasts_makes_its_own_shortlist() -> None:
    """Where only the condition under which requests are held reads forecasts."""
    held = policy_from("jsq: k = 2, hold = 'predicted_e2e_s < 9'")
    assert held.shortlist(fleet(num_running=[3, 1, 2, 0], num_waiting=[0, 0, 0, 0])).instance_ids == ("b", "d")
    other = policy_from("jsq: k = 1, hold = 'predicted_e2e_s < 9', shortlist = 'expr: -num_running'")
    assert other.shortlist(fleet(num_running=[3, 1, 2, 0], num_waiting=[0, 0, 0, 0])).instance_ids == ("a",)


def test_the_same_policy_is_written_in_several_ways() -> None:
    """As a line, and as a table of TOML."""
    assert spec_from("linear").parameters == {"lambda": 0.7}
    assert spec_from(" linear :lambda=0.3 ").parameters == {"lambda": 0.3}
    assert spec_from({"name": "linear", "lambda": 0.3}).parameters == {"lambda": 0.3}
    written = spec_from({"name": "block", "k": 8, "shortlist": "llumnix", "filter": 'num_waiting < 5 and "x" '})
    assert (written.k, written.shortlist, written.filter) == (8, "llumnix", 'num_waiting < 5 and "x" ')
    assert spec_from(written.text) == written
    assert spec_from("expr: num_running").score == "num_running"
    assert spec_from("expr: 1 if num_running == 2 else 0").score == "1 if num_running == 2 else 0"
    assert spec_from({"name": "expr", "score": "num_running"}).score == "num_running"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("roundrobin", "did you mean round_robin?"),
        ("", "must be one of block"),
        ("linear: lamda = 0.3", "linear: lamda is no known parameter; did you mean lambda?"),
        ("linear: lambda = 1.5", "lambda: must be a number from 0 to 1, not 1.5"),
        ("linear: lambda = nan", "lambda: must be a number"),
        ("marginal: lambda = inf", "lambda: must be a number"),
        ("linear: lambda = 'x'", "lambda: must be a number"),
        ("linear: 0.3", "'0.3' is no list of settings"),
        ("linear: lambda = 0.3} x = {", "is no list of settings"),
        ("linear: lambda = 0.3, lambda = 0.4", "is no list of settings"),
        ("jsq: k = 3", "k and shortlist are for policies that need forecasts"),
        ("jsq: shortlist = 'lmetric'", "k and shortlist are for policies that need forecasts"),
        ("slo: k = 0", "k and shortlist are for policies that need forecasts"),
        ("block: k = -1", "k: must be a whole number from 0 on"),
        ("block: k = 1.5", "k: must be a whole number"),
        ("block: k = true", "k: must be a whole number"),
        ("block: k = 'some'", "k: must be a whole number"),
        ("block: shortlist = 'jsq'", "shortlist: has no effect without k"),
        ("block: k = 'all', shortlist = 'jsq'", "shortlist: has no effect without k"),
        ("block: k = 3, shortlist = 'marginal'", "shortlist: marginal needs forecasts itself"),
        ("block: k = 3, shortlist = 'marginalia'", "did you mean marginal?"),
        ("block: k = 3, shortlist = 'block: k = 3'", "needs forecasts itself"),
        ("block: sample = 0", "sample: must be a whole number from 1 on"),
        ("block: filter = 'predicted_e2e_s < 3'", "filter: reads forecasts"),
        ("block: filter = 'num_running'", "filter: num_running is not a condition"),
        ("block: tie_break = 'num_runing'", "tie_break: num_runing is no known indicator; did you mean num_running?"),
        ("expr", "score: is missing"),
        ("expr:", "score: is missing"),
        ("expr: p_token * 2", "expr: p_token is no known indicator; did you mean p_tokens?"),
        ("expr: score = 3", "score: must be a text"),
        ("expr: scores = 'p_tokens'", "expr: scores is no known parameter; did you mean score?"),
        ("block: " + "x" * 5000, "is longer than 4000 characters"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(text: str, hint: str) -> None:
    """In one line, with the nearest known name."""
    with pytest.raises(ValueError, match="^policy: ") as caught:
        policy_from(text)
    assert hint in str(caught.value)


@pytest.mark.parametrize("table", [{}, {"name": 3}, {"name": "linear", "lambda": [1]}, {"name": "block", "k": None}])
def test_a_table_that_is_no_policy_is_refused(table: dict) -> None:
    """By the name of what is wrong in it."""
    with pytest.raises(ValueError, match="^policy"):
        policy_from(table)


def test_each_step_names_the_instances_that_it_left_out() -> None:
    """Also where not all instances were there from the beginning; those that stay are not named."""
    policy = policy_from("block: filter = 'num_running > 1', sample = 3, k = 2, shortlist = 'jsq'", seed=1)
    table = InstanceTable("abcdef")
    for number, name in enumerate("abcdef"):
        table.replace(name, {"num_running": float(number), "num_waiting": 0.0}, now_s=10.0)
    some = table.candidates(rows=np.array([1, 2, 3, 4, 5]))
    looked = policy.shortlist(some)
    left_out = dict(looked.left_out())
    assert left_out["b"] == "does not pass the filter"
    assert sorted(left_out.values()) == ["does not pass the filter", "is not on the shortlist", "was not drawn"]
    assert sorted([*left_out, *looked.instance_ids]) == list("bcdef")
    assert dict(some.left_out()) == {}
    assert dict(policy_from("block").shortlist(some).left_out()) == {}


def test_all_policies_stand_filters_samples_and_shortlists_together() -> None:
    """On random states somebody is always chosen, of those who were to be looked at."""
    rng = np.random.default_rng(8)
    for text in ("block", "marginal", "lmetric", "linear", "round_robin", "random", "expr: p_tokens"):
        options = "sample = 4, filter = 'num_running < 4'" + (", k = 2" if text in ("block", "marginal") else "")
        extra = f"{text}: {options}" if ":" not in text else f"expr: score = 'p_tokens', {options}"
        policy = policy_from(extra, seed=3)
        for _ in range(200):
            candidates = random_fleet(rng)
            among = policy.shortlist(candidates)
            assert 1 <= len(among) <= min(4, len(candidates))
            place = among.row(policy.choose(among))
            assert candidates.instance_ids[place] in among.instance_ids
