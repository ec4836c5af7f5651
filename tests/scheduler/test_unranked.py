"""Those whom nobody looked at one by one are told of as they were seen."""

from __future__ import annotations

import math

import numpy as np
from scheduler.candidate_ranking import CandidateStatus, as_ranked
from scheduler.unranked import unranked_of

from scheduler.candidates import Candidates
from scheduler.instance_table import InstanceTable
from scheduler.policy import policy_from

NAMES = tuple("abcdef")


def table() -> InstanceTable:
    """Six instances, each busier than the one before."""
    made = InstanceTable(NAMES)
    for number, name in enumerate(NAMES):
        made.tell(name, {"num_running": float(number), "num_waiting": 0.0}, now_s=10.0)
    return made


def left_out(candidates: Candidates) -> dict[str, str]:
    """Who is not there any more, and why."""
    return dict(candidates.left_out())


def test_each_step_says_whom_it_left_out() -> None:
    """Also where not all instances were there from the beginning; those who stay are not named."""
    policy = policy_from("block: filter = 'num_running > 1', sample = 3, k = 2, shortlist = 'jsq'", seed=1)
    some = table().candidates(places=np.array([0, 1, 2, 3, 4, 5])[1:])
    looked = policy.shortlist(some)
    why = left_out(looked)
    assert why["b"] == "does not pass the filter"
    assert sorted(why.values()) == ["does not pass the filter", "is not on the shortlist", "was not drawn"]
    assert sorted([*why, *looked.instance_ids]) == list("bcdef")
    assert left_out(some) == {}
    assert left_out(policy_from("block").shortlist(some)) == {}


def test_what_was_compared_in_columns_is_told_as_it_was() -> None:
    """Whatever instances tell later; those that are known already are not told of again."""
    there = table()
    looked = policy_from("jsq").shortlist(there.candidates(now_s=12.0))
    rest = unranked_of(looked, looked["num_running"], {"num_running": looked["num_running"]})
    there.tell("f", {"num_running": 99.0}, now_s=13.0)
    told = {one.instance_id: one for one in rest.candidates({"a", "b"})}
    assert list(told) == list("cdef")
    assert (told["f"].score, told["f"].read, told["f"].age_s) == (5.0, {"num_running": 5.0}, 2.0)
    assert {one.fate for one in told.values()} == {CandidateStatus.INDICATORS}
    assert len(rest) == len(NAMES)


def test_nothing_is_known_of_those_that_never_told() -> None:
    """Their score says so, and they have no age; a policy that looks at nothing has asked nobody."""
    looked = InstanceTable(NAMES).candidates(now_s=5.0)
    (one, *_) = unranked_of(looked, np.full(6, math.nan)).candidates(())
    assert one.score is not None
    assert math.isnan(one.score)
    assert (one.fate, one.age_s, one.read) == (CandidateStatus.UNASKED, 0.0, {})


def test_who_comes_later_is_ranked_by_the_score_of_then() -> None:
    """After those that were ranked; the unknown last."""
    looked = table().candidates(now_s=12.0)
    scores = np.array([0.0, 1.0, math.nan, 3.0, 2.0, 5.0])
    everybody = list(unranked_of(looked, scores, {"num_running": scores}).candidates(()))
    first = [one for one in everybody if one.instance_id == "f"]
    assert [one.instance_id for one in as_ranked(first)(everybody)] == list("fabedc")
