"""Decisions among instances with roles: which legs, where, and what happens when a pool or a call fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.forecast_result import Forecast
from predictor.request import DECODE, PREFILL, SERVE
from scheduler.admission.queue import lane_of
from scheduler.candidate import CandidateStatus
from scheduler.candidates import RequestIndicators
from scheduler.core import DecisionRules, SchedulerCore
from scheduler.decision import Decision
from scheduler.disaggregation import REASONS, DisaggregatedDecision
from scheduler.explanation import why
from scheduler.instances import InstanceDirectory, InstanceStatus, NoInstanceError, role_named
from scheduler.intentions import Answer, Ask, AskLegs, Intention, Placed, Release, Reserve, Shed, Wait
from scheduler.placement import PlacementRequest
from scheduler.policies import POLICIES
from scheduler.policy import policy_from
from scheduler.spec import ALWAYS, BY_FORECAST
from tests.scheduler.scenarios import BY_LEGS, scenarios, scenarios_with_roles
from tests.scheduler.scripted import reference
from tests.strategies import examples

EPOCH = 7
FORECAST = CandidateStatus.FORECAST
POOLS = {"p": "prefill", "q": "prefill", "d": "decode", "e": "both"}
LOAD = {
    "num_running": 1.0,
    "num_waiting": 0.0,
    "num_total_blocks": 100.0,
    "num_free_blocks": 50.0,
    "num_waiting_blocks": 0.0,
    "queued_prefill_tokens": 0.0,
    "context_tokens": 10.0,
    "requests_per_minute": 1.0,
}


def core_over(roles: Mapping[str, str], policy: str = "block", **rules: Any) -> SchedulerCore:
    """A core that knows these instances, all of them with the same load."""
    directory = InstanceDirectory()
    directory.update(InstanceStatus(instance_id=name, role=role) for name, role in roles.items())
    for name in roles:
        directory.table.replace(name, LOAD, 0.0)
    return SchedulerCore(policy, directory, random=lambda: 0.5, rules=DecisionRules(**rules), seed=1)


def forecast(e2e_s: float, *, ttft_s: float = 0.1, queue_s: float = 0.0, delay_s: float = 0.0, **more: Any) -> Forecast:
    """A forecast."""
    return Forecast(
        request_id="r", ttft_s=min(ttft_s, e2e_s), e2e_s=e2e_s, tpot_s=0.01, queue_s=queue_s, output_tokens=10,
        num_preemptions=0, prefix_hit_tokens=0, delay_sum_s=delay_s, delay_worst_s=delay_s, others_preempted=0,
        **{"others_missed": 0, "gain_before": 1.0, "gain_after": 2.0, "least_slack_s": 2.0, **more},
    )  # fmt: skip


@dataclass
class World:
    """Instances that answer by functions of their name and the arrival of a leg, and count who is reserved there."""

    core: SchedulerCore
    whole: Callable[[str], float | Forecast] = lambda _name: 3.0
    prefill: Callable[[str], float | Forecast] = lambda _name: 0.5
    decode: Callable[[str, float], float | Forecast] = lambda _name, in_s: in_s + 2.0
    fails: Mapping[tuple[str, str], CandidateStatus] = field(default_factory=dict)  # by leg, or reserve, and name
    held: dict[str, str] = field(default_factory=dict)  # the legs that are reserved, by instance
    trace: list[Any] = field(default_factory=list)

    def answer(self, name: str, leg: str, in_s: float) -> Answer:
        """Answer about one leg."""
        status = self.fails.get((leg, name))
        if status is not None:
            return Answer(status, note=f"is {status.value}")
        made = {SERVE: lambda: self.whole(name), PREFILL: lambda: self.prefill(name)}.get(leg)
        value = self.decode(name, in_s) if made is None else made()
        return Answer(FORECAST, value if isinstance(value, Forecast) else forecast(value), 0, EPOCH)

    def step(self, decision: Decision, intention: Intention, now_s: float) -> Intention:
        """Carry out an intention."""
        if isinstance(intention, Ask | AskLegs):
            asked = [(ask.leg, ask.instance_ids, round(ask.in_s, 6)) for ask in intention.asks]
            self.trace.append(asked)
            names = [name for _, some, _ in asked for name in some]
            assert len(set(names)) == len(names)
            return decision.answers(
                {name: self.answer(name, leg, in_s) for leg, some, in_s in asked for name in some}, now_s
            )
        if isinstance(intention, Reserve):
            name, leg = intention.instance_id, intention.leg
            self.trace.append((leg, name, intention.held_s))
            status = self.fails.get(("reserve", name))
            if status is not None:
                return decision.reservation_failed(status, f"is {status.value}", now_s)
            assert name not in self.held
            self.held[name] = leg
            return decision.reserved(10.0, now_s)
        if isinstance(intention, Release):
            self.trace.append(("release", intention.instance_id))
            del self.held[intention.instance_id]
            return decision.released(now_s, confirmed=True)
        assert isinstance(intention, Wait)
        return decision.tick(intention.until_s)

    def decide(self, **request: Any) -> tuple[Decision, Intention]:
        """Decide for a request."""
        indicators = RequestIndicators(prompt_tokens=1000, tag_tokens=10.0)
        decision = self.core.decision(PlacementRequest(**{"request_id": "r", "indicators": indicators, **request}))
        intention = decision.start(0.0)
        for number in range(1000):
            if isinstance(intention, Placed | Shed):
                return decision, intention
            intention = self.step(decision, intention, number / 1e3)
        raise AssertionError("the decision does not end")

    def placed(self, **request: Any) -> tuple[list[tuple[str, str]], str]:
        """The legs of a request, and why."""
        decision, end = self.decide(**request)
        assert isinstance(end, Placed), end
        placement = decision.placement
        legs = [(leg.kind, leg.instance_id) for leg in placement.legs]
        if not request.get("dry_run"):
            assert self.held == {name: kind for kind, name in legs}
        return legs, placement.disaggregation


def test_a_request_has_two_legs_where_these_end_earlier_than_the_whole_request_anywhere() -> None:
    """One fan-out over both pools, one over the decode legs, and both reservations, that of the decode leg first."""
    world = World(core_over(POOLS), prefill=lambda name: {"p": 0.7, "q": 0.5}[name])
    world.decode = lambda name, in_s: forecast(in_s + {"d": 2.0, "e": 2.2}[name], fetched_s=in_s + 0.1)
    assert world.placed() == ([(PREFILL, "q"), (DECODE, "d")], "pair_by_forecast")
    assert world.trace == [
        [(SERVE, ("d", "e"), 0.0), (PREFILL, ("p", "q"), 0.0)],
        [(DECODE, ("d", "e"), 0.503)],
        (DECODE, "d", None),
        (PREFILL, "q", pytest.approx(0.103)),
    ]


def test_a_placement_with_two_legs_names_both_forecasts_and_why() -> None:
    """The forecast of the placement is that of the decode leg."""
    world = World(core_over(POOLS))
    placement = world.decide()[0].placement
    assert placement.prefill is not None
    assert (placement.prefill.instance_id, placement.instance_id) == ("p", "d")
    assert placement.prefill.forecast.e2e_s == 0.5
    assert placement.forecast.e2e_s == pytest.approx(2.503)
    assert placement.prefill.reserved_for_s == placement.reserved_for_s == 10.0
    assert placement.next_best == ["e"]
    assert why(placement, 4) == (
        "block over 4, 2 of them forecast: e2e 2.503 s, ttft 0.100 s; next e: e2e 2.503 s; "
        "pair_by_forecast: prefill on p, ends in 0.500 s"
    )
    named = {one.instance_id: one.predicted.e2e_s for one in placement.decision.explanation.candidates()}
    assert named == {"d": pytest.approx(2.503), "e": pytest.approx(2.503), "p": 0.5, "q": 0.5}


def test_a_request_is_served_whole_where_that_is_no_slower() -> None:
    """Nothing is reserved on a prefill instance."""
    world = World(core_over(POOLS), whole=lambda name: {"d": 2.7, "e": 2.503}[name])
    world.decode = lambda _name, _in_s: 2.503
    assert world.placed() == ([(SERVE, "e")], "whole_by_forecast")


@pytest.mark.parametrize(
    ("policy", "delay_s", "legs"),
    [
        ("block", 9.0, 2),
        ("block_mean", 0.1, 2),
        ("block_mean", 0.6, 1),
        ("marginal: lambda = 0.1", 0.6, 2),
        ("marginal: lambda = 0.1", 6.0, 1),
    ],
)
def test_delays_that_the_prefill_leg_causes_count_with_the_pair(policy: str, delay_s: float, legs: int) -> None:
    """The whole request ends half a second later than the pair, and delays nobody."""
    world = World(core_over(POOLS, policy), prefill=lambda _name: forecast(0.5, delay_s=delay_s))
    assert len(world.placed()[0]) == legs


@pytest.mark.parametrize("policy", ["slo", "polyserve"])
@pytest.mark.parametrize(("missed", "chosen"), [(0, "q"), (1, "p")])
def test_with_deadlines_a_prefill_leg_goes_where_it_ends_first_and_harms_nobody(
    policy: str, missed: int, chosen: str
) -> None:
    """Both report the same queue, as one does whose running step computes a long prompt; its forecast shows that."""
    world = World(core_over(POOLS, policy))
    world.prefill = {"p": forecast(0.4), "q": forecast(0.3, others_missed=missed)}.__getitem__
    placement = world.decide()[0].placement
    assert placement.prefill is not None
    assert placement.prefill.instance_id == chosen


def test_the_hold_condition_reads_how_long_both_legs_wait() -> None:
    """A decode leg that arrives in half a second does not wait for that long."""
    hold = 'block: hold = "predicted_queue_s < 0.3", hold_s = 1'
    world = World(core_over(POOLS, hold), prefill=lambda _name: forecast(0.5, queue_s=0.2))
    world.whole = lambda _name: forecast(3.0, queue_s=1.0, ttft_s=1.1)
    world.decode = lambda _name, in_s: forecast(in_s + 2.0, queue_s=in_s + 0.05, ttft_s=in_s + 0.1)
    assert world.placed()[1] == "pair_by_forecast"
    world = World(core_over(POOLS, hold), prefill=world.prefill, whole=world.whole)
    world.decode = lambda _name, in_s: forecast(in_s + 2.0, queue_s=in_s + 0.2, ttft_s=in_s + 0.3)
    decision, _ = world.decide()
    assert (decision.placement.held_s, decision.is_admitted) == (pytest.approx(1.0, abs=0.2), False)


def test_an_instance_that_admits_the_whole_request_has_not_refused() -> None:
    """Whether or not it admits the decode leg."""
    hold = 'block: hold = "predicted_queue_s < 0.3", hold_s = 1'
    world = World(core_over({"p": "prefill", "d": "decode"}, hold))
    world.whole = lambda _name: forecast(3.0, queue_s=0.1, ttft_s=1.0)
    world.decode = lambda _name, in_s: forecast(in_s + 3.0, queue_s=in_s + 0.9, ttft_s=in_s + 1.0)
    decision, _ = world.decide()
    assert decision.placement.legs[0].kind == SERVE
    assert world.core.refusals(lane_of(math.inf, background=False)).worth_asking(np.zeros(1), 0.02, np.array([0])).all()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("pd_least", ([(PREFILL, "q"), (DECODE, "e")], "pair_always")),
        ("pd_threshold", ([(PREFILL, "q"), (DECODE, "e")], "pair_by_condition")),
        ("pd_threshold: non_cached_tokens = 1001", ([(SERVE, "e")], "whole_by_condition")),
        ("pd_dynamo", ([(PREFILL, "q"), (DECODE, "e")], "pair_by_condition")),
        ("pd_dynamo: ratio = 1", ([(PREFILL, "q"), (DECODE, "e")], "pair_by_condition")),
        ("jsq: disaggregate = 'never'", ([(SERVE, "e")], "whole_never")),
        ("jsq: disaggregate = 'num_running > 3'", ([(SERVE, "e")], "whole_by_condition")),
        ("jsq: disaggregate = 'num_running > 3', order = 'prefill-first'", ([(SERVE, "e")], "whole_by_condition")),
        ("jsq: disaggregate = 'num_running < 3', prefill = 'expr: -num_running'",
         ([(PREFILL, "p"), (DECODE, "e")], "pair_by_condition")),
    ],
)  # fmt: skip
def test_policies_without_forecasts_choose_each_leg_by_their_rules(policy: str, expected: object) -> None:
    """`d` and `p` are busier than `e` and `q`."""
    core = core_over(POOLS, policy)
    for name in "dp":
        core.instances.table.update(
            name, {"num_running": 5.0, "queued_prefill_tokens": 99.0, "context_tokens": 99.0}, 0.0
        )
    assert World(core).placed() == expected


@pytest.mark.parametrize("policy", ["block", "pd_least", "jsq: disaggregate = 'always'", "jsq: disaggregate = 'never'"])
def test_a_request_may_ask_for_one_leg(policy: str) -> None:
    """It is then placed as a whole, by any policy."""
    placed, reason = World(core_over(POOLS, policy)).placed(undivided=True)
    assert ([leg for leg, _ in placed], reason) == ([SERVE], "whole_by_request")


@pytest.mark.parametrize(
    ("hits", "expected"), [(984, "pair_by_condition"), (985, "whole_by_condition"), (1000, "whole_by_condition")]
)
def test_the_threshold_counts_the_tokens_that_the_decode_instance_does_not_cache(hits: int, expected: str) -> None:
    """llm-d's default of 16."""
    world = World(core_over({"p": "prefill", "d": "decode"}, "pd_threshold"))
    assert world.placed(prefix_hits=np.array([hits, 0.0]))[1] == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "hits", "expected"),
    [
        (1000, 301, "whole_by_condition"),
        (1000, 300, "pair_by_condition"),
        (10_000, 7952, "pair_by_condition"),
        (10_000, 7953, "whole_by_condition"),
    ],
)
def test_dynamos_rule_serves_whole_what_is_short_and_mostly_cached(
    prompt_tokens: int, hits: int, expected: str
) -> None:
    """Whole below 2048 uncached tokens and below a share of 0.7 of the prompt."""
    world = World(core_over({"p": "prefill", "d": "decode"}, "pd_dynamo"))
    indicators = RequestIndicators(prompt_tokens=prompt_tokens)
    assert world.placed(indicators=indicators, prefix_hits=np.array([hits, 0.0]))[1] == expected


def test_decode_first_asks_only_the_best_instance_about_the_decode_leg() -> None:
    """By forecasts, the instance is that where the whole request ends first."""
    world = World(core_over(POOLS, "block: order = 'decode-first'"), whole=lambda name: {"d": 4.0, "e": 3.0}[name])
    world.decode = lambda name, in_s: in_s + {"d": 1.0, "e": 2.0}[name]
    assert world.placed() == ([(PREFILL, "p"), (DECODE, "e")], "pair_by_forecast")
    assert world.trace[1] == [(DECODE, ("e",), 0.503)]


def test_a_condition_decides_which_instances_are_asked_about_which_leg() -> None:
    """An instance is asked once."""
    core = core_over(POOLS, "block: disaggregate = 'num_running > 3'")
    core.instances.table.update("e", {"num_running": 5.0}, 0.0)
    world = World(core)
    assert world.placed() == ([(PREFILL, "p"), (DECODE, "e")], "pair_by_condition")
    assert world.trace[:2] == [[(SERVE, ("d",), 0.0), (PREFILL, ("p", "q"), 0.0)], [(DECODE, ("e",), 0.503)]]


def test_a_cached_prefix_saves_no_prefill_where_a_request_is_only_decoded() -> None:
    """The decode leg goes to the least loaded instance; a whole request goes where the prefix is."""
    roles = {"p": "prefill", "d": "decode", "e": "decode"}
    load = {"least_tpot_slo_s": math.inf, "queued_prefill_s": 0.0, "prefill_token_s": 1e-3}
    placed = []
    for legs in ("always", "never"):
        core = core_over(roles, f"slo: disaggregate = '{legs}'")
        for name, step_s in (("p", 0.01), ("d", 0.01), ("e", 0.02)):
            core.instances.table.update(name, {**load, "decode_step_s": step_s}, 0.0)
        world = World(core, prefill=lambda _: forecast(0.5), whole=lambda name: cached(3.0, name))
        world.decode = lambda name, in_s: cached(in_s + 2.0, name)
        placed.append(world.placed(prefix_hits=np.array([0.0, 900.0, 0.0]))[0])
    assert placed == [[(PREFILL, "p"), (DECODE, "d")], [(SERVE, "e")]]


def cached(e2e_s: float, name: str) -> Forecast:
    """A forecast in which only e has a prefix cached."""
    return replace(forecast(e2e_s), prefix_hit_tokens=900 if name == "e" else 0)


# Without instances with roles.


@pytest.mark.parametrize("policy", POLICIES)
def test_without_roles_decisions_are_of_the_plain_kind(policy: str) -> None:
    """Also where the policy would always have two legs; there is no word about disaggregation."""
    core = core_over(dict.fromkeys("abc", "both"), policy)
    world = World(core)
    decision, _ = world.decide()
    assert type(decision) is Decision
    assert [leg.kind for leg in decision.placement.legs] == [SERVE]
    assert decision.placement.disaggregation == ""


@pytest.mark.parametrize("policy", [*POLICIES, *BY_LEGS])
def test_without_prefill_instances_intentions_are_those_of_a_cluster_without_roles(policy: str) -> None:
    """Only the reason is added."""
    traces = []
    for roles in ({"d": "both", "e": "both"}, {"d": "decode", "e": "both"}):
        world = World(core_over(roles, policy))
        world.placed()
        traces.append(world.trace)
    assert traces[0] == traces[1]
    never = "'never'" in policy
    assert World(core_over(roles, policy)).placed()[1] == ("whole_never" if never else "whole_no_prefill")


# Pools that are empty or down.


@pytest.mark.parametrize("policy", ["block", "block: disaggregate = 'always'", "pd_least", "pd_threshold"])
@pytest.mark.parametrize(
    ("roles", "fails", "whole", "refused"),
    [
        ("p d", {}, ("pair", "pd"), None),
        ("d", {}, ("whole_no_prefill", "d"), "no instance with role prefill serves the model"),
        ("p", {}, ("whole_no_decode", "p"), "no instance with role decode or both serves the model"),
        ("p d", {"p": CandidateStatus.DOWN}, ("whole_prefill_down", "d"), "role prefill can take the request: p: "),
        ("p d", {"p": CandidateStatus.REFUSED}, ("whole_prefill_down", "d"), "role prefill can take the request: p: "),
        ("p d", {"d": CandidateStatus.DOWN}, ("whole_decode_down", "p"), "role decode or both can take the request: d"),
    ],
)
def test_without_a_pool_requests_are_served_whole_or_refused(
    policy: str, roles: str, fails: Mapping[str, CandidateStatus], whole: tuple[str, str], refused: str | None
) -> None:
    """In the last resort on a prefill instance; nothing is reserved elsewhere."""
    named = {name: {"p": "prefill", "d": "decode"}[name] for name in roles.split()}
    failing = {(call, name): status for name, status in fails.items() for call in (SERVE, PREFILL, DECODE, "reserve")}
    if fails.keys() == {"d"}:
        del failing[SERVE, "d"], failing[DECODE, "d"]
        core = core_over(named, policy)
        core.instances.by_id["d"].is_draining = True
        core.instances.suspect("d")
    else:
        core = core_over(named, policy)
    world = World(core, fails=failing)
    legs, reason = world.placed()
    assert ("".join(name for _, name in legs), reason.startswith(whole[0])) == (whole[1], True)
    if refused is None:
        return
    core.rules = DecisionRules(without_pool="refuse")
    world = World(core, fails=failing)
    _, end = world.decide()
    assert isinstance(end, Shed)
    assert isinstance(end.error, NoInstanceError)
    assert refused in str(end.error)
    assert world.held == {}


def test_where_both_pools_are_down_the_best_of_all_is_tried() -> None:
    """Its sidecar may be down while its engine works."""
    down = {(leg, name): CandidateStatus.DOWN for leg in (SERVE, PREFILL, DECODE) for name in POOLS}
    late = {(leg, "e"): CandidateStatus.LATE for leg in (SERVE, DECODE)}
    world = World(core_over(POOLS), fails={**down, **late})
    decision, end = world.decide()
    assert isinstance(end, Placed)
    assert decision.placement.instance_id == "e"
    assert decision.placement.reserved_for_s is None


def test_where_the_prefill_leg_cannot_be_reserved_the_request_is_served_whole() -> None:
    """The decode leg's reservation is released before the instance is asked again."""
    fails = {("reserve", name): CandidateStatus.DOWN for name in "pq"}
    world = World(core_over(POOLS), fails=fails)
    assert world.placed() == ([(SERVE, "d")], "whole_prefill_down")
    assert [step[:2] for step in world.trace if isinstance(step, tuple)] == [
        (DECODE, "d"),
        (PREFILL, "p"),
        (PREFILL, "q"),
        ("release", "d"),
        (SERVE, "d"),
    ]


@pytest.mark.parametrize(("policy", "always"), [("block: prefill = 'jsq'", False), ("pd_least", True)])
def test_another_prefill_instance_is_tried_without_its_forecast(policy: str, always: bool) -> None:
    """Where the policy of prefill legs reads none: only the first instance was asked."""
    world = World(core_over(POOLS, policy, forecast_always=always), fails={("reserve", "p"): CandidateStatus.DOWN})
    legs, reason = world.placed()
    assert (legs, reason[:4]) == ([(PREFILL, "q"), (DECODE, "d")], "pair")
    assert [step[0] for step in world.trace if isinstance(step, tuple)] == [DECODE, PREFILL, PREFILL]


def test_a_release_that_is_not_confirmed_keeps_the_request_away() -> None:
    """Otherwise the whole request might be released instead of the decode leg."""
    core = core_over(POOLS)
    world = World(core, fails={("reserve", name): CandidateStatus.DOWN for name in "pq"})
    decision = core.decision(PlacementRequest(request_id="r"))
    intention = decision.start(0.0)
    while not isinstance(intention, Release):
        intention = world.step(decision, intention, 0.0)
    intention = decision.released(0.0, confirmed=False)
    while not isinstance(intention, Placed):
        intention = world.step(decision, intention, 0.0)
    assert [(leg.kind, leg.instance_id) for leg in decision.placement.legs] == [(SERVE, "e")]


def test_a_conflict_at_the_prefill_instance_moves_the_prefill_leg_and_postpones_the_decode_leg() -> None:
    """The decode leg's reservation stays."""
    core = core_over(POOLS)
    world = World(core, prefill=lambda name: {"p": 0.5, "q": 0.6}[name])
    decision = core.decision(PlacementRequest(request_id="r"))
    intention = decision.start(0.0)
    while not (isinstance(intention, Reserve) and intention.leg == PREFILL):
        intention = world.step(decision, intention, 0.0)
    assert intention.instance_id == "p"
    intention = decision.conflict(Answer(FORECAST, forecast(0.9), 1, EPOCH), 0.0)
    assert isinstance(intention, Reserve)
    assert (intention.leg, intention.instance_id) == (PREFILL, "q")
    assert isinstance(world.step(decision, intention, 0.0), Placed)
    placement = decision.placement
    assert placement.num_conflicts == 1
    assert placement.forecast.e2e_s == pytest.approx(2.503 + 0.1)
    assert world.held == {"q": PREFILL, "d": DECODE}


def test_own_reservations_made_meanwhile_count_before_the_prefill_leg_is_reserved() -> None:
    """They would cause a conflict."""
    core = core_over(POOLS)
    world = World(core, prefill=lambda name: {"p": 0.5, "q": 0.55}[name])
    decision = core.decision(PlacementRequest(request_id="r"))
    intention = decision.start(0.0)
    while not isinstance(intention, Reserve):
        intention = world.step(decision, intention, 0.0)
    core.instances.by_id["p"].versions.report(1, EPOCH)
    intention = world.step(decision, intention, 0.0)
    assert isinstance(intention, Reserve)
    assert (intention.instance_id, intention.if_version) == ("q", 0)


# One leg alone.


@pytest.mark.parametrize("policy", ["block", "jsq", "pd_threshold"])
@pytest.mark.parametrize(("leg", "names"), [(DECODE, ("d", "e")), (PREFILL, ("p", "q"))])
def test_a_leg_alone_is_placed_in_its_pool(policy: str, leg: str, names: tuple[str, ...]) -> None:
    """For a decode leg whose blocks a prefill instance still holds."""
    world = World(core_over(POOLS, policy))
    legs, reason = world.placed(leg=leg, excluded={names[0]})
    assert (legs, reason) == ([(leg, names[1])], "")
    assert all(asked == [(leg, names[1:], 0.0)] for asked in world.trace if isinstance(asked, list))


def test_a_dry_run_names_both_legs_and_reserves_nothing() -> None:
    """Neither of them."""
    world = World(core_over(POOLS))
    assert world.placed(dry_run=True) == ([(PREFILL, "p"), (DECODE, "d")], "pair_by_forecast")
    assert world.held == {}


def test_the_hand_over_is_learned() -> None:
    """From outcomes; a long one was a fault."""
    core = core_over(POOLS)
    for _ in range(200):
        core.observe_hand_over(0.010)
    assert core.hand_over_s == pytest.approx(0.010, abs=1e-5)
    core.observe_hand_over(1e9)
    assert core.hand_over_s == pytest.approx(0.010, abs=1e-5)


@pytest.mark.parametrize(
    ("given", "role"), [("prefill-decode", "both"), ("both", "both"), ("prefill", "prefill"), ("decode", "decode")]
)
def test_roles_have_llm_ds_words_as_well(given: str, role: str) -> None:
    """An instance that does both."""
    assert role_named(given) == role


def test_an_unknown_role_is_refused() -> None:
    """With the known ones."""
    with pytest.raises(ValueError, match="role: must be one of both, prefill, decode, prefill-decode"):
        role_named("encode")


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (
            "jsq: disaggregate = 'forecast'",
            "policy: jsq: disaggregate: forecast is for policies whose score reads forecasts",
        ),
        ("block: disaggregate = 'predicted_e2e_s < 1'", 'reads forecasts; disaggregate = "forecast" compares them'),
        ("block: disaggregate = 'sometimes'", "policy: block: disaggregate: sometimes"),
        (
            "block: order = 'prefill-first'",
            "prefill-first is not for policies whose score reads forecasts; use pair or decode",
        ),
        (
            "jsq: order = 'pair'",
            "pair is not for policies whose score reads no forecasts; use decode-first or prefill-first",
        ),
        ("jsq: order = 'both'", "policy: jsq: order: must be one of pair, decode-first, prefill-first, not 'both'"),
        ("block: order = 'decode-first', disaggregate = 'always'", 'decode-first needs disaggregate = "forecast"'),
        ("jsq: prefill = 'bloc'", "policy: jsq: prefill: must be one of"),
        ("jsq: prefill = 3", "policy: jsq: prefill: must be a text, not 3"),
        ("jsq: prefill = 'jsq: order = \"pair\"'", "prefill: cannot have hold, prefill, disaggregate, order"),
        ("jsq: prefill = 'jsq: hold = \"num_running < 1\"'", "prefill: cannot have hold, prefill, disaggregate, order"),
        ("jsq: prefill = 'jsq: k = 2'", "policy: jsq: prefill: k is for policies that need forecasts"),
    ],
)
def test_options_of_legs_are_checked(policy: str, error: str) -> None:
    """In one line that names the option."""
    with pytest.raises(ValueError, match="(?s).*") as caught:
        policy_from(policy)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pool_rule_that_does_not_exist_is_refused() -> None:
    """With those that do."""
    with pytest.raises(ValueError, match="without_pool: must be one of whole, refuse, not 'wait'"):
        DecisionRules(without_pool="wait")


# Properties.


@dataclass
class Chaos:
    """A driver whose calls fail at random, and that may lose its caller at any time."""

    core: SchedulerCore
    rng: np.random.Generator
    may_cancel: bool
    held: dict[str, str] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)  # reservations by other schedulers

    def run(self) -> tuple[Decision, Intention | None]:
        """Decide for one request; None where its caller left."""
        decision = self.core.decision(
            PlacementRequest(request_id="r", indicators=RequestIndicators(prompt_tokens=50, tag_tokens=5.0))
        )
        now_s, intention = 0.0, decision.start(0.0)
        for _ in range(500):
            if isinstance(intention, Placed | Shed):
                return decision, intention
            if self.may_cancel and self.rng.random() < 0.1:
                if isinstance(intention, Reserve):  # what is in flight a driver releases by itself
                    self.held.pop(intention.instance_id, None)
                for name in decision.cancel(now_s):
                    self.held.pop(name, None)
                return decision, None
            now_s += 0.01
            intention = self.step(decision, intention, now_s)
        raise AssertionError("the decision does not end")

    def step(self, decision: Decision, intention: Intention, now_s: float) -> Intention:
        """Carry out an intention, or fail."""
        if isinstance(intention, Ask | AskLegs):
            answers = {
                name: self.answer(ask.leg, ask.in_s, name)
                for ask in intention.asks
                for name in ask.instance_ids
                if self.rng.random() < 0.95
            }
            return decision.answers(answers, now_s)
        if isinstance(intention, Reserve):
            return self.reserve(decision, intention, now_s)
        if isinstance(intention, Release):
            confirmed = self.rng.random() < 0.7
            self.held.pop(intention.instance_id)  # in the background, if not now
            return decision.released(now_s, confirmed=confirmed)
        assert isinstance(intention, Wait)
        return decision.tick(max(now_s, intention.until_s))

    def answer(self, leg: str, in_s: float, name: str) -> Answer:
        """Forecast, or fail."""
        if self.rng.random() < 0.25:
            return Answer(FAILURES[self.rng.integers(len(FAILURES))], note="by the test")
        made = forecast(in_s + float(self.rng.choice((0.5, 1.0, math.inf))), fetched_s=in_s if leg == DECODE else None)
        return Answer(FORECAST, made, self.others.get(name, 0), EPOCH)

    def reserve(self, decision: Decision, intention: Reserve, now_s: float) -> Intention:
        """Reserve, or fail; conflicts come in storms."""
        name, draw = intention.instance_id, self.rng.random()
        if draw < 0.35:
            status = FAILURES[self.rng.integers(len(FAILURES))]
            return decision.reservation_failed(status, "by the test", now_s, counts=bool(self.rng.random() < 0.8))
        if draw < 0.7 and intention.if_version is not None:
            self.others[name] = self.others.get(name, 0) + 1
            return decision.conflict(self.answer(intention.leg, intention.in_s, name), now_s)
        assert name not in self.held, "an instance that still holds a leg is asked for another one"
        self.held[name] = intention.leg
        return decision.reserved(10.0, now_s)


FAILURES = tuple(set(CandidateStatus) & {
    CandidateStatus.LATE, CandidateStatus.DOWN, CandidateStatus.INVALID, CandidateStatus.REFUSED,
    CandidateStatus.STOPPED, CandidateStatus.DRAINING,
})  # fmt: skip


@examples(600)
@given(
    seed=st.integers(0, 1 << 32),
    policy=st.sampled_from((*POLICIES, *BY_LEGS)),
    roles=st.lists(st.sampled_from(("prefill", "prefill", "decode", "both")), min_size=1, max_size=6),
    rule=st.sampled_from(("whole", "refuse")),
    forecasts=st.booleans(),
    cancels=st.booleans(),
)
def test_nothing_stays_reserved_that_is_not_placed(
    seed: int, policy: str, roles: Sequence[str], rule: str, forecasts: bool, cancels: bool
) -> None:
    """Whatever fails: reservations are exactly those of the placement's legs, or none."""
    names = {f"{role[0]}{number}": role for number, role in enumerate(roles)}
    core = core_over(names, policy, without_pool=rule, forecast_always=forecasts, max_conflicts=3)
    for _ in range(3):
        chaos = Chaos(core, np.random.default_rng(seed), cancels)
        decision, end = chaos.run()
        if not isinstance(end, Placed):
            assert chaos.held == {}
            continue
        placement = decision.placement
        reserved = {leg.instance_id: leg.kind for leg in placement.legs if leg.reserved_for_s is not None}
        assert chaos.held == reserved
        kinds = [leg.kind for leg in placement.legs]
        assert kinds in ([SERVE], [PREFILL, DECODE])
        if len(kinds) == 2:
            assert placement.legs[0].reserved_for_s is not None
            assert names[placement.legs[0].instance_id] == "prefill"
            assert names[placement.legs[1].instance_id] != "prefill"
        if isinstance(decision, DisaggregatedDecision):
            assert placement.disaggregation in REASONS
            assert placement.disaggregation.startswith("pair" if len(kinds) == 2 else "whole")
        assert placement.instance_id not in placement.next_best
        assert len(set(placement.next_best)) == len(placement.next_best)
        assert why(placement, len(names))


@examples(300)
@given(
    data=st.data(),
    num=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    policy=st.sampled_from(("block", "block_ttft")),
)
def test_the_earliest_prefill_leg_gives_the_best_pair_of_all(data: Any, num: tuple[int, int], policy: str) -> None:
    """An oracle that tries every prefill instance with every decode instance finds no better one.

    Decode legs end, and start, no earlier when they arrive later.
    """
    times = st.integers(1, 40).map(lambda value: value / 20)
    prefills = {f"p{n}": data.draw(times) for n in range(num[0])}
    wholes = {f"d{n}": data.draw(times) + 1.0 for n in range(num[1])}
    steps = {name: sorted(data.draw(st.lists(times, min_size=3, max_size=3))) for name in wholes}
    rest_s = {name: data.draw(times) for name in wholes}

    def decode(name: str, in_s: float) -> Forecast:
        start_s = next((at_s for at_s in steps[name] if at_s >= in_s), in_s)  # it joins the batch at a next step
        return forecast(start_s + rest_s[name], ttft_s=start_s + rest_s[name] / 10)

    roles = {**dict.fromkeys(prefills, "prefill"), **dict.fromkeys(wholes, "decode")}
    core = core_over(roles, policy)
    value = {"block": lambda one: one.e2e_s, "block_ttft": lambda one: one.ttft_s}[policy]
    pairs = [value(decode(name, end_s + core.hand_over_s)) for name in wholes for end_s in prefills.values()]
    whole = [value(forecast(e2e_s)) for e2e_s in wholes.values()]
    world = World(core, prefill=prefills.__getitem__, whole=wholes.__getitem__, decode=decode)
    decision, _ = world.decide()
    assert value(decision.placement.forecast) == pytest.approx(min(pairs + whole))
    assert (decision.placement.prefill is None) == (min(whole) <= min(pairs))


@pytest.mark.parametrize("policy", POLICIES)
def test_scenarios_without_roles_have_no_legs(policy: str) -> None:
    """No release, no second fan-out over legs, no reason."""
    for script in scenarios(policy).values():
        for _, kind, *details in reference(script).steps:
            assert kind not in ("AskLegs", "Release")
            assert kind != "Placed" or details[4] == ""


@pytest.mark.parametrize(
    "policy", ["block", "jsq", "pd_threshold: non_cached_tokens = 5", "block: disaggregate = 'always'"]
)
def test_the_scenarios_with_roles_show_what_their_names_say(policy: str) -> None:
    """Pairs, whole requests, releases and refusals do happen in them."""
    steps = {name: reference(script).steps for name, script in scenarios_with_roles(policy).items()}
    reasons = {name: {details[4] for _, kind, *details in some if kind == "Placed"} for name, some in steps.items()}
    pair = {ALWAYS: "pair_always", BY_FORECAST: "pair_by_forecast", "": "pair_by_condition"}
    assert reasons["all reply"] == {pair[policy_from(policy).legs.disaggregate]}
    assert "whole_prefill_down" in reasons["pq down"]
    assert reasons["no prefill instance"] == {"whole_no_prefill"}
    assert reasons["no decode instance"] == {"whole_no_decode"}
    assert "whole_decode_down" in reasons["all decode instances drain"]
    for name in ("pq down when reserving", "releases fail"):
        assert "Release" in [kind for _, kind, *_ in steps[name]], name
    for name in ("pq down, refusing", "no prefill instance, refusing", "no decode instance, refusing"):
        assert {kind for _, kind, *_ in steps[name]} >= {"Shed"}, name
