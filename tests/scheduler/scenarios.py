"""What may happen to requests, as scripts: failures, conflicts, fallbacks and holds, by every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.candidate import CandidateStatus
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
