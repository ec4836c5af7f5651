"""One run of a simulated cluster: requests arrive, schedulers decide by their policies, engines serve."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.loop import FOREVER
from predictor.state import NONE, PREFILL_LEG
from scheduler.candidates import RequestIndicators
from scheduler.decision import Decision
from scheduler.indicators import INDEX_OF
from scheduler.intentions import Ask, Intention, Reserve, Shed, Wait
from scheduler.placement import PlacementRequest
from scheduler.prefix.prompt import NO_BLOCKS, PromptBlocks
from simulator.advance import advance, refresh_directly
from simulator.available_instances import AvailableInstances
from simulator.conditions import SENT_INDEX, Conditions, Outage
from simulator.events import BACK, CALL, OUT, REPORT, SAMPLE, TICK, WAKE, EventQueue
from simulator.fleet import InstanceSpec, restart, with_more_slots
from simulator.fleet_arrays import EngineArrays, Requests
from simulator.indicator_kernels import INDICATORS, count_hits_directly
from simulator.queue_order import QueueOrder
from simulator.request_levels import RequestLevels, levels_of
from simulator.request_slots import collect_finished
from simulator.result import FINISHED, LOST, REFUSED, SHED, STATUSES, ClusterSample, RunResult
from simulator.scheduler_view import SchedulerView
from simulator.simulated_forecasts import SimulatedForecasts
from simulator.workload import Workload

ROWS = np.array([INDEX_OF[name] for name in INDICATORS], np.int64)
PER_MINUTE, DRAINED = INDEX_OF["requests_per_minute"], INDEX_OF["drained_s"]
FREE_BLOCKS, RUNNING, WAITING, PREEMPTIONS, STEP_S, FETCHING, HELD_BLOCKS = (
    INDEX_OF[name]
    for name in (
        "num_free_blocks", "num_running", "num_waiting", "num_preemptions_total", "step_s", "num_fetching",
        "num_held_blocks",
    )
)  # fmt: skip


@dataclass(slots=True)
class Simulation:
    """A cluster in motion."""

    specs: tuple[InstanceSpec, ...]
    work: Workload
    schedulers: list[SchedulerView]
    conditions: Conditions
    fleet: EngineArrays
    requests: Requests
    scheduler_of: npt.NDArray[np.int64]  # by request
    queue_order: QueueOrder
    forecasts: SimulatedForecasts
    available: AvailableInstances
    reported: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    decisions: Any = None
    samples: list[ClusterSample] = field(default_factory=list)
    events: EventQueue = field(default_factory=EventQueue)
    unsent: tuple[int, int, float, float] = (NONE, 0, 0.0, 0.0)
    now_s: float = 0.0
    decided: Callable[[int, int, float, npt.NDArray[np.float64]], None] | None = None  # called for every decision
    unplaced: list[int] = field(default_factory=list)  # requests that arrived while no instance was up
    minute: list[deque[float]] = field(default_factory=list)  # sends of the last minute, by instance
    watches_minute: bool = False
    watches_drain: bool = False
    holds: bool = False
    sees_now: bool = True  # decisions need the instances as they are
    prompt_tokens: list[int] = field(default_factory=list)
    tag_tokens: list[float] = field(default_factory=list)
    columns: tuple[np.ndarray, ...] = ()  # of `decisions`, which each decision writes
    _scheduler_of: list[int] = field(default_factory=list)
    _arrival_s: list[float] = field(default_factory=list)
    _has_fresh_indicators: bool = True
    _needs_forecast: bool = False
    _needs_prefix: bool = False
    _is_ticking: bool = False
    _levels: RequestLevels = field(default_factory=RequestLevels)
    _session_ids: list[str] = field(default_factory=list)
    _no_hits: npt.NDArray[np.float64] | None = None  # where no prompt's content is known

    def __post_init__(self) -> None:
        """Copy what each decision needs out of records, whose fields are slow to read."""
        policy = self.schedulers[0].policy
        self.holds = policy.holds
        self._needs_forecast = any(part.needs_forecast for part in policy.parts)
        self._needs_prefix = any(part.needs_prefix for part in policy.parts)
        self.sees_now = self.conditions.has_fresh_indicators or self._needs_forecast
        lengths, median = self.work.lengths, self.work.tag_median
        self.prompt_tokens = lengths.prompt_tokens.tolist()
        self.tag_tokens = np.where(np.isnan(median), lengths.output_tokens, median).tolist()
        self.queue_order.mean_step_s = lambda: float(self.reported[STEP_S].mean())
        self._scheduler_of, self._arrival_s = self.scheduler_of.tolist(), self.work.arrival_s.tolist()
        self._levels = levels_of(self.work)
        if self.work.session is not None:
            self._session_ids = [str(one) if one >= 0 else "" for one in self.work.session.tolist()]
        self._has_fresh_indicators = self.conditions.has_fresh_indicators
        self._no_hits = np.zeros(len(self.specs)) if lengths.num_contents == 0 else None
        names = (
            "instance", "scheduler", "num_sends", "admitted_in_time",
            "predicted_ttft_s", "predicted_e2e_s", "decided_s",
        )  # fmt: skip
        self.columns = tuple(np.asarray(self.decisions[name]) for name in names)

    def run(self, progress: Callable[[int], bool | None] | None = None) -> RunResult:
        """Serve all requests until they have ended; if `progress` returns True at an arrival, the run ends there."""
        arrival_s = self.work.arrival_s.tolist()
        for number, now_s in enumerate(arrival_s):
            while self.events.next_s <= now_s:
                self._process_event()
            self.now_s = now_s
            self._decide(number, now_s)
            if progress is not None and number & 255 == 0 and progress(number):
                return self._end()
        while self._num_waiting() or self.events.next_kind not in {None, SAMPLE}:
            if self._is_over():
                break
            self._process_event()
        return self._end()

    def _is_over(self) -> bool:
        """Return whether no event that is left can affect a request."""
        self.refresh(self.now_s)
        busy = self.unplaced or self.unsent[0] != NONE or self._num_waiting()
        return not busy and all(
            engine.num_running + engine.num_waiting + engine.num_pending == 0
            for engine in self.fleet.stack.engine[:, 0]
        )

    def _num_waiting(self) -> int:
        return sum(scheduler.core.num_waiting for scheduler in self.schedulers)

    # Events besides arrivals.

    def _process_event(self) -> None:
        time_s, kind, what = self.events.take()
        self.now_s = max(self.now_s, time_s)
        if kind == SAMPLE:
            self.refresh(time_s)
            self._sample(time_s)
            if time_s < self.work.arrival_s[-1]:
                self.events.schedule(time_s + self.conditions.sample_s, SAMPLE)
        elif kind == TICK:
            self._tick(time_s, what)
        elif kind == REPORT:
            self.schedulers[what[0]].take_reports(*what[1:])
        elif kind == WAKE:
            self._wake(what, time_s)
        elif kind == OUT:
            self._out(time_s, what)
        elif kind == CALL:
            what(time_s)
        else:
            self._back(time_s, what)

    def _sample(self, time_s: float) -> None:
        reported = self.reported.copy()
        self.samples.append(
            ClusterSample(
                time_s=time_s,
                free_blocks=reported[FREE_BLOCKS],
                num_running=reported[RUNNING],
                num_waiting=reported[WAITING],
                num_preemptions=float(reported[PREEMPTIONS].sum()),
                num_fetching=reported[FETCHING],
                held_blocks=reported[HELD_BLOCKS],
            )
        )

    def _tick(self, time_s: float, which: int) -> None:
        """Have all instances report to a scheduler, which receives the reports after the delay."""
        self.refresh(time_s)
        reported = self.reported.copy()
        delay_s, period_s = self.conditions.indicator_delay_s, self.conditions.indicator_period_s
        if delay_s > 0:
            self.events.schedule(time_s + delay_s, REPORT, (which, time_s, reported))
        else:
            self.schedulers[which].take_reports(time_s, reported)
        if time_s < self.work.arrival_s[-1]:
            self.events.schedule(time_s + max(period_s, 1e-3), TICK, which)

    def _out(self, time_s: float, outage: Outage) -> None:
        self.refresh(time_s)
        index = outage.instance
        if not self.fleet.instances[index].up:
            return
        if outage.until_s < math.inf:
            self.events.schedule(outage.until_s, BACK, index)
        collect_finished(self.fleet, self.requests, index)
        self.available.went_down(self.fleet, index, time_s)
        numbers, rows = self.fleet.slots.number[index], self.fleet.stack.requests[index]
        lost = {int(numbers[slot]): rows[slot].copy() for slot in np.flatnonzero(numbers != NONE)}
        restart(self.fleet, index, self.specs[index], time_s)
        for number in sorted(lost):
            self.lose(number, lost[number], index, time_s)

    def lose(self, number: int, row: Any, index: int, time_s: float) -> None:
        """Start a request again that an instance has lost, unless its client has received a part of the response."""
        del index
        outcome = self.requests.outcomes[number]
        outcome.num_preemptions += row.num_preemptions
        if row.first_token_s >= 0:
            self.decisions[number].status = STATUSES.index(LOST)
            outcome.scheduled_s, outcome.first_token_s = row.scheduled_s, row.first_token_s
            outcome.produced_tokens, outcome.tokens_on_time = row.output_tokens, row.tokens_on_time
        else:
            self._decide(number, time_s)

    def _back(self, time_s: float, index: int) -> None:
        if index in self.available.removed:
            return
        self.refresh(time_s)
        self.available.came_up(self.fleet, index, time_s)
        self.fleet.stack.engine[index, 0].now_s = time_s
        self.refresh(time_s)
        waiting, self.unplaced = self.unplaced, []
        for number in waiting:
            self._decide(number, time_s)

    # Decisions.

    def refresh(self, now_s: float) -> None:
        """Send the request that was decided last, advance all engines, and write their indicators."""
        number, index, arrives_s, shown_s = self.unsent
        while refresh_directly(
            self.fleet, self.requests, number, index, arrives_s, shown_s, now_s, ROWS, self.reported
        ):
            self.fleet = with_more_slots(self.fleet)
        if number >= 0:
            self.unsent = (NONE, 0, 0.0, 0.0)
        self.observe(now_s)

    def observe(self, now_s: float) -> None:
        """Write the indicators that need more than an engine's state."""
        if self.watches_minute:
            self._count_minute(now_s)
        if self.watches_drain:
            self.forecasts.forecast_drain(self.fleet, now_s, self.reported[DRAINED])

    def _decide(self, number: int, now_s: float) -> None:
        """Start the decision of a request's scheduler."""
        which = self._scheduler_of[number]
        core = self.schedulers[which].core
        levels = self._levels
        indicators = RequestIndicators(
            prompt_tokens=self.prompt_tokens[number],
            tag_tokens=self.tag_tokens[number],
            due_s=levels.due_s[number] - self.conditions.deadline_margin_s,
            tpot_slo_s=levels.tpot_slo_s[number],
            adapter=0 if self.work.adapter is None else int(self.work.adapter[number]),
        )
        request = PlacementRequest(
            number=number,
            indicators=indicators,
            any_model=True,
            arrived_s=self._arrival_s[number],
            max_wait_s=self._max_wait_s(number, now_s),
            objective=levels.objectives[number],
            client_id=levels.tenants[number],
            session_id=self._session_ids[number] if self._session_ids else "",
        )
        decision = core.decision(request)
        if self._prepare(decision, which, now_s):
            self._drive(decision, decision.start(now_s), which, now_s)

    def _max_wait_s(self, number: int, now_s: float) -> float:
        """Return how long after the arrival the caller waits for a decision that starts now."""
        max_wait_s = self.conditions.max_wait_s
        return math.inf if max_wait_s is None else now_s - self._arrival_s[number] + max_wait_s

    def _wake(self, what: tuple[int, Decision], now_s: float) -> None:
        """Tick a decision that waits, unless it was ticked earlier."""
        which, decision = what
        if decision.is_waiting and decision.wait_until_s <= now_s:
            self._tick_decision(decision, which, now_s)

    def _tick_decision(self, decision: Decision, which: int, now_s: float) -> None:
        if self._prepare(decision, which, now_s):
            self._drive(decision, decision.tick(now_s), which, now_s)

    def _prepare(self, decision: Decision, which: int, now_s: float) -> bool:
        """Give a decision the current state of the instances; return False where none can serve its request."""
        request = decision.request
        number = request.number
        request.rows = rows = self.available.able(number)
        if rows is not None and len(rows) == 0:
            decision.cancel(now_s)
            self._no_instance(number)
            self._tick_ready(which, now_s)
            return False
        if self.sees_now or self.unsent[0] != NONE:
            self.refresh(now_s)
        if self._has_fresh_indicators:
            self.schedulers[which].core.instances.table.known.reported_s[:] = now_s
        if self._needs_prefix:
            self._add_prefix(request, number)
        return True

    def _drive(self, decision: Decision, intention: Intention, which: int, now_s: float) -> None:
        """Carry out a decision's intentions at this moment of the virtual clock."""
        while True:
            if isinstance(intention, Reserve):
                self._apply_objective(decision)
                self._send(decision, intention, which, now_s)
                decision.reserved(0.0, now_s)
                break
            if isinstance(intention, Shed):
                self._shed(decision.request.number, intention, now_s)
                break
            if isinstance(intention, Ask):
                self._apply_objective(decision)
                columns = self.forecasts.forecast(self.fleet, self.requests, intention, decision.request.number, now_s)
                intention = decision.answers_in_columns((columns,), now_s)
            else:
                assert isinstance(intention, Wait)
                if intention.until_s < FOREVER:
                    self.events.schedule(max(now_s, intention.until_s), WAKE, (which, decision))
                break
        if self.holds:
            self._tick_ready(which, now_s)

    def _shed(self, number: int, shed: Shed, now_s: float) -> None:
        row = self.decisions[number]
        row.status, row.decided_s = STATUSES.index(SHED), now_s
        row.retry_after_s = math.nan if shed.retry_after_s is None else shed.retry_after_s

    def _apply_objective(self, decision: Decision) -> None:
        """Serve a request that was demoted as best effort without deadlines."""
        number, objective = decision.request.number, decision.request.objective
        if objective is self._levels.objectives[number]:
            return
        self._levels.objectives[number] = objective
        self.decisions[number].demoted = 1
        self._levels.due_s[number] = self._levels.tpot_slo_s[number] = math.inf
        facts = self.requests.facts[number]
        facts.request_class, facts.ttft_slo_s, facts.tpot_slo_s = 1, np.nan, np.nan

    def _tick_ready(self, which: int, now_s: float) -> None:
        """Tick the decisions whose turn has come; one of them that makes others ready leaves these to the same loop."""
        if self._is_ticking:
            return
        self._is_ticking = True
        ready = self.schedulers[which].core.ready
        while ready:
            decision = ready.popleft()
            if decision.is_waiting:
                self._tick_decision(decision, which, now_s)
        self._is_ticking = False

    def _send(self, decision: Decision, reserve: Reserve, which: int, now_s: float) -> None:
        """Reserve a request at an instance; the next refresh sends it."""
        number, index, conditions = decision.request.number, reserve.row, self.conditions
        instances, schedulers, num_sends, admitted_in_time, predicted_ttft_s, predicted_e2e_s, decided_s = self.columns
        instances[number], schedulers[number], decided_s[number] = index, which, now_s
        admitted_in_time[number] = decision.is_admitted_in_time
        num_sends[number] += 1
        if self._needs_forecast:
            best = decision.comparison.position
            if best >= 0:
                predicted_ttft_s[number] = self.forecasts.results["first_token_s"][best]
                predicted_e2e_s[number] = self.forecasts.results["finished_s"][best]
            if self.decided is not None:
                num_compared = len(decision.comparison.compared or ())
                self.decided(number, index, now_s, self.forecasts.results["finished_s"][:num_compared])
        reserved_s = now_s + conditions.decision_s
        arrives_s = reserved_s + conditions.network_s
        self.unsent = (number, index, arrives_s, reserved_s if conditions.reservations else arrives_s)
        self._note_sent(self.schedulers[which], number, index, self.unsent[3])

    def _no_instance(self, number: int) -> None:
        """Keep a request until an instance is back, or refuse one that none could ever serve."""
        if self.available.is_ever_able(number):
            self.unplaced.append(number)
        else:
            self.decisions[number].status = STATUSES.index(REFUSED)

    def _add_prefix(self, request: PlacementRequest, number: int) -> None:
        """Add what is known of the prompt's content: its blocks, or the engines' actual hits."""
        if self.conditions.prefix_view == SENT_INDEX:
            block_size = self.specs[0].config.block_size
            contents = self._contents(number)
            request.blocks = PromptBlocks(names=contents, block_tokens=block_size) if contents else NO_BLOCKS
            return
        if self._no_hits is not None:
            request.prefix_hits = self._no_hits
            return
        hits = np.zeros(len(self.specs))
        deepest = count_hits_directly(self.fleet, self.requests, number, hits)
        request.prefix_hits = hits
        request.indicators.prefix_class = None if deepest < 0 else int(deepest)

    def _contents(self, number: int) -> list[int]:
        asked = self.requests.facts[number]
        first = int(asked.first_content)
        return list(self.requests.contents[first : first + int(asked.num_contents)].tolist())

    def _note_sent(self, scheduler: SchedulerView, number: int, index: int, shown_s: float) -> None:
        if self.watches_minute:
            self.minute[index].append(self.now_s)
        if self._has_fresh_indicators:
            return
        scheduler.note_sent(index, shown_s, self.prompt_tokens[number], self.specs[index].config.block_size)

    def _count_minute(self, now_s: float) -> None:
        for index, times in enumerate(self.minute):
            while times and times[0] <= now_s - 60.0:
                times.popleft()
            self.reported[PER_MINUTE, index] = len(times)

    # The end.

    def run_out(self) -> None:
        """Advance all engines until nothing is left to do."""
        advance(self.fleet, FOREVER)

    def _end(self) -> RunResult:
        self.refresh(self.now_s)
        self.run_out()
        for index in range(len(self.specs)):
            collect_finished(self.fleet, self.requests, index)
            legs = self.fleet.stack.requests.leg[index]
            for number, leg in zip(self.fleet.slots.number[index], legs, strict=True):
                if number != NONE and leg != PREFILL_LEG:  # it waits for blocks that no request will free
                    self.requests.outcomes[number].finished_s = NONE
        finished = self.requests.outcomes.finished_s >= 0
        self.decisions.status[finished & (self.decisions.status == 0)] = STATUSES.index(FINISHED)
        ends = self.requests.outcomes.finished_s[finished]
        end_s = max(float(ends.max(initial=0.0)), float(self.work.arrival_s[-1]))
        return RunResult(
            work=self.work,
            specs=self.specs,
            policy=self.schedulers[0].policy.text,
            outcomes=self.requests.outcomes,
            decisions=self.decisions,
            legs=self.requests.legs,
            samples=self.samples,
            end_s=end_s,
            up_s=self.available.up_s(end_s),
        )
