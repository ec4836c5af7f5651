"""How long a decision may take, by its policy."""

from __future__ import annotations

import math

import pytest

from scheduler.core import SchedulerCore
from scheduler.instances import InstanceDirectory
from scheduler.policy import policy_from
from services.gateway.settings import GatewaySettings
from services.placement.decision_time import DecisionTime, longest_wait_s, max_wait_s, schedule_s_of

WAITS_S = {
    "block": 0.0,
    "hold": 10.0,
    "hold: hold_s = 0.3": 0.3,
    "slo": 60.0,
    "slo: hold_s = 90": 90.0,
    "polyserve": 60.0,
}


@pytest.mark.parametrize("policy", WAITS_S)
def test_a_decision_may_take_longer_than_its_policy_holds_a_request(policy: str) -> None:
    """A caller that waits for this time lets a request wait as long as the policy would."""
    waits_s = WAITS_S[policy]
    assert longest_wait_s(policy_from(policy)) == waits_s
    within_s = schedule_s_of(policy_from(policy))
    assert within_s == max(1.0, 1.25 * waits_s)
    assert max_wait_s(within_s, 0.05) == pytest.approx(within_s - 0.15)
    assert max_wait_s(within_s, 0.05) > waits_s


def test_a_caller_without_a_deadline_waits_for_ever() -> None:
    """One with little time left gets half of it."""
    assert max_wait_s(None, 0.05) == math.inf
    assert max_wait_s(0.1, 0.05) == 0.05


def test_the_time_follows_the_policy_unless_it_is_given() -> None:
    """A policy that is switched while requests arrive counts for the next one."""
    core = SchedulerCore("block", InstanceDirectory(), random=lambda: 0.5)
    unset, given = DecisionTime(core, None, 0.05), DecisionTime(core, 3.0, 0.05)
    assert (unset.within_s(), given.within_s()) == (1.0, 3.0)
    core.use_policy("slo")
    assert (unset.within_s(), given.within_s()) == (75.0, 3.0)
    assert unset.max_wait_s() == pytest.approx(74.85)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_no_decision_can_have_is_refused(value: float) -> None:
    """The line names the field."""
    with pytest.raises(ValueError, match="schedule_s: must be a time above 0, not"):
        GatewaySettings(schedulers=("a:1",), schedule_s=value)
