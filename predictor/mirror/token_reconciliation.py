"""Corrects the model by the engine's own token counter: steps that no client saw, and how long steps really took."""

from __future__ import annotations

from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.mirror.tracker import LEARN_STEPS, Tracker

LAG_KEPT = 0.98  # of the model's lag, from one scrape to the next: old counting errors decay
MAX_DIFFERENCE = 1 / 8  # of the running requests; with more, engine and model do not run the same requests
MAX_MISMATCHES = 4  # scrapes in a row with other requests; after them the counts start again
LEARN_S = 1.0  # long enough to learn the pace from fewer steps than LEARN_STEPS
SPARE_STEPS = 1  # that the model may be behind or ahead, in addition to the steps of `skew_s`


class TokenReconciliation:
    """Compares the engine's and the model's token counts at every scrape.

    A busy vLLM sends several tokens of a stream as one event (0.32, `RequestOutputCollector`), so steps pass that no
    client sees. Its counter includes their tokens; they are spread over the running requests.
    """

    def __init__(self, tracker: Tracker, skew_s: float) -> None:
        """Correct a tracker; metrics may be `skew_s` older or newer than the tokens that arrive with them."""
        self._tracker = tracker
        self._skew_s = skew_s
        self._counts: tuple[float, int, int] | None = None  # at the last scrape: engine, model, model's steps
        self._num_mismatches = 0
        self._lag = 0.0  # tokens that the model is behind
        self._engine_tokens = self._step_tokens = 0.0  # since the pace was learnt

    def reconcile(self, metrics: ScrapedMetrics, now_s: float) -> None:
        """Correct the model by the tokens that the engine has produced since the last scrape."""
        tracker, engine_tokens = self._tracker, metrics.generation_tokens
        tracker.has_token_counter = engine_tokens is not None
        if engine_tokens is None:
            self._counts = None
            return
        before, counts = self._counts, (engine_tokens, tracker.num_tokens(), tracker.num_tokens_of_steps())
        self._num_mismatches = 0 if self._has_same_requests(metrics) else self._num_mismatches + 1
        if before is None or self._num_mismatches == MAX_MISMATCHES:
            self._counts, self._num_mismatches = counts, 0
            self._engine_tokens = self._step_tokens = 0.0
            tracker.closed_tally().take()
            return
        if self._num_mismatches:
            return  # a request may have arrived or ended just now; the next scrape decides
        self._counts = counts
        engine_gain, model_gain, step_gain = (now - earlier for now, earlier in zip(counts, before, strict=True))
        self._engine_tokens += engine_gain
        self._step_tokens += step_gain
        has_running = tracker.engine.num_running > 0
        self._lag = LAG_KEPT * self._lag + engine_gain - model_gain if has_running else 0.0
        self._learn_pace()
        self._correct_steps(now_s)

    def _has_same_requests(self, metrics: ScrapedMetrics) -> bool:
        """Return whether engine and model run about as many requests."""
        if metrics.running is None:
            return False
        num_running = self._tracker.engine.num_running
        return abs(metrics.running - num_running) <= MAX_DIFFERENCE * max(metrics.running, num_running)

    def _learn_pace(self) -> None:
        """Learn from the predicted duration of as many steps as the engine really made."""
        tally = self._tracker.closed_tally()
        if tally.num_steps < LEARN_STEPS and tally.real_s < LEARN_S:
            return
        sample = tally.take()
        if sample is not None and self._engine_tokens > 0 and self._step_tokens > 0:
            ratio, num_steps = sample
            self._tracker.learn_pace(ratio * self._step_tokens / self._engine_tokens, num_steps)
        self._engine_tokens = self._step_tokens = 0.0

    def _correct_steps(self, now_s: float) -> None:
        """Make the steps that the model is behind, or take back those that it is ahead."""
        tracker = self._tracker
        tokens_per_step = tracker.engine.num_tokens_of_oldest_step()
        if not tokens_per_step:
            return
        steps = int(self._lag / tokens_per_step)
        spare = SPARE_STEPS + (int(self._skew_s / tracker.last_step_s) if tracker.last_step_s > 0 else 0)
        if abs(steps) <= spare:
            return
        if steps > 0:
            tracker.make_missed_steps(steps - spare, now_s)
        else:
            tracker.take_back_steps(-steps - spare)
        assert self._counts is not None
        engine_tokens, before, step_tokens = self._counts
        after = tracker.num_tokens()
        self._lag -= after - before
        self._counts = (engine_tokens, after, step_tokens)  # these steps count in the next interval, as their time does
