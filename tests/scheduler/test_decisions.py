"""Policies, decisions and circuits on cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from predictor.forecast import Forecast
from scheduler.circuit import Circuit
from scheduler.decision import decide
from scheduler.instances import InstanceView
from scheduler.policies import POLICIES, policy_named


def seen(instance_id: str, e2e_s: float | None) -> InstanceView:
    """An instance whose sidecar forecasts this e2e, or says nothing."""
    if e2e_s is None:
        return InstanceView(instance_id=instance_id)
    forecast = Forecast(
        request_id="r", ttft_s=0.1, e2e_s=e2e_s, tpot_s=0.01, queue_s=0.0, output_tokens=9, num_preemptions=0,
        prefix_hit_tokens=0,
    )  # fmt: skip
    return InstanceView(instance_id=instance_id, forecast=forecast)


def chosen(name: str, *views: InstanceView) -> str:
    """Whom a fresh policy chooses."""
    return decide(views, POLICIES[name].make(np.random.default_rng(1))).instance_id


def test_block_takes_the_lowest_e2e() -> None:
    """The earliest finish wins, whatever the order."""
    assert chosen("block", seen("a", 3.0), seen("b", 2.0), seen("c", 4.0)) == "b"


def test_equals_go_by_instance_id() -> None:
    """Ties break on the id, not on the order in which sidecars answered."""
    assert chosen("block", seen("b", 2.0), seen("a", 2.0)) == "a"


def test_an_instance_without_a_forecast_comes_last() -> None:
    """A silent sidecar is a last resort, and one that is left."""
    assert chosen("block", seen("a", None), seen("b", math.inf), seen("c", 9.0)) == "c"
    assert chosen("block", seen("a", None)) == "a"


def test_a_score_that_is_no_number_never_wins() -> None:
    """NaN is not less than anything here."""
    decision = decide([seen("a", 1.0), seen("b", 2.0)], lambda _: [math.nan, 5.0])
    assert decision.ranking == ("b", "a")


def test_nobody_to_choose_from_is_an_error() -> None:
    """No instance, no decision."""
    with pytest.raises(ValueError, match="instances"):
        decide([], POLICIES["block"].make(np.random.default_rng(1)))


def test_round_robin_takes_turns_also_as_instances_come_and_go() -> None:
    """Whoever has waited longest is next; a newcomer is first."""
    policy = POLICIES["round_robin"].make(np.random.default_rng(1))
    three = [seen(name, None) for name in "abc"]
    assert [decide(three, policy).instance_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert decide([*three, seen("d", None)], policy).instance_id == "d"
    assert decide(three[1:], policy).instance_id == "b"


def test_random_is_seeded_and_even() -> None:
    """The same seed chooses the same; all get their share."""
    views = [seen(name, None) for name in "abcd"]

    def draws(seed: int) -> list[str]:
        policy = POLICIES["random"].make(np.random.default_rng(seed))
        return [decide(views, policy).instance_id for _ in range(400)]

    assert draws(3) == draws(3) != draws(4)
    assert all(60 < draws(3).count(name) < 140 for name in "abcd")


def test_an_unknown_policy_is_refused_with_the_nearest() -> None:
    """A typing mistake is helped."""
    with pytest.raises(ValueError, match="did you mean round_robin"):
        policy_named("roundrobin")


def test_a_circuit_opens_tries_again_and_closes() -> None:
    """Two failures open it, one trial per pause, pauses double, a success closes it."""
    circuit = Circuit(first_pause_s=1.0, longest_pause_s=3.0)
    assert not circuit.failed(0.0)
    assert circuit.allows(0.0)
    assert circuit.failed(0.0)
    assert circuit.is_open()
    assert not circuit.allows(0.5)
    assert circuit.may_try(1.0)
    assert circuit.allows(1.0)
    assert not circuit.allows(1.5)
    circuit.failed(1.5)
    assert not circuit.allows(3.0)
    assert circuit.allows(3.5)
    circuit.failed(3.5)
    assert circuit.pause_s() == 3.0
    circuit.succeeded()
    assert circuit.allows(3.6)


def test_calls_that_fail_with_the_one_that_opened_a_circuit_do_not_count() -> None:
    """A hundred streams of one engine die together: that is one death, and the pause is the first one."""
    circuit = Circuit(first_pause_s=1.0)
    assert [circuit.failed(0.0) for _ in range(100)] == [False, True, *[False] * 98]
    assert circuit.pause_s() == 1.0
    assert circuit.allows(1.0)
    assert not circuit.failed(1.1)
    assert circuit.pause_s() == 2.0
    assert not circuit.failed(1.2)
    assert circuit.pause_s() == 2.0
