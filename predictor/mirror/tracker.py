"""An engine model that follows an engine by the tokens that its clients receive, and by a few totals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from predictor.config import EngineConfig
from predictor.correction import Correction
from predictor.editable_engine import EditableEngine, PlannedStep
from predictor.mirror.step_tally import StepTally
from predictor.request import RequestFacts
from predictor.step_time import StepTime

MAX_STEPS_PER_EVENT = 64  # that one event may end
MIN_STEP_SHARE = 0.3  # of a step's predicted duration: none ends earlier, so an earlier token is of the step before
LEARN_STEPS, LEARN_S = 8, 0.25  # the span over which real and predicted durations are compared
MAX_UNCOUNTED_STEPS = 1024  # to learn from without the engine's token counter, where it has one
LAG_EVENTS = 8  # events of a stream; it had several tokens in one if it is behind the model at all of them
TOKENS_AHEAD = 2  # that the model may be ahead of the client, which receives tokens a moment later


@dataclass(slots=True, kw_only=True)
class TrackedRequest:
    """How far the client of a request has followed its answer.

    Busy engines put several tokens into one event, so that `num_uncounted` more tokens than `num_received` came.
    """

    streamed: bool
    num_received: int = 0
    num_uncounted: int = 0
    last_event_s: float
    lags: list[int] = field(default_factory=list)  # tokens that it was behind the model, at its last events

    def add_lag(self, num_tokens: int) -> None:
        """Record by how many tokens it is behind the model; a lag at all its last events is uncounted tokens."""
        self.lags.append(max(0, num_tokens))
        if len(self.lags) == LAG_EVENTS:
            self.num_uncounted += min(self.lags)
            self.lags.clear()


class Tracker:
    """Advances the engine model and corrects it by what is observed; times are on the engine's clock.

    A step that produces tokens of a streamed request ends when the client receives them, and not before; any other
    step ends when the model predicts. So the model keeps the engine's own time while anything is streamed.
    """

    def __init__(
        self,
        config: EngineConfig,
        step_time: StepTime,
        now_s: float,
        hit_tokens: Callable[[str, EditableEngine], int] | None = None,
    ) -> None:
        """Start with an idle engine; `hit_tokens` returns how much of a prompt is cached as it is admitted."""
        self.engine = EditableEngine(config, step_time, now_s)
        self._hit_tokens = hit_tokens
        self._unadmitted: set[str] = set()  # their hits are looked up as they are admitted
        self._num_preemptions = 0
        self.correction = Correction()
        self.requests: dict[str, TrackedRequest] = {}
        self.num_held_elsewhere = 0  # blocks of unknown holders; negative where requests share blocks
        self.last_step_s = 0.0
        self.tally = StepTally()
        self.has_token_counter = False  # the engine counts its tokens, and the pace is learnt by that count
        self._num_corrected = 0  # tokens that corrections gave to the model
        self._num_ended = 0  # tokens of requests that ended
        self._leaving: list[str] = []  # requests that ended and are still in a step under way

    def __contains__(self, name: str) -> bool:
        """Return whether a request is tracked."""
        return name in self.requests

    # What is observed.

    def add(self, request: RequestFacts, *, streamed: bool) -> None:
        """Add a request that arrives; ValueError where the engine could never serve it."""
        self.advance(request.arrival_s)
        name = request.request_id
        self.engine.add(request)
        self.engine.mark_visible(name, visible=streamed)
        self.requests[name] = TrackedRequest(streamed=streamed, last_event_s=request.arrival_s)
        if self._hit_tokens is not None:
            self._unadmitted.add(name)
        self.advance(request.arrival_s)

    def receive(self, name: str, count: int, now_s: float, *, ended: bool = False, exact: bool = True) -> None:
        """Take the number of tokens that the client has now, and whether the answer has ended.

        A count that is not `exact` may be too low, as several tokens may come at once.
        """
        engine, tracked = self.engine, self.requests[name]
        self.advance(now_s)
        if count > tracked.num_received:
            tracked.num_received, tracked.last_event_s = count, now_s
        if not exact:
            count = max(count, min(count + tracked.num_uncounted, engine.max_tokens(name)))
        if ended and not engine.is_finished(name) and count > engine.output_tokens(name):
            engine.end_answer_at(name, count)  # so that the next step can use its seat
        if ended and not tracked.streamed:
            self._learn_from_length(name, count, now_s)
        if count > engine.output_tokens(name):
            self._end_steps_until(name, count, now_s)
        elif count < engine.output_tokens(name) - (TOKENS_AHEAD - 1) and (exact or count == 1) and not ended:
            self._set_back(name, count)
        if ended:
            ahead = max(0, engine.output_tokens(name) - count) if exact else 0
            self.remove(name, now_s, finished=True)
            self._num_ended -= ahead
        elif not exact:
            tracked.add_lag(engine.output_tokens(name) - count)

    def correct_prompt(self, name: str, prompt_tokens: int) -> None:
        """Correct the length of a prompt; one that the engine is about to refuse stays as it is."""
        if self.engine.can_correct_prompt(name, prompt_tokens):
            self._rewind()
            self.engine.correct_prompt(name, prompt_tokens)
            self._replan()

    def set_hits(self, name: str, num_tokens: int) -> None:
        """Correct how much of a prompt was cached as the request was admitted."""
        if self.engine.can_set_hits(name, num_tokens):
            self._rewind()
            self.engine.set_hits(name, num_tokens)
            self._replan()

    def remove(self, name: str, now_s: float, *, finished: bool = False) -> None:
        """Remove a request that was aborted, or that `finished`, so that no further step has it."""
        engine = self.engine
        del self.requests[name]
        self._unadmitted.discard(name)
        self.advance(now_s)
        if not engine.is_finished(name):
            replan = finished and engine.is_scheduled(name) and engine.config.pipeline_depth == 1
            if replan:
                self._rewind()
            engine.abort(name)
            self._recount()
            if replan:
                self._replan()
        engine.mark_visible(name, visible=False)
        self._num_ended += engine.output_tokens(name)
        self._leaving.append(name)
        self._free_slots()
        self.advance(now_s)

    # Running on.

    def advance(self, now_s: float) -> None:
        """Advance to `now_s`, or to the end of a step whose tokens a client has not received yet."""
        engine = self.engine
        while True:
            until_s = now_s
            if engine.oldest_step_is_visible():
                until_s = min(now_s, math.nextafter(engine.oldest_step().end_s, -math.inf))
            if self._plan(until_s) is None:
                break
        if engine.num_steps_under_way == 0:
            self.tally.cut(engine.now_s, 0)
            engine.skip_idle_time(now_s)
        self._free_slots()

    def awaits_tokens(self) -> bool:
        """Return whether the step under way ends when a client receives its tokens."""
        return self.engine.oldest_step_is_visible()

    def overdue_s(self, now_s: float) -> float:
        """Return by how much the step under way exceeds its predicted end."""
        return max(0.0, now_s - self.engine.oldest_step().end_s) if self.engine.num_steps_under_way else 0.0

    def num_tokens(self) -> int:
        """Return how many tokens the model has produced."""
        return self._num_ended + sum(self.engine.output_tokens(name) for name in self.requests)

    def num_tokens_of_steps(self) -> int:
        """Return how many of the tokens the model's steps produced, rather than corrections."""
        return self.num_tokens() - self._num_corrected

    def closed_tally(self) -> StepTally:
        """Return the tally of all steps that have ended by now."""
        if self.engine.num_steps_under_way:
            self.tally.close(self.engine.oldest_step().start_s, self.engine.num_steps_under_way)
        return self.tally

    # Corrections.

    def learn_pace(self, ratio: float, num_steps: int) -> None:
        """Take the ratio of real to predicted duration of some steps; predicted by the profile alone."""
        for _ in range(min(num_steps, self.correction.rule.window)):
            self.correction = self.correction.observe(predicted_s=1.0, real_s=ratio)
        self._set_pace()

    def reset_pace(self) -> None:
        """Return to the profile's pace: an idle engine that was slow could not show that it has recovered."""
        if self.correction.ratios:
            self.correction = Correction()
            self._set_pace()

    def make_missed_steps(self, num_steps: int, now_s: float) -> None:
        """End steps whose tokens no client has received."""
        before = {name: self.engine.output_tokens(name) for name, one in self.requests.items() if one.num_received}
        for _ in range(min(num_steps, MAX_STEPS_PER_EVENT)):
            self._end_step(now_s)
        for name, count in before.items():
            self.requests[name].num_uncounted += self.engine.output_tokens(name) - count

    def take_back_steps(self, num_steps: int) -> None:
        """Take back the tokens of the last steps, except those that a client has received."""
        self._rewind()
        for name in self.engine.running():
            tracked, count = self.requests.get(name), self.engine.output_tokens(name)
            num_received = tracked.num_received if tracked is not None else 0
            if count > max(1, num_received):
                back = min(num_steps, count - max(1, num_received))
                self._promote(name, count - back)
                if tracked is not None and num_received:
                    tracked.num_uncounted = max(0, tracked.num_uncounted - back)
        self._replan()

    def set_used_blocks(self, num_used: int) -> None:
        """Take the number of blocks in use; those that no known request holds are held elsewhere."""
        difference = num_used - self.engine.recount_blocks(0)
        # each request may have taken a block since, or returned some
        slack = 2 + self.engine.num_running
        self.num_held_elsewhere = difference if abs(difference) > slack else 0
        self._recount()

    def set_running(self, name: str, num_tokens: int) -> None:
        """Let a request run with `num_tokens` produced, whatever its state in the model."""
        self._rewind()
        engine = self.engine
        if not engine.is_running(name) and engine.num_running >= engine.config.max_num_seqs:
            engine.demote_to_waiting(engine.running()[-1])
        self._promote(name, num_tokens)
        self._replan()

    def set_waiting(self, names: Sequence[str]) -> None:
        """Let requests wait that run in the model, without their tokens."""
        if not names:
            return
        self._rewind()
        for name in names:
            self.engine.demote_to_waiting(name)
            self._num_corrected -= self.engine.discard_output(name)
        self._replan()

    def silent_since_first_token(self, now_s: float, patience_s: float) -> list[str]:
        """Return the streamed requests that have run for `patience_s` in the model without an event for the client."""
        engine = self.engine
        return [
            name
            for name, one in self.requests.items()
            if one.streamed and not one.num_received
            and engine.is_running(name) and engine.output_tokens(name) > TOKENS_AHEAD
            and now_s - engine.first_token_s(name) > patience_s
        ]  # fmt: skip

    def _end_steps_until(self, name: str, count: int, now_s: float) -> None:
        """End the steps that have produced `count` tokens of a request."""
        engine, tally = self.engine, self.tally
        is_first = engine.output_tokens(name) == 0
        spare = 1  # a step in which the model does not have it
        for _ in range(MAX_STEPS_PER_EVENT):
            if engine.output_tokens(name) >= count or self._is_too_soon(now_s):
                break
            if not engine.will_produce_token(name):
                if not spare:
                    break
                spare -= 1
            self._end_step(now_s)
        if engine.output_tokens(name) < count:
            planned_s = max(tally.planned, default=0.0)
            if not self.has_token_counter:
                tally.discard_last()  # another step may have passed unseen
            self.set_running(name, count)
            if is_first and tally.planned:  # its prompt was in the step that ended, and not in this one
                tally.extend_last(max(0.0, planned_s - max(tally.planned)))

    def _learn_from_length(self, name: str, count: int, now_s: float) -> None:
        """Correct all answers that are not streamed by the real length of one that has ended."""
        engine, tally = self.engine, self.tally
        behind = count - engine.output_tokens(name)
        is_unknown = not engine.is_running(name) or engine.output_tokens(name) == 0
        if is_unknown or (0 <= behind <= 1) or not tally.planned:
            return
        if tally.started_s is not None and not self.has_token_counter:
            predicted_s = math.fsum(tally.planned) + behind * tally.planned[-1]
            if predicted_s > 0 and now_s - tally.started_s > LEARN_S:
                self.learn_pace((now_s - tally.started_s) / predicted_s, 1)
            tally.discard_last()
        self._rewind()
        for other in engine.running():
            tokens = engine.output_tokens(other)
            if not engine.is_visible(other) and tokens > 0:
                self._promote(other, max(1, min(tokens + behind, engine.predicted_tokens(other) - 1)))
        self._replan()

    def _set_back(self, name: str, count: int) -> None:
        """Take back tokens that the model produced too early."""
        if self.engine.is_running(name):
            self._rewind()
            self._promote(name, count)
            self._replan()

    def _promote(self, name: str, num_tokens: int) -> None:
        self._num_corrected += num_tokens - self.engine.output_tokens(name)
        self.engine.promote_to_running(name, num_tokens)

    # Steps.

    def _end_step(self, now_s: float) -> None:
        """End the oldest step under way now, and plan the next."""
        if self.engine.num_steps_under_way:
            self._learn_from_end(now_s)
            self.last_step_s = max(0.0, now_s - self.engine.oldest_step().start_s)
            self.engine.end_oldest_step(now_s)
        self._plan(now_s)

    def _plan(self, until_s: float) -> PlannedStep | None:
        """Advance to `until_s`, or until one more step is planned; return that step, if any."""
        step = self.engine.plan_step(until_s)
        if step is not None:
            self.tally.plan(step.start_s, step.profile_s)
            if self._unadmitted and self._apply_hits():
                return self._plan(self.engine.now_s) or step
        return step

    def _apply_hits(self) -> bool:
        """Let the requests that the last step admits find their prefix hits; return whether it is to be replanned."""
        engine, hit_tokens = self.engine, self._hit_tokens
        assert hit_tokens is not None
        if engine.num_preemptions != self._num_preemptions:
            self._num_preemptions = engine.num_preemptions
            self._unadmitted.update(name for name in self.requests if not engine.is_running(name))
        admitted = [name for name in self._unadmitted if engine.is_running(name)]
        self._unadmitted.difference_update(admitted)
        hits = {name: hit_tokens(name, engine) for name in admitted}
        hits = {name: num_tokens for name, num_tokens in hits.items() if engine.can_set_hits(name, num_tokens)}
        if not hits:
            return False
        self._rewind()
        for name, num_tokens in hits.items():
            engine.set_hits(name, num_tokens)
        self._recount()
        return True

    def _rewind(self) -> None:
        self.tally.cut(self.engine.now_s, self.engine.num_steps_under_way)
        self.engine.rewind_steps()

    def _replan(self) -> None:
        """Plan the step under way again, after a correction."""
        self._recount()
        self._plan(self.engine.now_s)

    def _recount(self) -> None:
        self.engine.recount_blocks(self.num_held_elsewhere)

    def _learn_from_end(self, now_s: float) -> None:
        """Compare the real and the predicted duration of the steps up to the oldest one under way."""
        tally = self.tally
        tally.close(now_s, self.engine.num_steps_under_way - 1)
        if self.has_token_counter:
            is_enough = tally.num_steps >= MAX_UNCOUNTED_STEPS
        else:
            is_enough = tally.num_steps >= LEARN_STEPS or tally.real_s >= LEARN_S
        if is_enough and (sample := tally.take()) is not None:
            self.learn_pace(*sample)

    def _set_pace(self) -> None:
        self.tally.pace = self.correction.factor
        self.engine.set_pace(self.correction.factor)

    def _is_too_soon(self, now_s: float) -> bool:
        """Return whether the oldest step under way cannot have ended yet."""
        if not self.engine.num_steps_under_way:
            return False
        step = self.engine.oldest_step()
        return now_s - step.start_s < MIN_STEP_SHARE * (step.end_s - step.start_s)

    def _free_slots(self) -> None:
        """Free the slots of requests that have ended, once no step under way has them."""
        if not self._leaving:
            return
        kept = []
        for name in self._leaving:
            if self.engine.is_scheduled(name) or self.engine.fetch_end_s(name) is not None:
                kept.append(name)
            else:
                self.engine.remove(name)
        self._leaving = kept
