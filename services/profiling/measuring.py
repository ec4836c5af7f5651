"""Measuring an engine: it runs planned batches within a time budget, and its state file shows the steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import numpy as np

from predictor.fitting.batch_time_estimate import BatchTimeEstimate
from predictor.fitting.engine_profile import EngineMeasurement
from predictor.fitting.measurement_batches import Batch, BatchItem, BatchLimits, mixed, of_leg, structured
from predictor.request import LEGS, SERVE
from predictor.suggestions import require_choice
from services.engine_state.observer import EngineObserver, ObservedBatch, all_outcomes, all_steps
from services.engine_state.view import UnreadableError
from services.http.origin import Origin
from services.profiling.prompt_sender import PromptSender, SentRequest

POLL_S = 0.02
STRUCTURED_SHARE = 0.5  # of the budget, at most; the rest is for mixed batches, which resemble real traffic
MIX_SHARE = 0.15  # of the budget, for one mixed batch
WARM_UP = Batch(kind="warm-up", streams=((BatchItem(prompt_tokens=8, output_tokens=4),),) * 2)
OUTCOME_TIMEOUT_S = 5.0  # from a request's response until the state file shows its outcome
IDLE_SHARE = 0.2  # of the budget, to wait for other requests to end
MIN_BUDGET_S = 5.0
MAX_REJECTED = 1000  # mixed batches in a row that do not fit

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementOptions:
    """Which engine to measure, and the time budget."""

    origin: Origin
    state_file: str
    budget_s: float
    seed: int = 0
    api_key: str | None = None
    leg: str = SERVE

    def __post_init__(self) -> None:
        """Reject a budget that is too short."""
        require_choice("leg", self.leg, LEGS)
        if not MIN_BUDGET_S <= self.budget_s < 1e6:
            raise ValueError(f"budget: must be at least {MIN_BUDGET_S:g} s, not {self.budget_s:g} s")


@dataclass(slots=True, kw_only=True)
class _Records:
    steps: list[np.ndarray] = field(default_factory=list)
    transits: list[tuple[float, float]] = field(default_factory=list)
    num_requests: int = 0
    num_batches: int = 0
    num_disturbed: int = 0


async def measure(options: MeasurementOptions, progress: Progress) -> EngineMeasurement:
    """Measure; ValueError if the state file cannot be read, the engine refuses requests, or it has other traffic."""
    id_prefix = f"profile-{uuid4().hex[:12]}-"
    observer = _observer_of(options.state_file, id_prefix)
    sender = PromptSender(options.origin, id_prefix, options.api_key)
    try:
        return await _Measurement(options, observer, sender, progress).run()
    except UnreadableError as error:
        raise ValueError(f"engine: has exited: {error}") from None
    finally:
        sender.close()
        observer.close()


class _Measurement:
    """One measurement, from the first batch to the end of the budget."""

    def __init__(
        self, options: MeasurementOptions, observer: EngineObserver, sender: PromptSender, progress: Progress
    ) -> None:
        self._options = options
        self._observer = observer
        self._sender = sender
        self._progress = progress
        self._limits = BatchLimits.of(observer.config)
        self._estimate = BatchTimeEstimate()
        self._records = _Records()
        self._start_s = time.monotonic()
        self._end_s = self._start_s + options.budget_s

    async def run(self) -> EngineMeasurement:
        """Run all planned batches, one after the other."""
        model = await self._sender.connect()
        num_preemptions = self._observer.num_preemptions
        await self._run(WARM_UP if self._limits.sequences > 1 else Batch(kind="warm-up", streams=WARM_UP.streams[:1]))
        self._records = _Records()
        for batch in self._plan():
            await self._run(batch)
        records = self._records
        if records.num_batches == records.num_disturbed:
            raise ValueError(_other_traffic(records))
        return EngineMeasurement(
            model=model,
            config=self._observer.config,
            source=str(self._observer.settings.get("source", "an engine")),
            clock_rate=self._observer.clock_rate,
            steps=np.concatenate(records.steps),
            transits=np.array(records.transits).reshape(-1, 2),
            num_requests=records.num_requests,
            num_batches=records.num_batches,
            num_disturbed=records.num_disturbed,
            num_preemptions=self._observer.num_preemptions - num_preemptions,
            took_s=time.monotonic() - self._start_s,
        )

    def _plan(self) -> Iterator[Batch]:
        """Yield batches that are estimated to end in time: the structured ones first, then mixed ones."""
        structured_until_s = self._start_s + STRUCTURED_SHARE * self._options.budget_s
        leg = self._options.leg
        for batch in of_leg(structured(self._limits), leg):
            if time.monotonic() + self._estimate.seconds(batch, self._limits) <= structured_until_s:
                yield batch
        generator = np.random.default_rng(self._options.seed)
        num_rejected = 0
        while (left_s := self._end_s - time.monotonic()) > 0 and num_rejected < MAX_REJECTED:
            (batch,) = of_leg([mixed(self._limits, generator)], leg)
            longest_s = min(left_s, MIX_SHARE * self._options.budget_s)
            if not self._limits.holds(batch) or self._estimate.seconds(batch, self._limits) > longest_s:
                num_rejected += 1
                continue
            num_rejected = 0
            yield batch

    async def _run(self, batch: Batch) -> None:
        """Run one batch while the engine is otherwise idle, and record its steps and outcomes."""
        await self._until_idle()
        self._observer.take()
        sent: list[SentRequest] = []
        sending = asyncio.create_task(self._sender.send_all(batch.streams))
        try:
            while not sending.done() and time.monotonic() < self._end_s:
                await asyncio.wait([sending], timeout=POLL_S)
                self._poll()
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        if not sending.cancelled():
            sent = sending.result()
        observed = await self._outcomes_of(sent)
        self._records.num_batches += 1
        if observed.other_requests:
            self._records.num_disturbed += 1
            return
        steps = all_steps(observed)
        self._records.steps.append(steps)
        self._records.num_requests += len(sent)
        self._records.transits += self._transits(sent, observed)
        self._estimate.fit(np.concatenate(self._records.steps))

    async def _outcomes_of(self, sent: Sequence[SentRequest]) -> ObservedBatch:
        """Return what was observed, once the outcomes of all answered requests are shown."""
        observed = self._observer.take()
        deadline_s = time.monotonic() + OUTCOME_TIMEOUT_S
        while sum(map(len, observed.outcomes)) < len(sent) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S / 4)
            self._poll()
            more = self._observer.take()
            observed.steps += more.steps
            observed.outcomes += more.outcomes
            observed.other_requests |= more.other_requests
        return observed

    def _transits(self, sent: Sequence[SentRequest], observed: ObservedBatch) -> list[tuple[float, float]]:
        """Return the times of requests to the engine's loop, if it was idle, and of their first tokens back."""
        rows = {EngineObserver.client_id_of(row): row for row in all_outcomes(observed)}
        transits = []
        for one in sent:
            if (row := rows.get(one.name)) is None:
                continue
            inward_s = self._observer.wall_s(float(row["scheduled_s"])) - one.sent_s
            outward_s = one.first_s - self._observer.wall_s(float(row["first_token_s"]))
            transits.append((inward_s if self._was_scheduled_at_once(one, row, observed) else np.nan, outward_s))
        return transits

    def _was_scheduled_at_once(self, one: SentRequest, row: np.void, observed: ObservedBatch) -> bool:
        """Whether no step was in flight when a request was sent, and the next step started with it."""
        steps = all_steps(observed)
        sent_s = (one.sent_s - self._observer.wall_s(0.0)) * self._observer.clock_rate
        later = steps[steps["start_s"] + steps["seconds"] > sent_s]
        return len(later) > 0 and sent_s < later["start_s"].min() and later["start_s"].min() == row["scheduled_s"]

    async def _until_idle(self) -> None:
        """Wait until the engine is idle; ValueError if other requests do not end in time."""
        deadline_s = min(self._end_s, time.monotonic() + IDLE_SHARE * self._options.budget_s)
        self._poll()
        while not self._observer.is_idle:
            if time.monotonic() > deadline_s:
                raise ValueError(_other_traffic(self._records))
            await asyncio.sleep(POLL_S)
            self._poll()

    def _poll(self) -> None:
        self._observer.poll()
        self._progress(min(1.0, (time.monotonic() - self._start_s) / self._options.budget_s))


def _other_traffic(records: _Records) -> str:
    disturbed = f" ({records.num_disturbed} of {records.num_batches} batches)" if records.num_disturbed else ""
    return f"engine: has other requests{disturbed}; measure it while it serves no other traffic"


def _observer_of(state_file: str, id_prefix: str) -> EngineObserver:
    try:
        return EngineObserver(state_file, id_prefix)
    except UnreadableError as error:
        raise ValueError(f"state_file: {error}; start the engine with the plug-in") from None
