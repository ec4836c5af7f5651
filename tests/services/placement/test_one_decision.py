"""One decision, many drivers: the same answers, failures, conflicts and times give the same placements and holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from protos.block.v1 import common_pb2, predictor_pb2, scheduler_pb2
from scheduler.candidate import CandidateStatus
from scheduler.candidates import Candidates
from scheduler.indicators import INDEX_OF, Column
from scheduler.placement import DecisionBasis
from scheduler.policy import policy_from
from services.gateway.schedulers import InProcessScheduler
from services.http.errors import ApiError
from services.placement.decision_message import BASES, FATES, MAX_NEXT_BEST
from services.placement.driver import PlacementDriver
from simulator.assembly import simulation
from simulator.conditions import Conditions
from simulator.run import CALL, FORECAST_FIELDS, Simulation
from simulator.workload import RequestLengths, workload
from tests.scheduler.scripted import (
    FIRST_S,
    PROMPT_TOKENS,
    TTFT_S,
    Arrival,
    Record,
    Reply,
    Script,
    ScriptedInstance,
    Sidecar,
    recording,
    reference,
)
from tests.services.placement.scripted_connection import Entry, drive
from tests.services.scheduler_server.running import refused, run, scheduler, statuses
from tests.services.stub_sidecars import StubSidecar
from tests.simulator.small_clusters import specs
from tests.strategies import examples

HOLD = 'hold: hold = "predicted_queue_s < 0.5 and predicted_preemptions < 1", hold_s = 0.3'
POLICIES = (
    "block",
    "block: k = 1",
    "block: k = 2, shortlist = 'jsq'",
    "block: filter = 'num_running < 3'",
    "marginal",
    "block_mean",
    "lmetric",
    "jsq",
    "jsq: tie_break = 'num_reserved'",
    "power_of_two",
    "round_robin",
    HOLD,
    HOLD,
    'jsq: hold = "batch_size < 3", hold_s = 0.2',
    'block: hold = "num_running < 0", hold_s = 0.1',
)
FORECAST, LATE, DOWN, INVALID, REFUSED, STOPPED = (
    CandidateStatus.FORECAST,
    CandidateStatus.LATE,
    CandidateStatus.DOWN,
    CandidateStatus.INVALID,
    CandidateStatus.REFUSED,
    CandidateStatus.STOPPED,
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
def scripts(draw: Any, statuses: tuple[CandidateStatus, ...] = (LATE, DOWN, INVALID, REFUSED, STOPPED)) -> Script:
    """A few requests that meet a few instances; no two things happen at the same time.

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
            status=draw(st.sampled_from(statuses)) if fails else FORECAST,
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
        )

    def arrival() -> Arrival:
        return Arrival(
            after_s=1e-3 + after_s(draw(st.sampled_from((10, 200)))),
            forecasts=all_after(replies(3)),
            reservations=all_after(replies(3)),
            excluded=frozenset(draw(st.sampled_from(("", "", "", "a", "b")))),
            dry_run=draw(st.integers(0, 9)) == 0,
        )

    def all_after(given: dict[str, list[Reply]]) -> dict[str, list[Reply]]:
        return {name: given.get(name) or [Reply(after_s=after_s(30))] for name in names}

    return Script(
        policy=draw(st.sampled_from(POLICIES)),
        instances=[instance(name) for name in names],
        arrivals=[arrival() for _ in range(draw(st.integers(1, 6)))],
        max_conflicts=draw(st.sampled_from((0, 1, 10))),
        max_held=draw(st.sampled_from((1, 2, 1000))),
        forecast_always=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


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
            assert decision._held_s == pytest.approx(other._held_s, abs=1e-6)


@pytest.mark.parametrize("entry", ENTRIES)
@examples(150)
@given(script=scripts())
def test_the_asyncio_driver_decides_as_the_reference_does(entry: str, script: Script) -> None:
    """Intentions, placements, holds, explanations and candidates are the same, and so are their times."""
    record = Record()
    with recording(record):
        drive(script, ENTRIES[entry])
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
    """The same script at the same times, where every instance is healthy, replies at once, and reserves."""
    arrivals = sorted((Arrival(after_s=one.after_s) for one in script.arrivals), key=lambda one: one.after_s)
    instances = [
        replace(one, name=f"instance-{row}", draining=False, engine_failed=False)
        for row, one in enumerate(script.instances)
    ]
    return replace(
        script, arrivals=arrivals, instances=instances, max_conflicts=10, max_held=1000, forecast_always=False
    )


def simulate(script: Script) -> None:
    """Run a script through the simulator: forecasts and indicators are the script's, and so is the clock."""
    sidecars = [Sidecar(one, script) for one in script.instances]

    def look(self: Simulation, _now_s: float) -> None:
        for row, sidecar in enumerate(sidecars):
            for name, value in sidecar.indicators().items():
                self.reported[INDEX_OF[name], row] = value

    def forecast(
        self: Simulation, among: Candidates, _number: int, _now_s: float, with_delays: bool
    ) -> dict[str, Column]:
        rows = range(len(sidecars)) if among.rows is None else among.rows.tolist()
        forecasts = [sidecars[row].forecast(delays=with_delays) for row in rows]
        columns = {
            "predicted_ttft_s": [one.ttft_s for one in forecasts],
            "predicted_e2e_s": [one.e2e_s for one in forecasts],
            "predicted_queue_s": [one.queue_s for one in forecasts],
            "predicted_preemptions": [one.num_preemptions for one in forecasts],
            "others_preempted": [one.others_preempted for one in forecasts],
            "delay_sum_s": [one.delay_sum_s for one in forecasts],
            "delay_worst_s": [one.delay_worst_s for one in forecasts],
        }
        assert columns.keys() == FORECAST_FIELDS.keys()
        read = self.schedulers[0].policy.forecast_fields
        return {name: np.array(columns[name]) for name in columns if name in read or name == "predicted_e2e_s"}

    def send(_self: Simulation, _scheduler: object, _number: int, index: int, _shown_s: float) -> None:
        sidecars[index].reserve(Reply(), None)

    num = len(script.arrivals)
    work = workload(
        RequestLengths(prompt_tokens=np.full(num, PROMPT_TOKENS), output_tokens=np.full(num, 9)),
        np.array([FIRST_S + one.after_s for one in script.arrivals]),
    )
    with mock.patch.multiple(Simulation, look=look, _forecast=forecast, _note_sent=send):
        run = simulation(specs(len(sidecars)), work, script.policy, Conditions(sample_s=0.0))
        core = run.schedulers[0].core
        core.policy = policy_from(script.policy, script.seed)
        core.random = np.random.default_rng(script.seed).random
        for sidecar in sidecars:
            for after_s in sidecar.instance.finishes_s:
                run.schedule(FIRST_S + after_s, CALL, lambda _, sidecar=sidecar: sidecar.finish())
        run.run()


def in_both(record: Record) -> list[tuple[Any, ...]]:
    """What the simulator and live schedulers have in common: simulated reservations never fail, and are unconditional."""
    steps = []
    for name, kind, *all_details in record.steps:
        details = all_details
        if kind == "Reserve":
            details = all_details[:1]
        elif kind == "Placed":
            decision = record.decisions[name]
            scores = [(one.instance_id, one.score, one.admits) for one in decision.candidates()]
            details = [details[0], details[1], list(decision.placement.next_best), scores]
        steps.append((name, kind, *details))
    return steps


@examples(150)
@given(script=scripts(()).map(without_failures))
def test_the_simulator_decides_as_the_reference_does(script: Script) -> None:
    """Placements, holds, scores and the order of the other instances are the same, and so are their times."""
    record, expected = Record(), reference(script, fresh=True)
    with recording(record):
        simulate(script)
    for step, other in zip(in_both(record), in_both(expected), strict=True):
        assert step == other
    assert record.times_s == pytest.approx(expected.times_s, abs=1e-6)
    held_s = {name: decision._held_s for name, decision in record.decisions.items()}
    assert held_s == pytest.approx({name: decision._held_s for name, decision in expected.decisions.items()}, abs=1e-6)


# The gRPC service on the wall clock.


@dataclass(slots=True, kw_only=True)
class Crowded(StubSidecar):
    """A sidecar at which others reserve before each reservation of this scheduler."""

    others_first: int = 0

    async def reserve(self, raw: bytes, context: Any) -> bytes:
        """Reserve for others, then as always."""
        for _ in range(self.others_first):
            self.version += 1
            self.held[f"other-{self.version}"] = predictor_pb2.ReserveRequest()
        return await StubSidecar.reserve(self, raw, context)


def stub_of(instance: ScriptedInstance, script: Script) -> Crowded:
    """A sidecar on a real port that replies to all requests as the script says of the first one."""
    arrival = script.arrivals[0]
    forecast = arrival.forecasts.get(instance.name, [Reply()])[0]
    reservation = arrival.reservations.get(instance.name, [Reply()])[0]
    return Crowded(
        name=instance.name,
        e2e_s=instance.e2e_s,
        ttft_s=TTFT_S,
        per_reservation_s=script.per_reservation_s,
        state=common_pb2.INSTANCE_STATE_DOWN if forecast.status is STOPPED else common_pb2.INSTANCE_STATE_READY,
        refuse=grpc.StatusCode.UNAVAILABLE if forecast.status is DOWN else None,
        refuse_prompts_of=PROMPT_TOKENS if forecast.status is REFUSED else -1,
        refuse_reservations=reservation.status is REFUSED,
        others_first=reservation.others_first,
    )


def wall_clock_script(policy: str = "block", num: int = 4, **arrival: Any) -> Script:
    """Requests that come one after the other to three instances."""
    return Script(
        policy=policy,
        instances=[
            ScriptedInstance(name=name, e2e_s=e2e_s) for name, e2e_s in zip("abc", (2.0, 2.15, 2.7), strict=True)
        ],
        arrivals=[Arrival(after_s=10.0 * number, **arrival) for number in range(num)],
        max_conflicts=2,
    )


FAILING = {"a": [Reply(status=DOWN)], "b": [Reply(status=STOPPED)]}

SCRIPTS = {
    "all reply": wall_clock_script(),
    "shortlisted": wall_clock_script("block: k = 2, shortlist = 'round_robin'"),
    "blind": wall_clock_script("round_robin"),
    "one refuses": wall_clock_script(forecasts={"a": [Reply(status=REFUSED)]}),
    "two fail": wall_clock_script(forecasts=FAILING),
    "none can be asked": wall_clock_script(forecasts={**FAILING, "c": [Reply(status=DOWN)]}),
    "all refuse": wall_clock_script(forecasts={name: [Reply(status=REFUSED)] for name in "abc"}),
    "the best refuses reservations": wall_clock_script(reservations={"a": [Reply(status=REFUSED)]}),
    "others reserve first": wall_clock_script(
        reservations={"a": [Reply(others_first=1)], "b": [Reply(others_first=1)]}
    ),
    "excluded": wall_clock_script(excluded=frozenset("a")),
    "held": replace(
        wall_clock_script('hold: hold = "predicted_queue_s < 0.1", hold_s = 0.2'),
        instances=[ScriptedInstance(name="a")],
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_grpc_service_decides_as_the_reference_does(name: str) -> None:
    """Placements, bases, runners-up, candidates and reasons are the same; notes of failures are gRPC's own."""
    script = SCRIPTS[name]
    expected = [step for step in reference(script).steps if step[1] in ("Placed", "Shed")]

    async def test() -> None:
        stubs = [stub_of(instance, script) for instance in script.instances]
        for stub in stubs:
            await stub.start()
        try:
            settings = {"policy": script.policy, "most_conflicts": script.max_conflicts, "failures_to_open": 1000}
            async with scheduler(stubs, **settings) as client:
                for number, (request_id, kind, *details) in enumerate(expected):
                    arrival = script.arrivals[number]
                    request = client.request(request_id=request_id, prompt_tokens=PROMPT_TOKENS, model="")
                    deciding = client.decide(request, explain=True, exclude_instance_ids=sorted(arrival.excluded))
                    if kind == "Shed":
                        code = (
                            grpc.StatusCode.INVALID_ARGUMENT
                            if details[0] == "ValueError"
                            else grpc.StatusCode.UNAVAILABLE
                        )
                        await refused(deciding, code)
                        continue
                    assert on_the_wire(await deciding) == from_the_core(details)
        finally:
            for stub in stubs:
                await stub.stop()

    run(test)


def on_the_wire(decision: common_pb2.Decision) -> tuple[Any, ...]:
    """What a caller gets to know of a decision."""
    scores = {one.instance_id: round(one.score, 6) if one.HasField("score") else None for one in decision.candidates}
    next_best = [one.instance_id for one in decision.next_best]
    return decision.instance.instance_id, decision.basis, next_best, line_of(decision.why), statuses(decision), scores


def from_the_core(details: Sequence[Any]) -> tuple[Any, ...]:
    """The same of a decision of the reference."""
    instance_id, basis, _, _, _, next_best, why, candidates = details
    statuses = {name: common_pb2.CandidateFate.Name(FATES[status]) for name, status, *_ in candidates}
    if basis is DecisionBasis.LAST_RESORT:  # there the wire knows another word for it
        statuses = {name: fate.replace("LATE", "LAST_INDICATORS") for name, fate in statuses.items()}
    return (
        instance_id,
        BASES[basis],
        list(next_best[:MAX_NEXT_BEST]),
        line_of(why),
        {name: fate.removeprefix("CANDIDATE_FATE_") for name, fate in statuses.items()},
        {name: score for name, _, score, *_ in candidates},
    )


def line_of(why: str) -> str:
    """An explanation without gRPC's words for failures, and without how long exactly a request was held."""
    return re.sub(r"held [0-9.]+ s", "held", re.sub(r"(could be compared:|; without).*", r"\1", why))
