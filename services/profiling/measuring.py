"""Having an engine run planned batches within a budget of time, and writing down what its steps took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import numpy as np

from predictor.config import EngineConfig
from predictor.fitting.batch_time_estimate import Rough
from predictor.fitting.measurement_batches import Batch, BatchItem, BatchLimits, mixed, structured
from services.engine_state.view import UnreadableError
from services.http.client import Origin
from services.profiling.sending import PromptSender, Sent
from services.profiling.watching import ObservedBatch, Watch, joined_outcomes, joined_steps

POLL_S = 0.02
STRUCTURED_SHARE = 0.5  # of the budget, at most; the rest goes to mixes, which are what real traffic is like
MIX_SHARE = 0.15  # of the budget that one mix may take
WARM_UP = Batch(kind="warm-up", streams=((BatchItem(prompt_tokens=8, output_tokens=4),),) * 2)
SHOWN_S = 5.0  # after its answer, a request's outcome is shown by then
PATIENCE = 0.2  # of the budget, for requests of others to end
FEWEST_BUDGET_S = 5.0

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """What to measure, and for how long at most."""

    origin: Origin
    state_file: str
    budget_s: float
    seed: int = 0
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Refuse a budget in which nothing can be measured."""
        if not FEWEST_BUDGET_S <= self.budget_s < 1e6:
            raise ValueError(f"budget: must be at least {FEWEST_BUDGET_S:g} s, not {self.budget_s:g} s")


@dataclass(slots=True, kw_only=True)
class Measured:
    """What came of it: the engine, its steps, when requests were where, and how many batches others disturbed."""

    model: str
    config: EngineConfig
    source: str
    clock_rate: float
    steps: np.ndarray
    transits: np.ndarray  # seconds on the way: to the engine's loop, and from it; a row for each request that tells
    num_requests: int
    num_batches: int
    num_disturbed: int
    num_preemptions: int
    took_s: float


@dataclass(slots=True, kw_only=True)
class _Notes:
    steps: list[np.ndarray] = field(default_factory=list)
    transits: list[tuple[float, float]] = field(default_factory=list)
    num_requests: int = 0
    num_batches: int = 0
    num_disturbed: int = 0


async def measure(wish: MeasurementPlan, progress: Progress) -> Measured:
    """Measure; ValueError where the engine cannot be seen, refuses requests, or has other traffic all the time."""
    mine = f"profile-{uuid4().hex[:12]}-"
    watch = _watching(wish.state_file, mine)
    sender = PromptSender(wish.origin, mine, wish.api_key)
    try:
        return await _Measuring(wish, watch, sender, progress).run()
    except UnreadableError as error:
        raise ValueError(f"engine: it is gone: {error}") from None
    finally:
        sender.close()
        watch.close()


class _Measuring:
    """One measurement, from the first batch to the end of the budget."""

    def __init__(self, wish: MeasurementPlan, watch: Watch, sender: PromptSender, progress: Progress) -> None:
        self._wish = wish
        self._watch = watch
        self._sender = sender
        self._progress = progress
        self._room = BatchLimits.of(watch.config)
        self._rough = Rough()
        self._notes = _Notes()
        self._start_s = time.monotonic()
        self._end_s = self._start_s + wish.budget_s

    async def run(self) -> Measured:
        """Run batch after batch."""
        model = await self._sender.find_out()
        num_preemptions = self._watch.num_preemptions
        await self._run(WARM_UP if self._room.sequences > 1 else Batch(kind="warm-up", streams=WARM_UP.streams[:1]))
        self._notes = _Notes()
        for batch in self._plan():
            await self._run(batch)
        notes = self._notes
        if notes.num_batches == notes.num_disturbed:
            raise ValueError(_disturbed(notes))
        return Measured(
            model=model,
            config=self._watch.config,
            source=str(self._watch.settings.get("source", "an engine")),
            clock_rate=self._watch.clock_rate,
            steps=np.concatenate(notes.steps),
            transits=np.array(notes.transits).reshape(-1, 2),
            num_requests=notes.num_requests,
            num_batches=notes.num_batches,
            num_disturbed=notes.num_disturbed,
            num_preemptions=self._watch.num_preemptions - num_preemptions,
            took_s=time.monotonic() - self._start_s,
        )

    def _plan(self) -> Iterator[Batch]:
        """Give batches that will end in time: first those of the plan, then mixes."""
        structured_until_s = self._start_s + STRUCTURED_SHARE * self._wish.budget_s
        for batch in structured(self._room):
            if time.monotonic() + self._rough.seconds(batch, self._room) <= structured_until_s:
                yield batch
        generator = np.random.default_rng(self._wish.seed)
        num_refused = 0
        while (left_s := self._end_s - time.monotonic()) > 0 and num_refused < 1000:
            batch = mixed(self._room, generator)
            longest_s = min(left_s, MIX_SHARE * self._wish.budget_s)
            if not self._room.holds(batch) or self._rough.seconds(batch, self._room) > longest_s:
                num_refused += 1
                continue
            num_refused = 0
            yield batch

    async def _run(self, batch: Batch) -> None:
        """Run one batch on an engine that has nothing else to do, and take down what is seen."""
        await self._until_quiet()
        self._watch.take()
        sent: list[Sent] = []
        sending = asyncio.create_task(self._sender.send_all(batch.streams))
        try:
            while not sending.done() and time.monotonic() < self._end_s:
                await asyncio.wait([sending], timeout=POLL_S)
                self._look()
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        if not sending.cancelled():
            sent = sending.result()
        seen = await self._outcomes_of(sent)
        self._notes.num_batches += 1
        if seen.strangers:
            self._notes.num_disturbed += 1
            return
        steps = joined_steps(seen)
        self._notes.steps.append(steps)
        self._notes.num_requests += len(sent)
        self._notes.transits += self._transits(sent, seen)
        self._rough.learn(np.concatenate(self._notes.steps))

    async def _outcomes_of(self, sent: Sequence[Sent]) -> ObservedBatch:
        """Wait until what was answered is shown to have ended."""
        seen = self._watch.take()
        deadline_s = time.monotonic() + SHOWN_S
        while sum(map(len, seen.outcomes)) < len(sent) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S / 4)
            self._look()
            more = self._watch.take()
            seen.steps += more.steps
            seen.outcomes += more.outcomes
            seen.strangers |= more.strangers
        return seen

    def _transits(self, sent: Sequence[Sent], seen: ObservedBatch) -> list[tuple[float, float]]:
        """What requests took to the loop, if it did nothing else then, and their first tokens to us."""
        rows = {Watch.name_of(row): row for row in joined_outcomes(seen)}
        found = []
        for one in sent:
            if (row := rows.get(one.name)) is None:
                continue
            inward_s = self._watch.wall_s(float(row["scheduled_s"])) - one.sent_s
            outward_s = one.first_s - self._watch.wall_s(float(row["first_token_s"]))
            found.append((inward_s if self._went_straight_in(one, row, seen) else np.nan, outward_s))
        return found

    def _went_straight_in(self, one: Sent, row: np.void, seen: ObservedBatch) -> bool:
        """Tell whether no step was under way when a request was sent, and the first one then began with it."""
        steps = joined_steps(seen)
        sent_s = (one.sent_s - self._watch.wall_s(0.0)) * self._watch.clock_rate
        later = steps[steps["start_s"] + steps["seconds"] > sent_s]
        return len(later) > 0 and sent_s < later["start_s"].min() and later["start_s"].min() == row["scheduled_s"]

    async def _until_quiet(self) -> None:
        """Wait for requests of others to end, if there are any; ValueError where they do not."""
        deadline_s = min(self._end_s, time.monotonic() + PATIENCE * self._wish.budget_s)
        self._look()
        while not self._watch.is_idle:
            if time.monotonic() > deadline_s:
                raise ValueError(_disturbed(self._notes))
            await asyncio.sleep(POLL_S)
            self._look()

    def _look(self) -> None:
        self._watch.look()
        self._progress(min(1.0, (time.monotonic() - self._start_s) / self._wish.budget_s))


def _disturbed(notes: _Notes) -> str:
    times = f"; they disturbed {notes.num_disturbed} of {notes.num_batches} batches" if notes.num_disturbed else ""
    return f"engine: others send it requests{times}: measure it while it has nothing else to do"


def _watching(state_file: str, mine: str) -> Watch:
    try:
        return Watch(state_file, mine)
    except UnreadableError as error:
        raise ValueError(f"state_file: {error}; does the engine run with the plug-in?") from None
