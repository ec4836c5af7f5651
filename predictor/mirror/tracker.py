"""An engine model kept in step with an engine that shows nothing but its clients' tokens and a few totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from predictor.config import EngineConfig
from predictor.correction import Correction
from predictor.engine import Engine
from predictor.mirror.engine_edits import demoted, promoted, recounted, rewound
from predictor.mirror.step_tally import StepTally
from predictor.request import Request
from predictor.state import FINISHED, NOBODY, RUNNING
from predictor.step_time import StepTime

MOST_AT_ONCE = 64  # steps that one sign may bring to their end
TOO_SOON = 0.3  # of a step's foretold time: none ends earlier, so what shows then belongs to the step before
LEARN_STEPS, LEARN_S = 8, 0.25  # the span over which real time is compared with the foretold
MOST_UNTOLD = 1024  # steps that are learnt from only when it is told how many tokens they had
LAGGING = 8  # events of a stream; behind the others at all of them, it has had several tokens in one
AHEAD = 2  # tokens that the model may be ahead of what was seen; clients see them a moment late


@dataclass(slots=True, kw_only=True)
class Tracked:
    """What is known of one request: whether its tokens are seen one by one, how many were, and when last.

    Engines put several tokens into one event when they are busy, so that `num_hidden` more have come than were seen.
    """

    slot: int
    streamed: bool
    num_seen: int = 0
    num_hidden: int = 0
    heard_s: float
    lags: list[int] = field(default_factory=list)  # tokens that it was behind the model, at its last events

    def noted(self, lag: int) -> None:
        """Note how far it is behind; where that lasts, the tokens have come unseen."""
        self.lags.append(max(0, lag))
        if len(self.lags) == LAGGING:
            self.num_hidden += min(self.lags)
            self.lags.clear()


class Tracker:
    """Runs the engine model on, and puts it right by what is seen; times are the engine's, and given.

    A step that will bring tokens that somebody watches ends when these come, and not before; any other ends when the
    model says. So the model's clock is the engine's own as long as anything is streamed.
    """

    def __init__(self, config: EngineConfig, step_time: StepTime, now_s: float) -> None:
        """Start with an idle engine; what its blocks hold is not known."""
        self.engine = Engine(config, step_time, track_blocks=False)
        self.correction = Correction()
        self.requests: dict[str, Tracked] = {}
        self.elsewhere = 0  # blocks that are held by nobody known, or, below 0, shared
        self.last_step_s = 0.0
        self._num_shifted = 0  # tokens that the model was told of
        self._num_gone = 0  # tokens of requests that have ended
        self._gone: list[str] = []  # ended, and still in a step under way
        self._watched = np.zeros(len(self.engine.state.requests), np.bool_)  # by slot
        self.tally = StepTally()
        self.is_told = False  # how many tokens the engine produces, so that it is learnt then how long they took
        self.engine.state.engine[0].now_s = now_s

    def __contains__(self, name: str) -> bool:
        """Tell whether a request is there."""
        return name in self.requests

    # What is seen.

    def add(self, request: Request, *, streamed: bool) -> None:
        """Let a request arrive; ValueError where the engine could never serve it."""
        self.run_to(request.arrival_s)
        slot = self.engine.add(request)
        if slot >= len(self._watched):
            self._watched = np.concatenate(
                (self._watched, np.zeros(len(self.engine.state.requests) - len(self._watched), np.bool_))
            )
        self._watched[slot] = streamed
        self.requests[request.request_id] = Tracked(slot=slot, streamed=streamed, heard_s=request.arrival_s)
        self.run_to(request.arrival_s)

    def produced(self, name: str, count: int, now_s: float, *, ended: bool = False, exact: bool = True) -> None:
        """Note that the client has got so many tokens by now, and whether they are all.

        A count that is not `exact` may be too low, as several tokens may come at once.
        """
        tracked = self.requests[name]
        self.run_to(now_s)
        row = self.engine.state.requests[tracked.slot]
        if count > tracked.num_seen:
            tracked.num_seen, tracked.heard_s = count, now_s
        if not exact:
            count = max(count, min(count + tracked.num_hidden, int(row.max_tokens)))
        if ended and row.status != FINISHED and count > row.output_tokens:
            row.final_tokens = count  # so that its seat is free for the next step
        if ended and not tracked.streamed:
            self._learn_from_length(tracked, count, now_s)
        if count > row.output_tokens:
            self._end_steps_until(tracked, count, now_s)
        elif count < row.output_tokens - (AHEAD - 1) and (exact or count == 1) and not ended:
            self._set_back(tracked, count)
        if ended:
            ahead = max(0, int(row.output_tokens) - count) if exact else 0
            self.drop(name, now_s, finished=True)
            self._num_gone -= ahead
        elif not exact:
            tracked.noted(int(row.output_tokens) - count)

    def counted(self, name: str, prompt_tokens: int) -> None:
        """Correct the length of a prompt."""
        row = self.engine.state.requests[self.requests[name].slot]
        if row.prompt_tokens == prompt_tokens or row.status == FINISHED or row.output_tokens > 0:
            return
        room = self.engine.config.max_model_len - prompt_tokens
        if room < 1 or -(-prompt_tokens // self.engine.config.block_size) > self.engine.num_blocks:
            return  # the engine is about to refuse it
        self._rewind()
        row.prompt_tokens = prompt_tokens
        row.computed_tokens = min(row.computed_tokens, prompt_tokens - 1)
        row.num_blocks = -(-row.computed_tokens // self.engine.config.block_size)
        row.max_tokens = min(row.max_tokens, room)
        row.final_tokens = min(row.final_tokens, row.max_tokens)
        if row.status == RUNNING:
            row.prefill_tokens = prompt_tokens
        self._replan()

    def drop(self, name: str, now_s: float, *, finished: bool = False) -> None:
        """Take a request out: it has `finished`, so that no further step has it, or its client gave up on it."""
        tracked = self.requests.pop(name)
        self.run_to(now_s)
        row = self.engine.state.requests[tracked.slot]
        if row.status != FINISHED:
            again = finished and row.in_flight_tokens > 0 and self.engine.config.pipeline_depth == 1
            if again:
                self._rewind()
            self.engine.abort(name)
            self._recount()
            if again:
                self._replan()
        self._watched[tracked.slot] = False
        self._num_gone += int(row.output_tokens)
        self._gone.append(name)
        self._let_go()
        self.run_to(now_s)

    # Running on.

    def run_to(self, now_s: float) -> None:
        """Let everything happen that happens by then, but for what is to be seen first."""
        head = self.engine.state.engine[0]
        while True:
            until_s = now_s
            if self.is_watched():
                until_s = min(now_s, math.nextafter(float(self._oldest().end_s), -math.inf))
            if not self._plan(until_s):
                break
        if head.num_in_flight == 0:
            self.tally.cut(float(head.now_s), 0)
            head.now_s = max(head.now_s, now_s)
        self._let_go()

    def late_s(self, now_s: float) -> float:
        """By how much the step under way has outlasted its forecast."""
        return max(0.0, now_s - float(self._oldest().end_s)) if self.engine.state.engine[0].num_in_flight else 0.0

    # Putting right.

    def learn(self, ratio: float, num_steps: int) -> None:
        """Take in that so many steps took so many times what the profile alone foretells."""
        for _ in range(min(num_steps, self.correction.rule.window)):
            self.correction = self.correction.observe(predicted_s=1.0, real_s=ratio)
        self._set_pace()

    def forget_pace(self) -> None:
        """Trust the profile again: an engine that was slow, and got nothing to do since, may be well."""
        if self.correction.ratios:
            self.correction = Correction()
            self._set_pace()

    def _set_pace(self) -> None:
        self.tally.pace = self.correction.factor
        self.engine.set_pace(self.correction.factor)

    def closed_tally(self) -> StepTally:
        """Give what the steps took that have ended by now."""
        head = self.engine.state.engine[0]
        if head.num_in_flight:
            self.tally.close(float(self._oldest().start_s), int(head.num_in_flight))
        return self.tally

    def tokens_a_step(self) -> int:
        """How many tokens the step under way will bring."""
        state = self.engine.state
        if not state.engine[0].num_in_flight:
            return 0
        index = int(state.engine[0].oldest)
        entries = state.batch.view(np.ndarray)[index, : int(state.steps[index].num_scheduled)]
        return int(np.count_nonzero(entries["sampled"]))

    def pass_unseen(self, num_steps: int, now_s: float) -> None:
        """Bring so many steps to their end that nobody has seen."""
        rows = self.engine.state.requests
        shown = [one for one in self.requests.values() if one.num_seen]
        before = [int(rows[one.slot].output_tokens) for one in shown]
        for _ in range(min(num_steps, MOST_AT_ONCE)):
            self._end_step(now_s)
        for one, count in zip(shown, before, strict=True):
            one.num_hidden += int(rows[one.slot].output_tokens) - count

    def take_back(self, num_steps: int) -> None:
        """Take back what so many steps have brought, but for what was seen."""
        self._rewind()
        rows, head = self.engine.state.requests, self.engine.state.engine[0]
        shown = {one.slot: one for one in self.requests.values() if one.num_seen}
        for slot in self.engine.state.running[: head.num_running].tolist():
            row, one = rows[slot], shown.get(slot)
            least = max(1, one.num_seen if one is not None else 1)
            if row.output_tokens > least:
                back = min(num_steps, int(row.output_tokens) - least)
                self._promote(slot, int(row.output_tokens) - back)
                if one is not None:
                    one.num_hidden = max(0, one.num_hidden - back)
        self._replan()

    def hold_elsewhere(self, num_used: int) -> None:
        """Hear how many blocks are held in all; what nobody known holds is held elsewhere."""
        held = recounted(self.engine, 0)
        difference = num_used - held
        # each request may have taken a block since, or given some back
        slack = 2 + int(self.engine.state.engine[0].num_running)
        self.elsewhere = difference if abs(difference) > slack else 0
        self._recount()

    def enter(self, name: str, num_seen: int) -> None:
        """Have a request run, with so many tokens produced, whatever the model thought of it."""
        tracked = self.requests[name]
        self._rewind()
        self._enter(tracked, num_seen)
        self._replan()

    def send_back(self, names: Sequence[str]) -> None:
        """Have requests wait that were thought to run."""
        if not names:
            return
        self._rewind()
        for name in names:
            demoted(self.engine, self.requests[name].slot)
            self._num_shifted -= int(self.engine.state.requests[self.requests[name].slot].output_tokens)
            self.engine.state.requests[self.requests[name].slot].output_tokens = 0
        self._replan()

    def unconfirmed(self, now_s: float, patience_s: float) -> list[str]:
        """Requests whose tokens should have been seen a while ago, and have never been."""
        rows = self.engine.state.requests
        return [
            name
            for name, one in self.requests.items()
            if one.streamed and not one.num_seen
            and rows[one.slot].status == RUNNING and rows[one.slot].output_tokens > AHEAD
            and now_s - rows[one.slot].first_token_s > patience_s
        ]  # fmt: skip

    def _end_steps_until(self, tracked: Tracked, count: int, now_s: float) -> None:
        """Bring the steps to their end that have brought these tokens."""
        row = self.engine.state.requests[tracked.slot]
        is_first = row.output_tokens == 0
        spare = 1  # a step in which it was not thought to be
        for _ in range(MOST_AT_ONCE):
            if row.output_tokens >= count or self._is_too_soon(now_s):
                break
            if not self._would_sample(tracked.slot):
                if not spare:
                    break
                spare -= 1
            self._end_step(now_s)
        if row.output_tokens < count:
            planned_s = max(self.tally.planned, default=0.0)
            if not self.is_told:
                self.tally.lose()  # another step may have passed unseen
            self.enter(next(name for name, one in self.requests.items() if one is tracked), count)
            if is_first and self.tally.planned:  # its prompt was in the step that has ended, and not in this one
                self.tally.amend(max(0.0, planned_s - max(self.tally.planned)))

    def _enter(self, tracked: Tracked, num_seen: int) -> None:
        engine, row = self.engine, self.engine.state.requests[tracked.slot]
        if row.status != RUNNING and engine.state.engine[0].num_running >= engine.config.max_num_seqs:
            demoted(engine, int(engine.state.running[engine.state.engine[0].num_running - 1]))
        self._promote(tracked.slot, num_seen)

    def _learn_from_length(self, tracked: Tracked, count: int, now_s: float) -> None:
        """Of an answer that was not seen growing, its end shows how far behind or ahead the model was with all such."""
        state = self.engine.state
        row = state.requests[tracked.slot]
        behind = count - int(row.output_tokens)
        planned, began_s = self.tally.planned, self.tally.began_s
        if row.status != RUNNING or row.output_tokens == 0 or (0 <= behind <= 1) or not planned:
            return
        if began_s is not None and not self.is_told:
            foretold_s = math.fsum(planned) + behind * planned[-1]
            if foretold_s > 0 and now_s - began_s > LEARN_S:
                self.learn((now_s - began_s) / foretold_s, 1)
            self.tally.lose()
        self._rewind()
        for slot in state.running[: state.engine[0].num_running].tolist():
            one = state.requests[slot]
            if not self._watched[slot] and one.output_tokens > 0:
                self._promote(slot, max(1, min(int(one.output_tokens) + behind, int(one.final_tokens) - 1)))
        self._replan()

    def _promote(self, slot: int, num_produced: int) -> None:
        self._num_shifted += num_produced - int(self.engine.state.requests[slot].output_tokens)
        promoted(self.engine, slot, num_produced)

    def num_produced(self) -> int:
        """How many tokens there have been, as far as is known."""
        rows = self.engine.state.requests
        return self._num_gone + sum(int(rows[one.slot].output_tokens) for one in self.requests.values())

    def num_stepped(self) -> int:
        """How many of them the model has produced by itself, and not been told of."""
        return self.num_produced() - self._num_shifted

    def _set_back(self, tracked: Tracked, count: int) -> None:
        """Take back tokens that the model gave too early."""
        row = self.engine.state.requests[tracked.slot]
        if row.status != RUNNING:
            return
        self._rewind()
        self._promote(tracked.slot, count)
        self._replan()

    def _end_step(self, now_s: float) -> None:
        """Let the oldest step under way end now, and the next be planned."""
        head, steps = self.engine.state.engine[0], self.engine.state.steps
        if not head.num_in_flight:
            self._plan(now_s)
            return
        self._learn_from_end(now_s)
        oldest = self._oldest()
        self.last_step_s = max(0.0, now_s - float(oldest.start_s))
        oldest.end_s = now_s
        if head.num_in_flight > 1:
            younger = steps[(head.oldest + 1) % 2]
            younger.end_s = now_s + max(0.0, float(younger.end_s - younger.start_s))
            younger.start_s = now_s
        self._plan(now_s)

    def _plan(self, until_s: float) -> bool:
        """Let happen what happens by then, one more step's planning at most; tell whether one was planned."""
        head = self.engine.state.engine[0]
        before = int(head.num_steps)
        head.steady = 0  # repeated steps cannot be ended one by one
        self.engine.drive(self.engine.state, until_s, before + 1, NOBODY)
        # who shared blocks gives back more than it held
        head.num_free_blocks = min(int(head.num_free_blocks), self.engine.num_blocks)
        if int(head.num_steps) == before:
            return False
        step = self.engine.state.steps[(head.oldest + head.num_in_flight - 1) % 2]
        self.tally.plan(float(step.start_s), float(step.end_s - step.start_s) / float(head.pace))
        return True

    def _replan(self) -> None:
        """Plan what was under way anew, after changes."""
        self._recount()
        head = self.engine.state.engine[0]
        self._plan(float(head.now_s))

    def _learn_from_end(self, now_s: float) -> None:
        """Compare what the steps up to the oldest under way took with what was foretold."""
        tally = self.tally
        tally.close(now_s, int(self.engine.state.engine[0].num_in_flight) - 1)
        if self.is_told:
            is_enough = tally.num_steps >= MOST_UNTOLD
        else:
            is_enough = tally.num_steps >= LEARN_STEPS or tally.real_s >= LEARN_S
        if is_enough and (sample := tally.taken()) is not None:
            self.learn(*sample)

    def _rewind(self) -> None:
        """Take back the steps under way."""
        head = self.engine.state.engine[0]
        self.tally.cut(float(head.now_s), int(head.num_in_flight))
        rewound(self.engine)

    def _recount(self) -> None:
        recounted(self.engine, self.elsewhere)

    def _let_go(self) -> None:
        """Give back the slots of requests that have ended, once no step has them any more."""
        if not self._gone:
            return
        rows, kept = self.engine.state.requests, []
        for name in self._gone:
            if rows[self.engine.slots[name]].in_flight_tokens > 0:
                kept.append(name)
            else:
                self.engine.unplace(name)
        self._gone = kept

    def _oldest(self) -> np.record:
        state = self.engine.state
        step: np.record = state.steps[state.engine[0].oldest]
        return step

    def is_watched(self) -> bool:
        """Tell whether the oldest step will bring tokens that will be seen: streamed ones, or an answer's last."""
        state = self.engine.state
        if not state.engine[0].num_in_flight:
            return False
        index = int(state.engine[0].oldest)
        entries = state.batch.view(np.ndarray)[index, : int(state.steps[index].num_scheduled)]
        slots = entries["slot"]
        rows = state.requests.view(np.ndarray)[slots]
        is_seen = self._watched[slots] | (rows["output_tokens"] + 1 >= rows["final_tokens"])
        return bool((is_seen & (entries["sampled"] != 0) & (rows["status"] != FINISHED)).any())

    def _would_sample(self, slot: int) -> bool:
        """Tell whether a step under way will bring a token of this request."""
        state = self.engine.state
        head, batch = state.engine[0], state.batch.view(np.ndarray)
        for ahead in range(int(head.num_in_flight)):
            index = (int(head.oldest) + ahead) % 2
            entries = batch[index, : int(state.steps[index].num_scheduled)]
            if ((entries["slot"] == slot) & (entries["sampled"] != 0)).any():
                return True
        return False

    def _is_too_soon(self, now_s: float) -> bool:
        if not self.engine.state.engine[0].num_in_flight:
            return False
        oldest = self._oldest()
        return now_s - float(oldest.start_s) < TOO_SOON * float(oldest.end_s - oldest.start_s)

    def num_running(self) -> int:
        """How many run."""
        return int(self.engine.state.engine[0].num_running)

    def num_waiting(self) -> int:
        """How many wait, those included that are just arriving."""
        head = self.engine.state.engine[0]
        return int(head.num_waiting + head.num_pending)
