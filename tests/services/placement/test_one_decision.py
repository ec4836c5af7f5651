"""One decision, many drivers: the same answers, failures, conflicts and times give the same placements and holds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from predictor.config import CONSUMER, PRODUCER, PRODUCER_AND_CONSUMER
from predictor.gain import ServiceLevels
from predictor.request import CLASSES, DECODE, PREFILL, SERVE
from protos.block.v1 import common_pb2, predictor_pb2, scheduler_pb2
from scheduler.candidate import CandidateStatus
from scheduler.columns import Column
from scheduler.disaggregation import SERVE_WHOLE, WITHOUT_POOL
from scheduler.indicators import INDEX_OF
from scheduler.intentions import Ask
from scheduler.objectives import NO_OBJECTIVE
from scheduler.placement import DecisionBasis
from scheduler.policies import POLICIES
from scheduler.policy import policy_from
from services.gateway.schedulers import InProcessScheduler
from services.http.errors import ApiError
from services.instances.sources import Listed
from services.placement.decision_message import BASES, FATES, MAX_NEXT_BEST
from services.placement.driver import PlacementDriver
from services.rpc.messages import LEG_NAMES, forecast_message
from simulator import coupled
from simulator.assembly import simulation
from simulator.conditions import Conditions, Outage
from simulator.coupled_run import CoupledSimulation
from simulator.events import CALL
from simulator.fleet import InstanceSpec
from simulator.run import Simulation
from simulator.simulated_forecasts import FORECAST_FIELDS, SimulatedForecasts
from simulator.workload import RequestLengths, workload
from tests.scheduler.scenarios import (
    BY_LEGS,
    CALLS,
    CASES,
    DOWN,
    EVERY_POLICY,
    FAILURES,
    INVALID,
    LATE,
    REFUSED,
    ROLE_CASES,
    ROLE_POLICIES,
    SHORTLISTED,
    STOPPED,
    promises,
    scenarios,
    scenarios_with_roles,
)
from tests.scheduler.scripted import (
    FIRST_S,
    NOTES,
    PROMPT_TOKENS,
    TTFT_S,
    Arrival,
    Record,
    Reply,
    Script,
    ScriptedInstance,
    Sidecar,
    held_s_of,
    recording,
    reference,
)
from tests.services.placement.scripted_connection import Entry, drive
from tests.services.scheduler_server.running import Client, refused, run, scheduler, statuses
from tests.services.stub_sidecars import StubSidecar
from tests.simulator.small_clusters import A30, config
from tests.strategies import examples

HOLD = 'hold: hold = "predicted_queue_s < 0.5 and predicted_preemptions < 1", hold_s = 0.3'
VARIANTS = (  # of policies, for random scripts
    "block: k = 1",
    "block: k = 2, shortlist = 'jsq'",
    "block: filter = 'num_running < 3'",
    "jsq: tie_break = 'num_reserved'",
    HOLD,
    HOLD,
    'jsq: hold = "batch_size < 3", hold_s = 0.2',
    'block: hold = "num_running < 0", hold_s = 0.1',
    "block: session_affinity = 0.5",
    "block: session_affinity = 0.5, k = 1",
    "jsq: session_affinity = 0.003",
    "expr: predicted_e2e_s - 0.4 * session_here",
)


# How a request enters a placement driver.


async def by_place(
    driver: PlacementDriver, request: common_pb2.Request, excluded: frozenset[str], dry_run: bool
) -> None:
    """As the gRPC service's Generate."""
    await driver.place(request, excluded=excluded, dry_run=dry_run)


async def by_schedule(
    driver: PlacementDriver, request: common_pb2.Request, excluded: frozenset[str], dry_run: bool
) -> None:
    """As the gRPC service."""
    message = scheduler_pb2.ScheduleRequest(
        request=request, exclude_instance_ids=sorted(excluded), dry_run=dry_run, explain=True
    )
    await driver.schedule(message)


async def by_gateway(
    driver: PlacementDriver, request: common_pb2.Request, excluded: frozenset[str], dry_run: bool
) -> None:
    """Decide as a gateway does that decides in its own process."""
    message = scheduler_pb2.ScheduleRequest(request=request, exclude_instance_ids=excluded, dry_run=dry_run)
    failures = Counter("failures", "Failures.", ("scheduler", "code"), registry=None)
    try:
        await InProcessScheduler(driver, within_s=100.0, failures=failures).schedule(message)
    except ApiError as error:
        raise ConnectionError(str(error)) from None


ENTRIES: dict[str, Entry] = {"place": by_place, "schedule": by_schedule, "gateway": by_gateway}


# Scripts.


@st.composite
def scripts(draw: Any, statuses: tuple[CandidateStatus, ...] = FAILURES, *, roles: bool = False) -> Script:
    """A few requests that meet a few instances, which may have roles; no two things happen at the same time.

    Times of events are sums of drawn durations: random fractions keep two different sums from being equal.
    """
    names = "abcd"[: draw(st.integers(1, 4))]
    fraction = np.random.default_rng(0).random

    def after_s(max_ms: int) -> float:
        return (draw(st.integers(1, max_ms)) + fraction()) / 1e3

    def replies(most: int) -> dict[str, list[Reply]]:
        return {name: [reply() for _ in range(draw(st.integers(1, most)))] for name in names if draw(st.booleans())}

    def reply() -> Reply:
        fails = statuses and draw(st.integers(0, 3)) == 0
        return Reply(
            after_s=after_s(30),
            status=draw(st.sampled_from(statuses)) if fails else CandidateStatus.FORECAST,
            others_first=draw(st.sampled_from((0, 0, 0, 1, 2))),
        )

    def instance(name: str) -> ScriptedInstance:
        return ScriptedInstance(
            name=name,
            e2e_s=draw(st.sampled_from((1.0, 2.0, 2.2, float("inf")))),
            num_running=draw(st.integers(0, 3)),
            draining=draw(st.integers(0, 9)) == 0,
            engine_failed=draw(st.integers(0, 9)) == 0,
            finishes_s=[after_s(400) for _ in range(draw(st.integers(0, 3)))],
            role=draw(st.sampled_from(("both", "decode", "prefill", "prefill"))) if roles else "both",
            prefill_s=draw(st.sampled_from((0.05, 0.5, float("inf")))),
            keeps_released=roles and draw(st.integers(0, 9)) == 0,
        )

    def arrival() -> Arrival:
        return Arrival(
            after_s=1e-3 + after_s(draw(st.sampled_from((10, 200)))),
            forecasts=all_after(replies(3)),
            reservations=all_after(replies(3)),
            excluded=frozenset(draw(st.sampled_from(("", "", "", "a", "b")))),
            dry_run=draw(st.integers(0, 9)) == 0,
            session_id=draw(st.sampled_from(("", "1", "1", "2"))),
        )

    def all_after(given: dict[str, list[Reply]]) -> dict[str, list[Reply]]:
        return {name: given.get(name) or [Reply(after_s=after_s(30))] for name in names}

    return Script(
        policy=draw(st.sampled_from((*POLICIES, *VARIANTS, *(BY_LEGS if roles else ())))),
        instances=[instance(name) for name in names],
        arrivals=[arrival() for _ in range(draw(st.integers(1, 6)))],
        max_conflicts=draw(st.sampled_from((0, 1, 10))),
        max_held=draw(st.sampled_from((1, 2, 1000))),
        forecast_always=draw(st.booleans()),
        without_pool=draw(st.sampled_from(WITHOUT_POOL)) if roles else SERVE_WHOLE,
        seed=draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize("policy", [one for one in EVERY_POLICY if one != "polyserve"])  # it waits for tiers
def test_the_scenarios_show_what_their_names_say(policy: str) -> None:
    """Holds, conflicts, failures and fallbacks do happen in them, by every policy."""
    records = {name: reference(script) for name, script in scenarios(policy).items()}
    kinds = {name: [kind for _, kind, *_ in record.steps] for name, record in records.items()}
    decisions = {name: list(record.decisions.values()) for name, record in records.items()}
    for name in ("held to the deadline", "held until admitted", "too many are held"):
        assert "Wait" in kinds[name], name
        assert all(held_s_of(one) > 0 for one in decisions[name]), name
    assert all(one.is_admitted for one in decisions["held until admitted"])
    assert not any(one.is_admitted for one in decisions["held to the deadline"])
    assert min(held_s_of(one) for one in decisions["too many are held"]) < 0.1
    for name, status in [(name, status) for status in FAILURES for name in records if f"one is {status.value}" in name]:
        assert {one.status for decision in decisions[name] for one in decision.explanation.skipped()} == {status}, name
    for status in (REFUSED, STOPPED):
        assert kinds[f"all are {status.value}"].count("Shed") == 3
    for status in (LATE, DOWN, INVALID):
        placements = [one.placement for one in decisions[f"all are {status.value}"]]
        assert all(one.reserved_for_s is None for one in placements)
    engines_failed = [one.placement.basis for one in decisions["all engines failed"]]
    assert set(engines_failed) == {DecisionBasis.LAST_RESORT}
    conflicts = sum(one.num_conflicts for one in decisions["others reserve first"])
    assert (conflicts > 0) == policy_from(policy).needs_forecast  # the others reserve unconditionally


def assert_same(ours: Record, expected: Record) -> None:
    """Compare step by step, so that the first difference is what is shown."""
    for step, other in zip(ours.steps, expected.steps, strict=False):
        assert step == other
    assert len(ours.steps) == len(expected.steps)
    assert ours.times_s == pytest.approx(expected.times_s, abs=1e-6)
    for name, decision in ours.decisions.items():
        other = expected.decisions[name]
        assert decision.num_conflicts == other.num_conflicts
        if decision.policy.holds and not decision.is_waiting:
            assert held_s_of(decision) == pytest.approx(held_s_of(other), abs=1e-6)


def assert_driven_alike(script: Script) -> None:
    """Compare the asyncio driver with the reference, by each of its entries."""
    expected = reference(script)
    for entry in ENTRIES.values():
        record = Record()
        with recording(record):
            drive(script, entry)
        assert_same(record, expected)


@examples(300)
@given(script=scripts())
def test_the_asyncio_driver_decides_as_the_reference_does(script: Script) -> None:
    """Intentions, placements, holds, explanations and candidates are the same, and so are their times."""
    assert_driven_alike(script)


@pytest.mark.parametrize("entry", ENTRIES)
def test_of_draining_instances_the_least_busy_one_is_the_last_resort(entry: str) -> None:
    """They report whatever the policy reads."""
    busy = {"a": 2, "b": 1, "c": 0}
    script = Script(
        policy="block",
        instances=[
            ScriptedInstance(name=name, e2e_s=1.0, num_running=number, draining=True) for name, number in busy.items()
        ],
        arrivals=[Arrival(after_s=0.01)],
    )
    record = Record()
    with recording(record):
        drive(script, ENTRIES[entry])
    (decision,) = record.decisions.values()
    assert decision.explanation.ranking() == ["c", "b", "a"]
    assert_same(record, reference(script))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "name"), CASES)
def test_the_asyncio_driver_decides_as_the_reference_does_by_every_policy(policy: str, name: str) -> None:
    """In every scenario, also for a gateway that decides in its own process."""
    assert_driven_alike(scenarios(policy)[name])


@examples(300)
@given(script=scripts(roles=True))
def test_the_asyncio_driver_decides_as_the_reference_does_among_instances_with_roles(script: Script) -> None:
    """Fan-outs over two legs, both reservations and what is given back are the same."""
    assert_driven_alike(script)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "name"), ROLE_CASES)
def test_the_asyncio_driver_decides_as_the_reference_does_in_every_scenario_with_roles(policy: str, name: str) -> None:
    """By every policy, and by every option for legs."""
    script = scenarios_with_roles(policy)[name]
    record = Record()
    with recording(record):
        drive(script, by_place)
    assert_same(record, reference(script))


def test_events_less_than_a_nanosecond_apart_keep_their_order() -> None:
    """A forecast 0.1 ns after a reservation includes it: asyncio's own clock resolution would merge both."""
    reserved_s = 0.002
    script = Script(
        policy="block",
        instances=[ScriptedInstance(name="a", e2e_s=1.0)],
        arrivals=[
            Arrival(
                after_s=0.0,
                forecasts={"a": [Reply(after_s=0.001)]},
                reservations={"a": [Reply(after_s=reserved_s - 0.001)]},
            ),
            Arrival(after_s=0.0005, forecasts={"a": [Reply(after_s=reserved_s + 1e-10 - 0.0005)]}),
        ],
    )
    record = Record()
    with recording(record):
        drive(script, by_place)
    assert_same(record, reference(script))
    assert record.decisions["r1"].placement.forecast.queue_s == pytest.approx(0.3)  # one reservation before it


# The simulator, whose engines are replaced by the script.


def without_failures(script: Script) -> Script:
    """The same script at the same times, where every instance that is there replies at once, and reserves.

    Instances that drain or failed are excluded from all requests, but some instance can serve each of them.
    """
    name_of = {one.name: f"instance-{row}" for row, one in enumerate(script.instances)}
    gone = {one.name for one in script.instances if one.draining or one.engine_failed}
    if gone == name_of.keys():
        gone = set()

    def arrival(one: Arrival) -> Arrival:
        excluded = (gone | one.excluded) & name_of.keys()
        excluded = gone if excluded == name_of.keys() else excluded
        return Arrival(
            after_s=one.after_s,
            excluded=frozenset(name_of[name] for name in excluded),
            objective=one.objective,
            client_id=one.client_id,
            session_id=one.session_id,
        )

    instances = [replace(one, name=name_of[one.name], draining=False, engine_failed=False) for one in script.instances]
    return replace(
        script,
        arrivals=sorted(map(arrival, script.arrivals), key=lambda one: one.after_s),
        instances=instances,
        max_conflicts=10,
        max_held=1000,
        forecast_always=False,
        without_pool=SERVE_WHOLE,
    )


def levels_of(script: Script) -> ServiceLevels:
    """What the requests of a script ask for, as a workload has it."""
    asked = [one.objective for one in script.arrivals]
    return ServiceLevels(
        ttft_slo_s=np.array([one.slo.ttft_s for one in asked], np.float64),  # None is NaN
        tpot_slo_s=np.array([one.slo.tpot_s for one in asked], np.float64),
        weight=np.array([one.weight for one in asked]),
        priority=np.array([one.priority for one in asked]),
        request_class=np.array([CLASSES.index(one.request_class) for one in asked]),
        tenant=np.array([one.client_id for one in script.arrivals]),
        when_late=np.array([one.when_late for one in asked]),
    )


KV_ROLES = {"prefill": PRODUCER, "decode": CONSUMER, "both": PRODUCER_AND_CONSUMER}
LEG_SENT_BY = {coupled.send_prefill: PREFILL, coupled.await_decode: DECODE, coupled.send_whole: SERVE}
LEASE_S = 30.0


def simulate(script: Script) -> list[tuple[str, float]]:
    """Run a script through the simulator: forecasts and indicators are the script's, and so is the clock.

    Instances that are excluded from all requests are down or leaving, others are too small for some. Return for how
    long the blocks of prefill legs are predicted to be held.
    """
    sidecars = [Sidecar(one, script) for one in script.instances]
    held: list[tuple[str, float]] = []

    def refresh(self: Simulation, _now_s: float) -> None:
        for row, sidecar in enumerate(sidecars):
            for name, value in sidecar.indicators().items():
                self.reported[INDEX_OF[name], row] = value

    def forecast(
        self: SimulatedForecasts, _fleet: object, _requests: object, ask: Ask, number: int, now_s: float
    ) -> dict[str, Column]:
        among = ask.candidates
        rows = range(len(sidecars)) if among.rows is None else among.rows.tolist()
        slo = run._levels.objectives[number].slo  # the request may have been demoted
        left_s = np.inf if slo.ttft_s is None else run._levels.due_s[number] - now_s
        forecasts = [
            sidecars[row].forecast(delays=ask.with_delays, leg=ask.leg, in_s=ask.in_s, left_s=left_s) for row in rows
        ]
        results = self.results[: len(forecasts)]
        results["first_token_s"], results["finished_s"], results["fetched_s"] = zip(
            *((one.ttft_s, one.e2e_s, np.nan if one.fetched_s is None else one.fetched_s) for one in forecasts),
            strict=True,
        )
        columns = {
            "predicted_ttft_s": [one.ttft_s for one in forecasts],
            "predicted_e2e_s": [one.e2e_s for one in forecasts],
            "predicted_queue_s": [one.queue_s for one in forecasts],
            "predicted_preemptions": [one.num_preemptions for one in forecasts],
            "others_preempted": [one.others_preempted for one in forecasts],
            "delay_sum_s": [one.delay_sum_s for one in forecasts],
            "delay_worst_s": [one.delay_worst_s for one in forecasts],
            "predicted_attained": [one.attained for one in forecasts],
            "others_missed": [one.others_missed for one in forecasts],
            "gain_before": [one.gain_before for one in forecasts],
            "gain_after": [one.gain_after for one in forecasts],
            "least_slack_s": [one.least_slack_s for one in forecasts],
            "predicted_unmeasured": [one.unmeasured for one in forecasts],
        }
        assert columns.keys() == FORECAST_FIELDS.keys()
        read = {name for part in run.schedulers[0].policy.parts for name in part.forecast_fields}
        read |= {"predicted_e2e_s", "predicted_ttft_s", "predicted_queue_s"}
        return {name: np.array(columns[name], np.float64) for name in columns if name in read}

    def send(_self: Simulation, _scheduler: object, _number: int, index: int, _shown_s: float) -> None:
        sidecars[index].reserve(Reply(), None)

    def send_leg(_self: CoupledSimulation, kernel: Any, number: int, index: int, *times_s: float) -> None:
        leg = LEG_SENT_BY[kernel]
        sidecars[index].reserve(Reply(), None, number, leg)
        if leg == PREFILL:
            held.append((f"r{number}", round(times_s[-1], 6)))

    num = len(script.arrivals)
    work = workload(
        RequestLengths(prompt_tokens=np.full(num, PROMPT_TOKENS), output_tokens=np.full(num, 9)),
        np.array([FIRST_S + one.after_s for one in script.arrivals]),
    )
    if any(one.objective != NO_OBJECTIVE or one.client_id for one in script.arrivals):
        work = replace(work, service=levels_of(script))
    work = replace(work, session=np.array([int(one.session_id or -1) for one in script.arrivals]))
    made = [
        InstanceSpec(config=config(kv_role=KV_ROLES[one.role], kv_lease_s=LEASE_S), step_time=A30, role=one.role)
        for one in script.instances
    ]
    with (
        mock.patch.multiple(Simulation, refresh=refresh, _note_sent=send),
        mock.patch.object(SimulatedForecasts, "forecast", forecast),
        mock.patch.multiple(CoupledSimulation, refresh=refresh, send_by=send_leg, _note_sent=mock.Mock()),
    ):
        always = frozenset.intersection(*(arrival.excluded for arrival in script.arrivals))
        gone = [row for row, one in enumerate(script.instances) if one.name in always]
        outages = tuple(Outage(instance=row, from_s=0.0) for row in gone if row % 2)
        run = simulation(made, work, script.policy, Conditions(sample_s=0.0, outages=outages))
        run.available.leaving.update(row for row in gone if row % 2 == 0)
        run.available.update(run.fleet)
        run.available.possible = np.array(
            [[one.name not in arrival.excluded - always for one in script.instances] for arrival in script.arrivals]
        )
        core = run.schedulers[0].core
        core.policy = policy_from(script.policy, script.seed)
        core.random = np.random.default_rng(script.seed).random
        core.rules = script.rules
        for sidecar in sidecars:
            for after_s in sidecar.instance.finishes_s:
                run.events.schedule(FIRST_S + after_s, CALL, lambda _, sidecar=sidecar: sidecar.finish())
        run.run()
    return held


def in_both(record: Record) -> list[tuple[Any, ...]]:
    """What the simulator and live schedulers have in common: simulated reservations never fail, and are unconditional."""
    steps = []
    for name, kind, *all_details in record.steps:
        details = all_details
        if kind == "Reserve":
            instance_id, leg, *_, (_, in_s, *_) = all_details
            details = [instance_id, leg, in_s]
        elif kind == "Placed":
            decision = record.decisions[name]
            scores = {
                one.instance_id: (one.score, one.admits) for one in decision.explanation.candidates() if one.is_compared
            }
            others = [name for name in decision.placement.next_best if name in scores]
            legs = [(leg_kind, leg_name) for leg_kind, leg_name, *_ in details[5]]
            details = [details[0], details[1], details[4], legs, others, scores]
        steps.append((name, kind, *details))
    return steps


@examples(300)
@given(script=scripts(()).map(without_failures))
def test_the_simulator_decides_as_the_reference_does(script: Script) -> None:
    """Placements, holds, scores and the order of the other instances are the same, and so are their times."""
    assert_simulated_alike(script)


@mock.patch("scheduler.admission.wait.MAX_BACKGROUND_WAIT_S", 1.0)
@mock.patch("scheduler.admission.wait.MAX_LATE_S", 0.5)
@examples(60)
@given(script=promises())
def test_requests_with_deadlines_are_decided_alike(script: Script) -> None:
    """Held, late, demoted and shed ones, by the asyncio driver."""
    record = Record()
    with recording(record):
        drive(script, by_place)
    assert_same(record, reference(script))


SIMULATED = (
    "all reply",
    "one is excluded",
    "one drains",
    "one engine failed",
    "held to the deadline",
    "held until admitted",
)


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_the_simulator_decides_as_the_reference_does_by_every_policy(policy: str, name: str) -> None:
    """In the scenarios that it has: calls neither fail nor conflict, instances may be down or drain."""
    assert_simulated_alike(without_failures(scenarios(policy)[name]))


@examples(300)
@given(script=scripts((), roles=True).map(without_failures))
def test_the_simulator_decides_as_the_reference_does_among_instances_with_roles(script: Script) -> None:
    """Both legs as well, and for how long the blocks of the first are predicted to be held."""
    assert_simulated_alike(script)


SIMULATED_WITH_ROLES = (
    "all reply",
    "one is excluded",
    "a pool is excluded",
    "a prefill instance drains",
    "all prefill instances drain",
    "all decode instances drain",
    "prefill engines failed",
    "decode engines failed",
    "no prefill instance",
    "no decode instance",
    "many at once",
    "held to the deadline",
)


@pytest.mark.parametrize("name", SIMULATED_WITH_ROLES)
@pytest.mark.parametrize("policy", ROLE_POLICIES)
def test_the_simulator_decides_as_the_reference_does_in_scenarios_with_roles(policy: str, name: str) -> None:
    """In those that it has, by every policy, and by every option for legs."""
    assert_simulated_alike(without_failures(scenarios_with_roles(policy)[name]))


def assert_simulated_alike(script: Script) -> None:
    """Run a script through the simulator and the reference, and compare what they have in common."""
    record, expected = Record(), reference(script, fresh=True)
    with recording(record):
        held = simulate(script)
    for step, other in zip(in_both(record), in_both(expected), strict=True):
        assert step == other
    assert record.times_s == pytest.approx(expected.times_s, abs=1e-6)
    legs = [(name, *details) for name, kind, *details in expected.steps if kind == "Reserve"]
    blocks_held_s = [(name, times[-1]) for name, _, leg, *_, times in legs if leg == PREFILL]
    assert held == [(name, LEASE_S if seconds < 0 else seconds) for name, seconds in blocks_held_s]
    held_s = {name: held_s_of(decision) for name, decision in record.decisions.items()}
    assert held_s == pytest.approx(
        {name: held_s_of(decision) for name, decision in expected.decisions.items()}, abs=1e-6
    )


# The gRPC service on the wall clock.


@dataclass(slots=True, kw_only=True)
class ScriptedStub(StubSidecar):
    """A sidecar on a real port that replies to all requests as a script says of the first one."""

    scripted: Sidecar
    forecast: Reply = field(init=False)
    reservation: Reply = field(init=False)

    def __post_init__(self) -> None:
        """Set what the stub itself can do."""
        script = self.scripted.script
        self.forecast, self.reservation = (
            getattr(script.arrivals[0], kind).get(self.name, [Reply()])[0] for kind in CALLS
        )
        self.e2e_s, self.ttft_s, self.per_reservation_s = self.scripted.instance.e2e_s, TTFT_S, script.per_reservation_s
        self.load = self.scripted.indicators()

    def prediction(self, request: common_pb2.Request) -> predictor_pb2.Prediction:
        """Return a forecast of the leg that is asked about."""
        prediction = StubSidecar.prediction(self, request)
        if request.leg:
            self.scripted.num_held = len(self.held)
            forecast = self.scripted.forecast(leg=LEG_NAMES[request.leg], in_s=request.in_s)
            prediction.forecast.CopyFrom(forecast_message(forecast))
        return prediction

    async def predict(self, raw: bytes, context: Any) -> bytes:
        """Reply with a forecast, or fail."""
        await fail(self.forecast.status, context)
        response = predictor_pb2.PredictResponse.FromString(await StubSidecar.predict(self, raw, context))
        asked = predictor_pb2.PredictRequest.FromString(raw)
        if asked.with_delays:
            self.scripted.num_held = len(self.held)
            for request, prediction in zip(asked.requests, response.predictions, strict=True):
                leg = LEG_NAMES[request.leg]
                forecast = self.scripted.forecast(leg=leg, in_s=request.in_s, delays=True)
                prediction.forecast.CopyFrom(forecast_message(forecast))
        return as_scripted(response, self.forecast.status)

    async def reserve(self, raw: bytes, context: Any) -> bytes:
        """Reserve for others, then as always, or fail."""
        for _ in range(self.reservation.others_first):
            self.version += 1
            self.held[f"other-{self.version}"] = predictor_pb2.ReserveRequest()
        await fail(self.reservation.status, context)
        self.refuse_reservations = self.reservation.status in (REFUSED, STOPPED)
        response = predictor_pb2.ReserveResponse.FromString(await StubSidecar.reserve(self, raw, context))
        return as_scripted(response, self.reservation.status)

    async def release(self, raw: bytes, context: Any) -> bytes:
        """Release a reservation, and report nothing else."""
        if self.scripted.instance.keeps_released:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "by the test")
        response = common_pb2.ReleaseResponse.FromString(await StubSidecar.release(self, raw, context))
        return common_pb2.ReleaseResponse(released=response.released).SerializeToString()


async def fail(status: CandidateStatus, context: Any) -> None:
    """End a call as an instance does that cannot reply."""
    if status is LATE:
        await asyncio.Event().wait()
    if status is DOWN:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "by the test")


def as_scripted(
    response: predictor_pb2.PredictResponse | predictor_pb2.ReserveResponse, status: CandidateStatus
) -> bytes:
    """Serialise a reply of this status; indicators are reported by the stream alone, as in the reference."""
    response.ClearField("indicators")
    if status is INVALID:
        return b"\xff"
    if status is STOPPED:
        response.state = common_pb2.INSTANCE_STATE_DOWN
    if status is REFUSED and isinstance(response, predictor_pb2.PredictResponse):
        for prediction in response.predictions:
            prediction.refusal.field, prediction.refusal.reason = NOTES[REFUSED].split(": ")
    return response.SerializeToString()


DRAWS_PER_ATTEMPT = ("random", "power_of_two", "round_robin", SHORTLISTED)


def on_the_wall_clock(policy: str, name: str) -> bool:
    """Whether a scenario does not depend on how fast the machine is, and takes little time."""
    if name.startswith("held"):  # how many attempts there are varies
        return name == "held to the deadline" and policy not in DRAWS_PER_ATTEMPT
    if "late" in name:  # every call takes its deadline
        return name != "all are late" and policy in ("block", "jsq")
    if policy == "slo" and name == "others reserve first":  # it waits until the queues that they make are shorter
        return False
    return name not in ("one engine failed", "all engines failed", "too many are held")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "name"), [(policy, name) for policy, name in CASES if on_the_wall_clock(policy, name)]
)
def test_the_grpc_service_decides_as_the_reference_does_by_every_policy(policy: str, name: str) -> None:
    """Placements, bases, runners-up, candidates and reasons are the same; notes of failures are gRPC's own."""
    assert_served_alike(scenarios(policy)[name], waits="late" in name)


SERVED_WITH_ROLES = (
    "all reply",
    "p down",
    "pq down",
    "pq down when reserving",
    "ab stopped",
    "ab down when reserving",
    "abpq refused",
    "others reserve first at abpq",
    "a pool is excluded",
    "a dry run",
    "all prefill instances drain",
    "all decode instances drain",
    "no prefill instance",
    "no decode instance",
    "releases fail",
    "pq down, refusing",
)


@pytest.mark.parametrize("name", SERVED_WITH_ROLES)
@pytest.mark.parametrize("policy", ["block", "marginal", "jsq", "pd_threshold: non_cached_tokens = 5"])
def test_the_grpc_service_decides_as_the_reference_does_among_instances_with_roles(policy: str, name: str) -> None:
    """Both legs cross the wire, with the reason."""
    assert_served_alike(scenarios_with_roles(policy)[name], waits=False)


def assert_served_alike(script: Script, *, waits: bool) -> None:
    """Run a script through the service, one request after the other."""
    expected = [step for step in reference(script).steps if step[1] in ("Placed", "Shed")]

    async def test() -> None:
        stubs = [ScriptedStub(name=one.name, scripted=Sidecar(one, script)) for one in script.instances]
        for stub in stubs:
            await stub.start()
        listed = Listed(
            [
                replace(
                    stub.instance,
                    state="draining" if stub.scripted.instance.draining else "ready",
                    role=stub.scripted.instance.role,
                )
                for stub in stubs
            ]
        )
        settings = {
            "policy": script.policy,
            "seed": script.seed,
            "max_conflicts": script.max_conflicts,
            "failures_to_open": 1000,
            "sidecar_deadline_s": 2.0 if waits else 30.0,
            "without_pool": script.without_pool,
        }
        try:
            async with scheduler(listed, **settings) as client:
                if any(part.needs_indicators for part in policy_from(script.policy).parts):
                    await indicators_known(client, len(stubs))
                for (request_id, kind, *details), arrival in zip(expected, script.arrivals, strict=True):
                    request = client.request(request_id=request_id, prompt_tokens=PROMPT_TOKENS, model="")
                    deciding = client.decide(
                        request,
                        explain=True,
                        exclude_instance_ids=sorted(arrival.excluded),
                        dry_run=arrival.dry_run,
                    )
                    if kind == "Shed":
                        blames_request = details[0] == "ValueError"
                        await refused(
                            deciding,
                            grpc.StatusCode.INVALID_ARGUMENT if blames_request else grpc.StatusCode.UNAVAILABLE,
                        )
                        continue
                    assert on_the_wire(await deciding) == from_the_core(details)
        finally:
            for stub in stubs:
                await stub.stop()

    run(test)


async def indicators_known(client: Client, num: int) -> None:
    """Wait for the first reports; a dry run by another policy leaves no trace."""

    async def all_known() -> bool:
        decision = await client.decide(policy="jsq", dry_run=True, explain=True)
        return sum(one.indicators.num_running > 0 for one in decision.candidates) == num

    while not await all_known():
        await asyncio.sleep(0.001)


def on_the_wire(decision: common_pb2.Decision) -> tuple[Any, ...]:
    """What a caller gets to know of a decision."""
    scores = {one.instance_id: round(one.score, 6) if one.HasField("score") else None for one in decision.candidates}
    next_best = [one.instance_id for one in decision.next_best]
    return (
        decision.instance.instance_id,
        decision.prefill.instance.instance_id,
        decision.disaggregation,
        decision.basis,
        next_best,
        line_of(decision.why),
        statuses(decision),
        scores,
    )


def from_the_core(details: Sequence[Any]) -> tuple[Any, ...]:
    """The same of a decision of the reference."""
    instance_id, basis, _, _, disaggregation, legs, next_best, why, candidates = details
    statuses = {name: common_pb2.CandidateFate.Name(FATES[status]) for name, status, *_ in candidates}
    if basis is DecisionBasis.LAST_RESORT:  # there the wire knows another word for it
        statuses = {name: fate.replace("LATE", "LAST_INDICATORS") for name, fate in statuses.items()}
    return (
        instance_id,
        next((name for kind, name, *_ in legs if kind == PREFILL), ""),
        disaggregation,
        BASES[basis],
        list(next_best[:MAX_NEXT_BEST]),
        line_of(why),
        {name: fate.removeprefix("CANDIDATE_FATE_") for name, fate in statuses.items()},
        {name: score for name, _, score, *_ in candidates},
    )


def line_of(why: str) -> str:
    """An explanation without gRPC's words for failures, and without how long exactly a request was held."""
    return re.sub(r"held [0-9.]+ s", "held", re.sub(r"(could be compared:|; without).*", r"\1", why))
