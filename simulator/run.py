"""One run of a simulated cluster: requests come, schedulers decide by their policies, engines serve."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.state import NOBODY
from scheduler.candidates import Candidates, Facts
from scheduler.holding import pause_s
from scheduler.indicators import ROW_OF, Column
from scheduler.policy import Policy
from simulator import forecast_kernels, kernels
from simulator.conditions import Conditions
from simulator.fleet import Unit, restart, widened, workspace_for
from simulator.queue_order import QueueOrder
from simulator.result import FATES, FINISHED, LOST, REFUSED, ClusterSample, RunResult
from simulator.scheduler_view import SchedulerView
from simulator.workload import Workload

FOREVER = math.inf
ROWS = np.array([ROW_OF[name] for name in kernels.TELLS], np.int64)
PER_MINUTE, DRAINED = ROW_OF["requests_per_minute"], ROW_OF["drained_s"]
FINISHED_TOTAL = ROW_OF["num_finished_total"]
FREE_BLOCKS, RUNNING, WAITING, PREEMPTIONS, STEP_S = (
    ROW_OF[name] for name in ("num_free_blocks", "num_running", "num_waiting", "num_preemptions_total", "step_s")
)

# What happens besides arrivals, in the order in which it happens at one moment.
BACK, OUT, TICK, HEARD, RETRY, SAMPLE, CALL = range(7)

FORETOLD = {
    "predicted_ttft_s": "first_token_s",
    "predicted_e2e_s": "finished_s",
    "predicted_queue_s": "scheduled_s",
    "predicted_preemptions": "num_preemptions",
    "others_preempted": "others_preempted",
    "delay_sum_s": "delay_sum_s",
    "delay_worst_s": "delay_worst_s",
}


@dataclass(slots=True)
class Simulation:
    """A cluster in motion."""

    units: tuple[Unit, ...]
    work: Workload
    schedulers: list[SchedulerView]
    conditions: Conditions
    fleet: kernels.EngineArrays
    requests: kernels.Requests
    turns: npt.NDArray[np.int64]  # which scheduler a request comes to
    pauses: np.random.Generator  # how long schedulers wait that hold requests
    workspace: Any = None
    results: Any = None
    told: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    decisions: Any = None
    samples: list[ClusterSample] = field(default_factory=list)
    events: list[tuple[float, int, int, Any]] = field(default_factory=list)
    num_events: int = 0
    unsent: tuple[int, int, float, float] = (NOBODY, 0, 0.0, 0.0)
    possible: npt.NDArray[np.bool_] | None = None  # per request and instance; None where all can serve all
    places: npt.NDArray[np.intp] | None = None  # of the instances that are up; None where all are
    up_since: dict[int, float] = field(default_factory=dict)
    up_s: float = 0.0
    now_s: float = 0.0
    leaving: set[int] = field(default_factory=set)  # instances that finish what they have, and get nothing new
    decided: Callable[[int, int, float, npt.NDArray[np.float64]], None] | None = None  # hears every decision
    homeless: list[int] = field(default_factory=list)  # requests that came while no instance was there
    minute: list[deque[float]] = field(default_factory=list)  # sends of the last minute, by instance
    watches_minute: bool = False
    watches_drain: bool = False
    holds: bool = False
    sees_now: bool = True  # decisions need the instances as they are
    prompt_tokens: list[int] = field(default_factory=list)
    tag_tokens: list[float] = field(default_factory=list)
    orders: QueueOrder | None = None  # of those that are held
    columns: tuple[np.ndarray, ...] = ()  # of `decisions`, for what is written with each request

    def __post_init__(self) -> None:
        """Take out of records what each decision needs: it is found faster."""
        policy = self.schedulers[0].policy
        self.holds = policy.holds
        self.sees_now = self.conditions.has_fresh_indicators or policy.needs_forecast
        lengths, median = self.work.lengths, self.work.tag_median
        self.prompt_tokens = lengths.prompt_tokens.tolist()
        self.tag_tokens = np.where(np.isnan(median), lengths.output_tokens, median).tolist()
        if self.holds:
            self.orders = QueueOrder(self.work, self.units, self.conditions, len(self.schedulers))
        names = ("instance", "scheduler", "num_sends", "predicted_ttft_s", "predicted_e2e_s")
        self.columns = tuple(np.asarray(self.decisions[name]) for name in names)

    def run(self, progress: Callable[[int], None] | None = None) -> RunResult:
        """Serve everything to its end."""
        arrival_s = self.work.arrival_s.tolist()
        for number, now_s in enumerate(arrival_s):
            while self.events and self.events[0][0] <= now_s:
                self._happen()
            self.now_s = now_s
            self._decide(number, now_s)
            if progress is not None and number & 255 == 0:
                progress(number)
        while self._num_held() or (self.events and self.events[0][1] != SAMPLE):
            if self._is_over():
                break
            self._happen()
        return self._end()

    def _is_over(self) -> bool:
        """Tell whether nothing that still happens can matter to a request."""
        self.look(self.now_s)
        busy = self.homeless or self.unsent[0] != NOBODY or self._num_held()
        return not busy and all(
            engine.num_running + engine.num_waiting + engine.num_pending == 0
            for engine in self.fleet.stack.engine[:, 0]
        )

    def _num_held(self) -> int:
        return sum(len(scheduler.held) for scheduler in self.schedulers)

    # What happens besides arrivals.

    def schedule(self, time_s: float, kind: int, what: Any = None) -> None:
        """Let something happen at a time."""
        self.num_events += 1
        heapq.heappush(self.events, (time_s, kind, self.num_events, what))

    def _happen(self) -> None:
        time_s, kind, _, what = heapq.heappop(self.events)
        self.now_s = max(self.now_s, time_s)
        if kind == SAMPLE:
            self.look(time_s)
            self._sample(time_s)
            if time_s < self.work.arrival_s[-1]:
                self.schedule(time_s + self.conditions.sample_s, SAMPLE)
        elif kind == TICK:
            self._tick(time_s, what)
        elif kind == HEARD:
            self.schedulers[what[0]].hear(*what[1:])
        elif kind == RETRY:
            self._retry(what, time_s)
        elif kind == OUT:
            self._out(time_s, what)
        elif kind == CALL:
            what(time_s)
        else:
            self._back(time_s, what)

    def _sample(self, time_s: float) -> None:
        told = self.told.copy()
        self.samples.append(
            ClusterSample(
                time_s=time_s,
                free_blocks=told[FREE_BLOCKS],
                num_running=told[RUNNING],
                num_waiting=told[WAITING],
                num_preemptions=float(told[PREEMPTIONS].sum()),
            )
        )

    def _tick(self, time_s: float, which: int) -> None:
        """Have all instances tell a scheduler of themselves; it hears it later."""
        self.look(time_s)
        told = self.told.copy()
        delay_s, period_s = self.conditions.indicator_delay_s, self.conditions.indicator_period_s
        if delay_s > 0:
            self.schedule(time_s + delay_s, HEARD, (which, time_s, told))
        else:
            self.schedulers[which].hear(time_s, told)
        if time_s < self.work.arrival_s[-1]:
            self.schedule(time_s + max(period_s, 1e-3), TICK, which)

    def _out(self, time_s: float, index: int) -> None:
        self.look(time_s)
        if not self.fleet.units[index].up:
            return
        kernels.harvest(self.fleet, self.requests, index)
        self.fleet.units[index].up = 0
        self.up_s += time_s - self.up_since.pop(index)
        self.find_places()
        rows = self.fleet.stack.requests[index]
        begun = {int(row.serial): row.first_token_s >= 0 for row in rows}
        produced = {int(row.serial): row.copy() for row in rows}
        for number in sorted(restart(self.fleet, index, self.units[index], time_s)):
            row = produced[number]
            outcome = self.requests.outcomes[number]
            if begun[number]:  # its client has seen a part of the answer, and that it broke off
                self.decisions[number].fate = FATES.index(LOST)
                outcome.scheduled_s, outcome.first_token_s = row.scheduled_s, row.first_token_s
                outcome.num_preemptions += row.num_preemptions
                outcome.produced_tokens = row.output_tokens
            else:
                outcome.num_preemptions += row.num_preemptions
                self._decide(number, time_s)

    def _back(self, time_s: float, index: int) -> None:
        self.look(time_s)
        self.fleet.units[index].up = self.fleet.units[index].changed = 1
        self.fleet.stack.engine[index, 0].now_s = time_s
        self.up_since[index] = time_s
        self.find_places()
        self.look(time_s)
        waiting, self.homeless = self.homeless, []
        for number in waiting:
            self._decide(number, time_s)

    def find_places(self) -> None:
        """Note who may get requests."""
        up = self.fleet.units.up.astype(bool)
        up[list(self.leaving)] = False
        self.places = None if up.all() else np.flatnonzero(up)

    # Decisions.

    def look(self, now_s: float) -> None:
        """Send what was decided last, advance all engines, and have them tell of themselves."""
        number, index, arrives_s, shown_s = self.unsent
        while kernels.look_directly(
            self.fleet, self.requests, number, index, arrives_s, shown_s, now_s, ROWS, self.told
        ):
            self.fleet = widened(self.fleet)
            self.workspace = None
        if number >= 0:
            self.unsent = (NOBODY, 0, 0.0, 0.0)
        if self.watches_minute:
            self._count_minute(now_s)
        if self.watches_drain:
            forecast_kernels.drain_directly(self.fleet, self._room(), now_s, self.told[DRAINED])

    def _decide(self, number: int, now_s: float) -> None:
        which = int(self.turns[number])
        held = self.schedulers[which].held
        if not self.holds:
            self._place(number, which, now_s)
        elif held:  # it gets its turn after those
            self._hold(number, which)
        elif not self._place(number, which, now_s, may_hold=True):
            self._hold(number, which)
            self._look_again(which, now_s)

    def _hold(self, number: int, which: int) -> None:
        scheduler = self.schedulers[which]
        scheduler.held.join(number, float(self.work.arrival_s[number]) + scheduler.policy.hold_s)

    def _look_again(self, which: int, now_s: float) -> None:
        waited_s = now_s - float(self.work.arrival_s[self.schedulers[which].held.first])
        self.schedule(now_s + pause_s(waited_s, self.pauses.random()), RETRY, which)

    def _retry(self, which: int, now_s: float) -> None:
        """Place what is held at a scheduler, until one finds nobody who would admit it; look again later."""
        held = self.schedulers[which].held
        for number in held.must_go(now_s):
            self._place(number, which, now_s)
            held.leave(number)
        assert self.orders is not None
        for number in self.orders.in_turn(held.numbers, now_s, float(self.told[STEP_S].mean())):
            if not self._place(number, which, now_s, may_hold=True):
                break
            held.leave(number)
        if held:
            self._look_again(which, now_s)

    def _place(self, number: int, which: int, now_s: float, *, may_hold: bool = False) -> bool:
        """Send a request to an instance; False where it may be held, and nobody admits it now."""
        scheduler = self.schedulers[which]
        policy = scheduler.policy
        places = self._able(number)
        if places is not None and len(places) == 0:
            self._nowhere(number)
            return True
        if self.sees_now or self.unsent[0] != NOBODY:
            self.look(now_s)
        if may_hold:
            places = scheduler.worth_asking(places, now_s)
            if len(places) == 0:
                return False
        among = policy.among(self._candidates(number, which, places, now_s))
        if policy.foretold:
            self._foretell(policy, among, number, now_s)
        best = scheduler.best_admitting(among, now_s) if may_hold else policy.choose(among)
        if best == NOBODY:
            return False
        self._send(number, which, among, best, now_s)
        return True

    def _candidates(
        self, number: int, which: int, places: npt.NDArray[np.intp] | None, now_s: float
    ) -> Candidates:  # fmt: skip
        """Show a request and the instances it could go to as the scheduler knows them."""
        scheduler = self.schedulers[which]
        if self.conditions.has_fresh_indicators:
            scheduler.table.known.told_s[:] = now_s
        hits, prefix_class = self._hits(scheduler, number) if scheduler.policy.needs_prefix else (None, None)
        facts = Facts(
            prompt_tokens=self.prompt_tokens[number], tag_tokens=self.tag_tokens[number], prefix_class=prefix_class
        )
        candidates = scheduler.table.candidates(facts, now_s)
        if hits is not None:
            candidates.add({"prefix_hit_tokens": hits})
        return candidates if places is None else candidates.only(places)

    def _send(self, number: int, which: int, among: Candidates, best: int, now_s: float) -> None:
        """Promise a request to an instance; it is sent when next anything is looked at."""
        index, conditions = among.place(best), self.conditions
        instances, schedulers, num_sends, predicted_ttft_s, predicted_e2e_s = self.columns
        instances[number], schedulers[number] = index, which
        num_sends[number] += 1
        if self.schedulers[which].policy.foretold:
            predicted_ttft_s[number] = self.results["first_token_s"][best]
            predicted_e2e_s[number] = self.results["finished_s"][best]
            if self.decided is not None:
                self.decided(number, index, now_s, self.results["finished_s"][: len(among)])
        promised_s = now_s + conditions.decision_s
        arrives_s = promised_s + conditions.network_s
        self.unsent = (number, index, arrives_s, promised_s if conditions.reservations else arrives_s)
        self._note_sent(self.schedulers[which], number, index, self.unsent[3])

    def _able(self, number: int) -> npt.NDArray[np.intp] | None:
        """Where a request could be served: instances that are up and large enough; None for all."""
        if self.possible is None:
            return self.places
        able = self.possible[number]
        if self.places is None:
            return None if able.all() else np.flatnonzero(able)
        some: npt.NDArray[np.intp] = self.places[able[self.places]]
        return some

    def _nowhere(self, number: int) -> None:
        if self.possible is not None and not self.possible[number].any():
            self.decisions[number].fate = FATES.index(REFUSED)
        else:
            self.homeless.append(number)

    def _hits(self, scheduler: SchedulerView, number: int) -> tuple[Column, int | None]:
        if scheduler.prefixes is not None:
            found = scheduler.prefixes.look_up(self._contents(number), scheduler.table.known.instance_ids)
            return found.num_blocks * self.units[0].config.block_size, found.deepest  # type: ignore[return-value]
        hits = np.zeros(len(self.units))
        deepest = kernels.hits_directly(self.fleet, self.requests, number, hits)
        return hits, None if deepest < 0 else int(deepest)

    def _contents(self, number: int) -> list[int]:
        asked = self.requests.asked[number]
        first = int(asked.first_content)
        return list(self.requests.contents[first : first + int(asked.num_contents)].tolist())

    def _foretell(self, policy: Policy, among: Candidates, number: int, now_s: float) -> None:
        places = np.arange(len(among)) if among.places is None else among.places
        results = self.results[: len(places)]
        forecast_kernels.foretell_directly(
            self.fleet, self.requests, self._room(), number, places, now_s, policy.needs_delays, results
        )
        columns = {name: _column(results, FORETOLD[name]) for name in policy.foretold if name in FORETOLD}
        if "predicted_tpot_s" in policy.foretold:
            columns["predicted_tpot_s"] = (results.finished_s - results.first_token_s) / np.maximum(
                1, results.output_tokens - 1
            )
        among.add(columns)

    def _room(self) -> Any:
        if self.workspace is None:
            self.workspace = workspace_for(self.fleet)
        return self.workspace

    def _note_sent(self, scheduler: SchedulerView, number: int, index: int, shown_s: float) -> None:
        if scheduler.prefixes is not None:
            scheduler.prefixes.sent(scheduler.table.known.instance_ids[index], self._contents(number))
        if self.watches_minute:
            self.minute[index].append(self.now_s)
        if self.conditions.has_fresh_indicators:
            return
        scheduler.note_sent(index, shown_s, self.prompt_tokens[number], self.units[index].config.block_size)

    def _count_minute(self, now_s: float) -> None:
        for index, times in enumerate(self.minute):
            while times and times[0] <= now_s - 60.0:
                times.popleft()
            self.told[PER_MINUTE, index] = len(times)

    # The end.

    def _end(self) -> RunResult:
        self.look(self.now_s)
        kernels.advance(self.fleet, FOREVER)
        for index in range(len(self.units)):
            kernels.harvest(self.fleet, self.requests, index)
            for number in self.fleet.slots.number[index]:
                if number != NOBODY:  # it can never be served: the engine waits for room that nobody will free
                    self.requests.outcomes[number].finished_s = NOBODY
        finished = self.requests.outcomes.finished_s >= 0
        self.decisions.fate[finished & (self.decisions.fate == 0)] = FATES.index(FINISHED)
        ends = self.requests.outcomes.finished_s[finished]
        end_s = max(float(ends.max(initial=0.0)), float(self.work.arrival_s[-1]))
        up_s = self.up_s + sum(end_s - since_s for since_s in self.up_since.values())
        return RunResult(
            work=self.work,
            units=self.units,
            policy=self.schedulers[0].policy.text,
            outcomes=self.requests.outcomes,
            decisions=self.decisions,
            samples=self.samples,
            end_s=end_s,
            up_s=up_s,
        )


def _column(results: Any, name: str) -> Column:
    return np.asarray(results[name], np.float64)
