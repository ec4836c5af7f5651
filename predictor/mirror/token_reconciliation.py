"""The engine's own count of its tokens beside the model's: which steps nobody saw, and how long steps really took."""

from __future__ import annotations

from predictor.mirror.engine_totals import EngineTotals
from predictor.mirror.tracker import LEARN_STEPS, Tracker

KEPT = 0.98  # of what the model was behind at a reading, at the next: what was counted wrongly is forgotten
AS_MANY = 8  # requests run there and here when the difference is at most one in so many
MOST_ODD = 4  # readings in a row at which other requests run there than here; what passed meanwhile tells nothing
LONG_ENOUGH_S = 1.0  # to learn from fewer steps than usual
SPARE_STEPS = 1  # that the model may be behind or ahead, and as many more as are made in `skew_s`


class TokenReconciliation:
    """Compares counts at every reading.

    A busy vLLM sends several tokens of a stream as one event (0.32, `RequestOutputCollector`), so steps pass that no
    client sees. Its counter tells how many tokens there were; they are spread over those that run.
    """

    def __init__(self, tracker: Tracker, skew_s: float) -> None:
        """Begin with the next reading; totals may be so much older or newer than the tokens that come with them."""
        self._tracker = tracker
        self._skew_s = skew_s
        self._counted: tuple[float, int, int] | None = None  # at the last one: theirs, ours, and those by steps
        self._num_odd = 0
        self._behind = 0.0  # tokens
        self._theirs = self._stepped = 0.0  # since the pace was learnt

    def read(self, totals: EngineTotals, now_s: float) -> None:
        """Put the model right by what the engine has produced since the last reading."""
        tracker, theirs = self._tracker, totals.generation_tokens
        tracker.is_told = theirs is not None
        if theirs is None:
            self._counted = None
            return
        before, counted = self._counted, (theirs, tracker.num_produced(), tracker.num_stepped())
        self._num_odd = 0 if self._runs_as_many(totals) else self._num_odd + 1
        if before is None or self._num_odd == MOST_ODD:
            self._counted, self._num_odd = counted, 0
            self._theirs = self._stepped = 0.0
            tracker.closed_tally().taken()
            return
        if self._num_odd:
            return  # one may have come or ended just now: until the next reading
        self._counted = counted
        gained = [now - earlier for now, earlier in zip(counted, before, strict=True)]
        self._theirs += gained[0]
        self._stepped += gained[2]
        self._behind = KEPT * self._behind + gained[0] - gained[1] if tracker.num_running() else 0.0
        self._learn()
        self._put_right(now_s)

    def _runs_as_many(self, totals: EngineTotals) -> bool:
        """Tell whether the counts are of the same requests."""
        if totals.running is None:
            return False
        ours = self._tracker.num_running()
        return abs(totals.running - ours) * AS_MANY <= max(totals.running, ours)

    def _learn(self) -> None:
        """Learn how long steps took: as they were foretold, for as many as there really were."""
        tally = self._tracker.closed_tally()
        if tally.num_steps < LEARN_STEPS and tally.real_s < LONG_ENOUGH_S:
            return
        sample = tally.taken()
        if sample is not None and self._theirs > 0 and self._stepped > 0:
            ratio, num_steps = sample
            self._tracker.learn(ratio * self._stepped / self._theirs, num_steps)
        self._theirs = self._stepped = 0.0

    def _put_right(self, now_s: float) -> None:
        """Have the model make the steps that it is behind, or take back those that it is ahead."""
        tracker = self._tracker
        num_tokens = tracker.tokens_a_step()
        if not num_tokens:
            return
        steps = int(self._behind / num_tokens)
        spare = SPARE_STEPS + (int(self._skew_s / tracker.last_step_s) if tracker.last_step_s > 0 else 0)
        if abs(steps) <= spare:
            return
        if steps > 0:
            tracker.pass_unseen(steps - spare, now_s)
        else:
            tracker.take_back(-steps - spare)
        assert self._counted is not None
        theirs, before, stepped = self._counted
        after = tracker.num_produced()
        self._behind -= after - before
        self._counted = (theirs, after, stepped)  # the steps just made count from now on, as their time does
