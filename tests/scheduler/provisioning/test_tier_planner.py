"""The planner of tiers: worked cases, and properties over random pools and loads."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.instances import BOTH, DECODE_ROLE, PREFILL_ROLE
from scheduler.provisioning.tier_planner import (
    CLOSED_POOL,
    POOL,
    TierInstance,
    TierPlace,
    TierPlan,
    TierPlanner,
    can_serve,
)
from scheduler.provisioning.tiers import Tier, Tiers, tier_for

STRICT, LOOSE = Tier(name="strict", tpot_slo_s=0.02), Tier(name="loose", tpot_slo_s=0.1)
TIERS = (STRICT, LOOSE)
FAST_S, SLOW_S = 0.01, 0.05
NOTHING: Mapping[float, int] = {}


def one(
    name: str,
    place: TierPlace = POOL,
    num: int | None = 0,
    least_s: float = math.inf,
    alone_s: float = FAST_S,
    role: str = BOTH,
) -> TierInstance:
    """An instance with some requests, the strictest of them with a target."""
    return TierInstance(
        instance_id=name, place=place, num_requests=num, least_tpot_slo_s=least_s, alone_step_s=alone_s, role=role
    )  # fmt: skip


def planned(
    *instances: TierInstance, waiting: Mapping[float, int] = NOTHING, tiers: Tiers = TIERS, times: int = 1
) -> TierPlan:
    """Plan some times, ten seconds apart, without carrying anything out; return the last plan."""
    planner = TierPlanner(tiers)
    for number in range(times):
        plan = planner.plan(10.0 * number, instances, waiting)
    return plan


def test_an_idle_instance_of_the_pool_joins_the_tier_whose_requests_wait() -> None:
    """The slowest that serves the tier, so that a fast one is left for the strict one."""
    slow, fast = one("slow", alone_s=SLOW_S), one("fast")
    assert planned(slow, fast, waiting={0.1: 3}).places == {"slow": ("loose", False), "fast": POOL}
    assert planned(slow, fast, waiting={0.02: 1}).places == {"slow": POOL, "fast": ("strict", False)}
    both = planned(slow, fast, waiting={0.1: 3, 0.02: 1})
    assert both.places == {"slow": ("loose", False), "fast": ("strict", False)}
    assert both.needs.num_unmet == 0
    assert all(move.why for move in both.moves)


def test_an_instance_that_cannot_serve_a_tier_never_joins_it() -> None:
    """Neither for waiting requests, nor for those that it has, nor where its step time is unknown."""
    for alone_s in (SLOW_S, math.nan):
        assert planned(one("a", alone_s=alone_s), waiting={0.02: 1}).moves == ()
        assert planned(one("a", num=1, least_s=0.02, alone_s=alone_s)).moves == ()
        assert planned(one("a", alone_s=alone_s), tiers=(Tier(name="s", tpot_slo_s=0.02, min_instances=1),)).moves == ()


def test_more_instances_are_needed_only_where_they_could_help() -> None:
    """Requests wait and the pool is empty; but one more slow instance does not serve the strict tier."""
    busy = one("a", TierPlace("loose"), 5, 0.1)
    assert planned(busy, waiting={0.02: 1}).needs.num_unmet == 1
    assert planned(one("a", TierPlace("loose"), 5, 0.1, SLOW_S), waiting={0.02: 1}).needs.num_unmet == 0
    assert planned(waiting={0.02: 1, 0.1: 1}).needs.num_unmet == 2
    assert planned(busy, waiting={math.inf: 9, 0.001: 9}).needs.num_unmet == 0  # they belong to no tier


def test_an_instance_of_the_pool_joins_the_tier_of_its_strictest_request() -> None:
    """Schedulers put requests on idle instances without asking the planner."""
    assert planned(one("a", num=2, least_s=0.02)).places == {"a": ("strict", False)}
    assert planned(one("a", num=2, least_s=0.15)).places == {"a": ("loose", False)}
    assert planned(one("a", num=2)).places == {"a": POOL}  # best effort


def test_an_instance_leaves_its_tier_once_it_has_had_no_request_of_it_for_a_while() -> None:
    """An idle one returns to the pool; one with requests of a looser tier is pending for that one."""
    place = TierPlace("strict")
    assert planned(one("a", place, 0)).moves == ()
    assert planned(one("a", place, 0), times=2).places == {"a": POOL}
    assert planned(one("a", place, 3, 0.1), times=2).places == {"a": ("loose", True)}
    assert planned(one("a", place, 3), times=2).places == {"a": POOL}
    assert planned(one("a", place, 3, 0.02), times=3).moves == ()
    assert planned(one("a", place, 0), waiting={0.02: 1}, times=3).moves == ()
    two = planned(one("a", place, 2, 0.1), one("b", place, 1, 0.1), times=2)
    assert two.places == {"a": place, "b": ("loose", True)}  # one at a time, the least loaded first


def test_a_request_of_the_tier_starts_the_while_again() -> None:
    """An instance that had one meanwhile stays."""
    planner, place = TierPlanner(TIERS, hold_s=5.0), TierPlace("strict")
    idle, busy = one("a", place, 0), one("a", place, 1, 0.02)
    for now_s, instance in ((0.0, idle), (4.0, busy), (6.0, idle), (10.0, idle)):
        assert planner.plan(now_s, [instance], NOTHING).moves == ()
    assert planner.plan(11.0, [idle], NOTHING).places == {"a": POOL}


def test_a_pending_instance_joins_a_tier_that_its_requests_fit_before_one_of_the_pool_does() -> None:
    """Also the strict tier again; else it waits, and returns to the pool when it is empty."""
    pending, idle = one("b", TierPlace("loose", closed=True), 2, 0.1), one("a")
    assert planned(pending, idle, waiting={0.1: 1}).places == {"a": POOL, "b": ("loose", False)}
    assert planned(pending, idle, waiting={0.02: 1}).places == {"a": POOL, "b": ("strict", False)}
    assert planned(pending, idle, times=3).moves == ()
    assert planned(one("b", pending.place, 0)).places == {"b": POOL}


def test_a_pending_instance_that_gets_another_request_of_its_tier_joins_it() -> None:
    """Schedulers use it where no other instance of the tier admits a request."""
    planner, place = TierPlanner(TIERS), TierPlace("loose", closed=True)
    for num in (3, 2):
        assert planner.plan(0.0, [one("a", place, num, 0.1)], NOTHING).moves == ()
    assert planner.plan(1.0, [one("a", place, 3, 0.1)], NOTHING).places == {"a": ("loose", False)}


def test_a_tier_at_its_maximum_closes_the_pool() -> None:
    """An idle instance would take its requests otherwise; one that has some finishes them."""
    tiers = (Tier(name="strict", tpot_slo_s=0.02, max_instances=1), LOOSE)
    full = one("a", TierPlace("strict"), 5, 0.02)
    plan = planned(full, one("b"), one("c", num=1, least_s=0.02), tiers=tiers, waiting={0.02: 9})
    assert plan.places == {"a": ("strict", False), "b": CLOSED_POOL, "c": CLOSED_POOL}
    assert plan.needs.num_unmet == 0
    other = planned(full, one("b", CLOSED_POOL), tiers=tiers, waiting={0.1: 1})
    assert other.places == {"a": ("strict", False), "b": ("loose", False)}
    assert planned(one("b", CLOSED_POOL), tiers=tiers).places == {"b": POOL}


def test_prefill_instances_belong_to_no_tier_and_are_never_closed() -> None:
    """They fill no minimum and close nothing; the instances that decode are planned as if there were no others."""
    tiers = (Tier(name="strict", tpot_slo_s=0.02, min_instances=1, max_instances=1), LOOSE)
    pools = [one("a", role=PREFILL_ROLE), one("b", role=DECODE_ROLE), one("c", role=DECODE_ROLE)]
    plan = planned(*pools, tiers=tiers)
    assert plan.places == {"a": POOL, "b": ("strict", False), "c": CLOSED_POOL}
    assert plan.needs.idle == ("c",)
    assert planned(*pools, tiers=tiers, waiting={0.02: 5, 0.1: 5}).places["a"] == POOL
    assert planned(one("a", num=3, least_s=0.02, role=PREFILL_ROLE), waiting={0.02: 1}).moves == ()
    assert planned(one("a", role=PREFILL_ROLE), one("b", alone_s=SLOW_S), waiting={0.02: 1}).needs.num_unmet == 0
    for place in (TierPlace("strict"), TierPlace("strict", closed=True), CLOSED_POOL):
        (move,) = planned(one("a", place, None, role=PREFILL_ROLE)).moves
        assert (move.place, move.why) == (POOL, "prefill instances belong to no tier")


def test_a_sidecar_that_does_not_respond_moves_nothing() -> None:
    """The instance stays where it is, and counts."""
    place = TierPlace("strict")
    tiers = (Tier(name="strict", tpot_slo_s=0.02, min_instances=1), LOOSE)
    assert planned(one("a", place, None), one("b"), tiers=tiers, times=3).places == {"a": place, "b": POOL}


def test_an_instance_of_a_tier_that_is_gone_returns_to_the_pool() -> None:
    """Its requests then decide, as for any other one."""
    assert planned(one("a", TierPlace("gone"))).places == {"a": POOL}
    assert planned(one("a", TierPlace("gone"), None)).places == {"a": POOL}


def test_one_instance_at_a_time_joins_for_waiting_requests() -> None:
    """Schedulers learn of it only later, and their requests seem to wait until then."""
    planner, idle = TierPlanner(TIERS, settle_s=3.0), [one("a"), one("b")]
    assert len(planner.plan(0.0, idle, {0.1: 5}).moves) == 1
    joined = [one("a", TierPlace("loose")), one("b")]
    assert planner.plan(2.0, joined, {0.1: 5}).moves == ()
    assert len(planner.plan(3.0, joined, {0.1: 5}).moves) == 1


# Properties.

BOUNDS_S = (0.02, 0.05, 0.1)
TARGETS_S = (0.01, 0.02, 0.05, 0.07, 0.1, 0.5, math.inf)


@st.composite
def some_tiers(draw: st.DrawFn) -> Tiers:
    """One to three tiers with bounds of their numbers."""
    bounds_s = draw(st.lists(st.sampled_from(BOUNDS_S), min_size=1, unique=True))
    made = []
    for bound_s in sorted(bounds_s):
        least = draw(st.integers(0, 2))
        made.append(
            Tier(
                name=f"t{bound_s:g}", tpot_slo_s=bound_s, min_instances=least,
                max_instances=draw(st.integers(max(1, least), 4)),
            )
        )  # fmt: skip
    return tuple(made)


@st.composite
def some_instances(draw: st.DrawFn) -> list[TierInstance]:
    """Up to six instances in any places, also some that no planner would choose."""
    names = ["", "gone", *(f"t{bound_s:g}" for bound_s in BOUNDS_S)]
    made = []
    for number in range(draw(st.integers(0, 6))):
        num = draw(st.sampled_from([None, 0, 0, 1, 4]))
        made.append(
            TierInstance(
                instance_id=f"i{number}",
                place=TierPlace(draw(st.sampled_from(names)), draw(st.booleans())),
                num_requests=num,
                least_tpot_slo_s=draw(st.sampled_from(TARGETS_S)) if num else math.inf,
                alone_step_s=draw(st.sampled_from([0.01, 0.03, 0.06, math.nan])),
                role=draw(st.sampled_from([BOTH, BOTH, DECODE_ROLE, PREFILL_ROLE])),
            )
        )
    return made


WAITING = st.dictionaries(st.sampled_from(TARGETS_S), st.integers(1, 5))


def members(plan: TierPlan, tier: Tier) -> list[str]:
    """The instances that a plan has in a tier."""
    return [name for name, place in plan.places.items() if place == TierPlace(tier.name)]


@given(tiers=some_tiers(), instances=some_instances(), waiting=WAITING)
def test_no_instance_is_lost_or_in_two_tiers_and_bounds_hold(
    tiers: Tiers, instances: list[TierInstance], waiting: Mapping[float, int]
) -> None:
    """Each instance has one place that exists; a move changes it once; what cannot serve a tier does not join it."""
    plan = TierPlanner(tiers).plan(0.0, instances, waiting)
    before = {each.instance_id: each for each in instances}
    assert set(plan.places) == set(before)
    assert len({move.instance_id for move in plan.moves}) == len(plan.moves)
    by_name = {tier.name: tier for tier in tiers}
    assert {place.tier for place in plan.places.values()} <= {"", *by_name}
    for tier in tiers:
        assert len(members(plan, tier)) <= tier.max_instances
    for move in plan.moves:
        each = before[move.instance_id]
        assert (move.place, bool(move.why)) == (plan.places[move.instance_id], True)
        assert move.place != each.place
        if move.place.tier and not move.place.closed:
            assert can_serve(each, by_name[move.place.tier])
    assert {plan.places[each.instance_id] for each in instances if each.role == PREFILL_ROLE} <= {POOL}


@given(tiers=some_tiers(), instances=some_instances(), waiting=WAITING)
def test_waiting_requests_get_an_instance_while_the_pool_has_one(
    tiers: Tiers, instances: list[TierInstance], waiting: Mapping[float, int]
) -> None:
    """A tier whose requests wait grows, unless it is at its maximum or no idle instance is left that serves it."""
    plan = TierPlanner(tiers).plan(0.0, instances, waiting)
    wanted = {tier.name for target_s in waiting if (tier := tier_for(target_s, tiers)) is not None}
    idle = [
        each for each in instances
        if each.role != PREFILL_ROLE and each.num_requests == 0 and plan.places[each.instance_id] in (POOL, CLOSED_POOL)
    ]  # fmt: skip
    for tier in tiers:
        joined = [name for name in members(plan, tier) if name in {move.instance_id for move in plan.moves}]
        if tier.name in wanted and not joined and len(members(plan, tier)) < tier.max_instances:
            assert not [each for each in idle if can_serve(each, tier)]


@given(tiers=some_tiers(), instances=some_instances(), waiting=WAITING)
@settings(max_examples=50)
def test_tiers_without_requests_shrink_to_their_minimum_and_then_nothing_moves(
    tiers: Tiers, instances: list[TierInstance], waiting: Mapping[float, int]
) -> None:
    """After the load has ended, in a bounded number of plans; then no instance oscillates."""
    planner = TierPlanner(tiers, hold_s=5.0)
    pool = {each.instance_id: each for each in instances}
    num_moves = []
    for step in range(30):
        plan = planner.plan(2.0 * step, list(pool.values()), waiting if step == 0 else NOTHING)
        num_moves.append(len(plan.moves))
        for name, place in plan.places.items():
            each = pool[name]
            pool[name] = one(name, place, 0, alone_s=each.alone_step_s, role=each.role)
    decoding = [each for each in pool.values() if each.role != PREFILL_ROLE]
    for tier in tiers:
        able = [each for each in decoding if can_serve(each, tier) and not each.place.tier]
        assert len(members(plan, tier)) == tier.min_instances or (
            len(members(plan, tier)) < tier.min_instances and not able
        )
    assert not any(num_moves[-5:])


@given(
    loads=st.lists(st.lists(st.sampled_from([0, 1]), min_size=3, max_size=3), min_size=5, max_size=60),
    hold_s=st.sampled_from([2.0, 5.0]),
)
@settings(max_examples=50)
def test_an_instance_stays_in_a_tier_for_the_hold_time_whatever_the_load_does(
    loads: list[list[int]], hold_s: float
) -> None:
    """Loads that come and go each second move an instance at most once per hold time."""
    planner = TierPlanner(TIERS, hold_s=hold_s)
    places = dict.fromkeys("abc", POOL)
    joined_s: dict[str, float] = {}
    for now_s, load in enumerate(loads):
        instances = [
            one(name, places[name], num, 0.02 if num else math.inf) for name, num in zip("abc", load, strict=True)
        ]
        for move in planner.plan(float(now_s), instances, NOTHING).moves:
            if move.place.tier:
                joined_s[move.instance_id] = float(now_s)
            else:
                assert now_s - joined_s[move.instance_id] >= hold_s
            places[move.instance_id] = move.place
