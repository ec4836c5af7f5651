"""What may happen to requests, as scripts: failures, conflicts, fallbacks and holds, by every policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from predictor.request import BEST_EFFORT, REAL_TIME, Slo
from scheduler.candidate import CandidateStatus
from scheduler.objectives import WHEN_LATE, Objective
from scheduler.policies import POLICIES
from scheduler.policy import policy_from
from tests.scheduler.scripted import Arrival, Reply, Script, ScriptedInstance

LATE, DOWN, INVALID, REFUSED, STOPPED = FAILURES = (
    CandidateStatus.LATE,
    CandidateStatus.DOWN,
    CandidateStatus.INVALID,
    CandidateStatus.REFUSED,
    CandidateStatus.STOPPED,
)
SHORTLISTED = "block: k = 2, shortlist = 'round_robin'"
EVERY_POLICY = [*POLICIES, SHORTLISTED]
REPLIES_S = {"a": 0.0011, "b": 0.0023, "c": 0.0037}
CALLS = ("forecasts", "reservations")


def holding(policy: str, condition: str, hold_s: float) -> str:
    """A policy with a hold condition."""
    return f'{policy}{"," if ":" in policy else ":"} hold = "{condition}", hold_s = {hold_s}'


def sequence(policy: str, num: int = 3, **replies: dict[str, Reply]) -> Script:
    """Requests that come one after the other to three instances, each of which always replies alike."""
    arrival = {
        call: {name: [replace(replies.get(call, {}).get(name, Reply()), after_s=REPLIES_S[name])] for name in "abc"}
        for call in CALLS
    }
    return Script(
        policy=policy,
        instances=[
            ScriptedInstance(name=name, e2e_s=e2e_s, num_running=num_running)
            for name, e2e_s, num_running in (("a", 2.0, 1), ("b", 2.15, 2), ("c", 2.7, 4))
        ],
        arrivals=[Arrival(after_s=10.0 * number, **arrival) for number in range(num)],
        max_conflicts=2,
    )


def failing(policy: str, status: CandidateStatus, names: str, calls: Sequence[str] = CALLS) -> Script:
    """Some instances fail at every call."""
    return sequence(policy, **{call: {name: Reply(status=status) for name in names} for call in calls})


def scenarios(policy: str) -> dict[str, Script]:
    """All that may happen to the requests that a policy places."""
    plain = sequence(policy)
    a, b, c = plain.instances
    late_failures = FAILURES if policy_from(policy).needs_forecast else ()  # others make no call before
    queue = [replace(one, after_s=0.0131 * number) for number, one in enumerate(sequence(policy, 6).arrivals)]
    finishes = [
        replace(one, finishes_s=(0.1013 + offset_s, 0.1517 + offset_s, 0.2029 + offset_s))
        for one, offset_s in zip(plain.instances, (0.0, 0.0171, 0.0373), strict=True)
    ]
    return {
        "all reply": plain,
        **{f"one is {status.value}": failing(policy, status, "a") for status in FAILURES},
        **{
            f"one is {status.value} when reserving": failing(policy, status, "a", CALLS[1:]) for status in late_failures
        },
        "two fail": sequence(policy, **{call: {"a": Reply(status=DOWN), "b": Reply(status=STOPPED)} for call in CALLS}),
        **{f"all are {status.value}": failing(policy, status, "abc") for status in FAILURES},
        "others reserve first": replace(
            sequence(policy, reservations={"a": Reply(others_first=1), "b": Reply(others_first=2)}),
            per_reservation_s=0.07,
        ),
        "one is excluded": replace(
            plain, arrivals=[replace(plain.arrivals[0], excluded=frozenset("a")), *plain.arrivals[1:]]
        ),
        "a dry run": replace(plain, arrivals=[replace(plain.arrivals[0], dry_run=True), *plain.arrivals[1:]]),
        "one drains": replace(plain, instances=[replace(a, draining=True), b, c]),
        "one engine failed": replace(plain, instances=[a, replace(b, engine_failed=True), c]),
        "all engines failed": replace(plain, instances=[replace(one, engine_failed=True) for one in plain.instances]),
        "held to the deadline": replace(plain, policy=holding(policy, "num_running < 1", 0.05)),
        "held until admitted": replace(
            plain, policy=holding(policy, "num_finished_total > 1", 1.0), instances=finishes, arrivals=queue
        ),
        "too many are held": replace(plain, policy=holding(policy, "num_running < 1", 0.3), arrivals=queue, max_held=2),
    }


CASES = [(policy, name) for policy in EVERY_POLICY for name in scenarios(policy)]


# Instances with roles.

BY_LEGS = (  # what policies can say of requests with two legs
    "block: disaggregate = 'always'",
    "block: disaggregate = 'never'",
    "block: disaggregate = 'num_running < 2'",
    "block: order = 'decode-first'",
    "block: prefill = 'jsq'",
    "marginal: k = 1",
    "jsq: prefill = 'block'",
    "jsq: disaggregate = 'num_running < 2'",
    "round_robin: order = 'prefill-first', disaggregate = 'new_prefill_tokens > 5'",
    "jsq: order = 'prefill-first', disaggregate = 'num_running < 2'",
)
POOLS = {
    "a": ScriptedInstance(name="a", role="decode", e2e_s=3.0, num_running=2),
    "b": ScriptedInstance(name="b", role="both", e2e_s=3.15, num_running=1),
    "p": ScriptedInstance(name="p", role="prefill", prefill_s=0.2, num_running=1),
    "q": ScriptedInstance(name="q", role="prefill", prefill_s=0.4, num_running=2),
}
POOL_REPLIES_S = {**REPLIES_S, "p": 0.0017, "q": 0.0029}


def among_pools(policy: str, names: str = "abpq", num: int = 3, **replies: dict[str, Reply]) -> Script:
    """Requests that come one after the other to instances with roles, each of which always replies alike."""
    arrival = {
        call: {
            name: [replace(replies.get(call, {}).get(name, Reply()), after_s=POOL_REPLIES_S[name])] for name in names
        }
        for call in CALLS
    }
    return Script(
        policy=policy,
        instances=[POOLS[name] for name in names],
        arrivals=[Arrival(after_s=10.0 * number, **arrival) for number in range(num)],
        max_conflicts=2,
    )


def scenarios_with_roles(policy: str) -> dict[str, Script]:
    """All that may happen to requests that a policy places among instances with roles."""
    plain = among_pools(policy)

    def fail_at(status: CandidateStatus, names: str, calls: Sequence[str] = CALLS) -> Script:
        return among_pools(policy, **{call: {name: Reply(status=status) for name in names} for call in calls})

    def changed(script: Script, names: str, **values: object) -> Script:
        instances = [replace(one, **values) if one.name in names else one for one in script.instances]
        return replace(script, instances=instances)

    first = plain.arrivals[0]
    queue = [replace(one, after_s=0.0131 * number) for number, one in enumerate(among_pools(policy, num=5).arrivals)]
    scripts = {
        "all reply": plain,
        **{
            f"{names} {status.value}{' when reserving' if calls == CALLS[1:] else ''}": fail_at(status, names, calls)
            for names in ("p", "pq", "a", "ab", "abpq")
            for status in FAILURES
            for calls in (CALLS, CALLS[1:])
        },
        **{
            f"others reserve first at {names}": replace(
                among_pools(policy, reservations={name: Reply(others_first=1) for name in names}),
                per_reservation_s=0.07,
            )
            for names in ("p", "a", "abpq")
        },
        "one is excluded": replace(plain, arrivals=[replace(first, excluded=frozenset("p")), *plain.arrivals[1:]]),
        "a pool is excluded": replace(plain, arrivals=[replace(first, excluded=frozenset("ab")), *plain.arrivals[1:]]),
        "a dry run": replace(plain, arrivals=[replace(first, dry_run=True), *plain.arrivals[1:]]),
        "a prefill instance drains": changed(plain, "p", draining=True),
        "all prefill instances drain": changed(plain, "pq", draining=True),
        "all decode instances drain": changed(plain, "ab", draining=True),
        "prefill engines failed": changed(plain, "pq", engine_failed=True),
        "decode engines failed": changed(plain, "ab", engine_failed=True),
        "no prefill instance": among_pools(policy, "ab"),
        "no decode instance": among_pools(policy, "pq"),
        "many at once": replace(plain, arrivals=queue, per_reservation_s=0.05),
        "held to the deadline": replace(plain, policy=holding(policy, "num_running < 1", 0.05)),
        "releases fail": changed(fail_at(DOWN, "pq", CALLS[1:]), "ab", keeps_released=True),
    }
    refusing = ("pq down", "pq down when reserving", "ab stopped", "no prefill instance", "no decode instance")
    scripts |= {f"{name}, refusing": replace(scripts[name], without_pool="refuse") for name in refusing}
    return scripts


ROLE_POLICIES = [
    "block",
    "hold",
    "marginal",
    "jsq",
    "lmetric",
    "round_robin",
    "pd_least",
    "pd_threshold: non_cached_tokens = 5",  # prompts have ten
    "pd_dynamo",
    *BY_LEGS,
]
ROLE_CASES = [(policy, name) for policy in ROLE_POLICIES for name in scenarios_with_roles(policy)]


# Requests with deadlines.

SLO_POLICIES = (
    "slo", "slo", "slo: hold_s = 0.3", "polyserve", "slo: affinity = 0", "slo: session_affinity = 0.1",
)  # fmt: skip
LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"best_effort_share": 0.0},
    {"best_effort_share": 0.5, "admission_turn": "deadline"},
    {"admission_turn": "fair", "max_held_of_tenant": 2},
    {"admission_turn": "priority", "max_held_best_effort": 1},
    {"max_held_tokens": 40.0},
    {"max_held_real_time": 2},
)


@st.composite
def promises(draw: Any, *, roles: bool = False, callers_leave: bool = False) -> Script:
    """Requests of some tenants with targets, or best effort, that meet busy instances which reply after a while.

    No two things happen at the same time. With `callers_leave`, some callers wait for a limited time only.
    """
    names = "abc"[: draw(st.integers(1, 3))]
    fraction = np.random.default_rng(1).random

    def after_s(max_ms: int) -> float:
        return (draw(st.integers(1, max_ms)) + fraction()) / 1e3

    def instance(name: str) -> ScriptedInstance:
        return ScriptedInstance(
            name=name,
            num_running=draw(st.integers(0, 3)),
            finishes_s=[after_s(900) for _ in range(draw(st.integers(0, 6)))],
            num_without_misses=draw(st.sampled_from((0, 1, 2, 3))),
            role=draw(st.sampled_from(("both", "decode", "prefill"))) if roles else "both",
        )

    def arrival() -> Arrival:
        slo = Slo(
            ttft_s=draw(st.sampled_from((None, 0.05, 0.25, 0.25, 0.4, 1.0))),
            tpot_s=draw(st.sampled_from((None, 0.02, 0.05, 0.2))),
        )
        request_class = draw(st.sampled_from((REAL_TIME, REAL_TIME, BEST_EFFORT)))
        return Arrival(
            after_s=1e-3 + after_s(draw(st.sampled_from((10, 200)))),
            forecasts={name: [Reply(after_s=after_s(9))] for name in names},
            reservations={name: [Reply(after_s=after_s(9))] for name in names},
            client_id=draw(st.sampled_from(("x", "x", "y"))),
            session_id=draw(st.sampled_from(("", "1", "1", "2"))),
            max_wait_s=draw(st.sampled_from((0.01, 0.2, math.inf))) if callers_leave else math.inf,
            objective=Objective(
                request_class=request_class,
                slo=slo if request_class == REAL_TIME else Slo(),
                priority=draw(st.integers(-1, 1)),
                when_late=draw(st.sampled_from(WHEN_LATE)),
            ),
        )

    return Script(
        policy=draw(st.sampled_from(SLO_POLICIES)),
        instances=[instance(name) for name in names],
        arrivals=[arrival() for _ in range(draw(st.integers(1, 7)))],
        per_reservation_s=draw(st.sampled_from((0.07, 0.3))),
        limits=draw(st.sampled_from(LIMITS)),
        max_held=draw(st.sampled_from((0, 2, 1000))),
        seed=draw(st.integers(0, 3)),
    )
