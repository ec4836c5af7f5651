"""Forecasts: what a request would experience on an engine, and how it would delay the requests that are there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from predictor import verdict
from predictor.batching import is_compiled
from predictor.engine import Engine
from predictor.forecast_kernels import IS_MISSING, RESULT, simulate_directly, simulation_with, start_with
from predictor.forecast_result import Forecast, averaged, merged
from predictor.request import RequestFacts
from predictor.request_group import Placeable, RequestGroup
from predictor.state_copies import interpreted_layer, stack_like

NO_SLOTS = np.empty(0, np.int64)


class Forecaster:
    """Forecasts candidates on one engine, without changing it."""

    def __init__(self, engine: Engine) -> None:
        """Initialise it for an engine, with copies of its state to simulate in."""
        self.engine = engine
        self._has_verdicts = is_compiled(engine.batcher)  # it can stop where it is known which deadlines are kept
        self._simulate = (
            simulate_directly
            if self._has_verdicts
            else simulation_with(engine.drive, start_with(engine.drive), interpreted_layer)
        )
        self._serial: int | None = None
        self._ready = np.zeros(2, np.int64)  # what the layers that candidates share can be used for
        self._delays = self._only_deadlines = False  # asked for last
        self._shaped_like = engine.state
        self._workspace = stack_like(engine.state, 3)
        self._results = np.empty(1, RESULT).view(np.recarray)

    def forecast(
        self,
        candidates: Sequence[Placeable],
        now_s: float,
        *,
        delays: bool = True,
        only_deadlines: bool = False,
        min_slack_s: float = 0.0,
        serial: int | None = None,
    ) -> list[Forecast]:
        """Forecast each candidate as if it alone arrived at the engine, now or `in_s` from now.

        They share one simulation up to the first step that could admit one of them, and with `delays` one simulation
        without any of them; without `delays` each simulation stops at its candidate's last token. The same `serial` as
        in the last call means that the engine has not changed since, so that what is shared is used again. A candidate
        with `length_quantiles` is simulated with several lengths, and a group with all its requests at once.

        With `only_deadlines` it is enough to know of the others whether any misses a deadline or is preempted, and
        whether `min_slack_s` are left of the least slack: what more they experience may be left out.
        """
        self._keep_shared(serial)
        self._delays, self._only_deadlines = delays, delays and only_deadlines and self._has_verdicts
        runs: Sequence[RequestFacts] = candidates  # type: ignore[assignment]  # unless there are groups
        parts: list[tuple[RequestFacts, ...]] = []
        ends = np.arange(1, len(candidates) + 1)
        if any(isinstance(one, RequestGroup) or one.length_quantiles > 1 for one in candidates):
            parts = [one.members if isinstance(one, RequestGroup) else one.at_quantiles() for one in candidates]
            runs = [run for part in parts for run in part]
            ends = _ends_of(candidates, parts)
        slots = np.empty(len(runs), np.int64)
        num_inserted = 0
        try:
            for run in runs:
                slot = slots[num_inserted] = self.engine.insert(run, arrival_s=now_s + run.in_s)
                num_inserted += 1
                if run.in_s:  # reading a record's field takes microseconds
                    self.engine.state.facts[slot].ttft_slo_s -= run.in_s
            if self._only_deadlines and not parts:
                made = self._verdicts(slots, now_s, min_slack_s)
            else:
                made = self._forecast_inserted(slots, ends, now_s, delays)
        finally:
            for run in runs[:num_inserted]:
                self.engine.remove(run.request_id)
        if not parts:
            return made
        each = iter(made)
        return [_combined(one, [next(each) for _ in part]) for one, part in zip(candidates, parts, strict=True)]

    def prepare(self, now_s: float, serial: int) -> None:
        """Run what candidates share in advance, for those that come before the engine changes and ask as the last."""
        self._keep_shared(serial)
        if self._only_deadlines:
            self._verdicts(NO_SLOTS, now_s, 0.0)
        else:
            self._run(NO_SLOTS, NO_SLOTS, now_s, delays=self._delays)

    def _keep_shared(self, serial: int | None) -> None:
        if serial is None or serial != self._serial:
            self._ready[:] = IS_MISSING
        self._serial = serial

    def _make_room(self, num_candidates: int) -> None:
        """Make a workspace and results that fit the engine and this number of candidates."""
        state = self.engine.state
        if state is not self._shaped_like:
            self._shaped_like = state
            self._workspace = stack_like(state, 3)
            self._ready[:] = IS_MISSING
        if num_candidates > len(self._results):
            self._results = np.empty(num_candidates, RESULT).view(np.recarray)

    def _run(self, slots: np.ndarray, ends: np.ndarray, now_s: float, *, delays: bool) -> None:
        self._make_room(len(slots))
        self._simulate(
            self.engine.state, self._workspace, slots, ends, float(now_s), bool(delays), self._ready, self._results
        )

    def _verdicts(self, slots: np.ndarray, now_s: float, min_slack_s: float) -> list[Forecast]:
        """Forecast the inserted candidates, and whether others keep their deadlines."""
        self._make_room(len(slots))
        verdict.simulate_verdicts_directly(
            self.engine.state, self._workspace, slots, float(now_s), float(min_slack_s), self._ready, self._results
        )
        return self._read(slots, delays=True, whole=False)

    def _forecast_inserted(self, slots: np.ndarray, ends: np.ndarray, now_s: float, delays: bool) -> list[Forecast]:
        self._run(slots, ends, now_s, delays=delays)
        return self._read(slots, delays=delays, whole=delays)

    def _read(self, slots: np.ndarray, *, delays: bool, whole: bool) -> list[Forecast]:
        """Return the results as forecasts: with what others experience, and all of that."""
        results = self._results if len(slots) == len(self._results) else self._results[: len(slots)]
        return [
            Forecast(
                request_id=self.engine.id_of(slot),
                ttft_s=first_token_s,
                e2e_s=finished_s,
                tpot_s=(finished_s - first_token_s) / max(1, output_tokens - 1) if finished_s < math.inf else math.inf,
                queue_s=scheduled_s,
                output_tokens=output_tokens,
                num_preemptions=num_preemptions,
                prefix_hit_tokens=hit_tokens,
                others_preempted=others_preempted if delays else None,
                delay_sum_s=delay_sum_s if whole else None,
                delay_worst_s=delay_worst_s if whole else None,
                fetched_s=fetched_s if fetched_s == fetched_s else None,  # noqa: PLR0124 - not NaN
                attained=float(attained),
                others_missed=others_missed if delays else None,
                gain_before=gain_before if whole else None,
                gain_after=gain_after if whole else None,
                least_slack_s=least_slack_s if delays else None,
                unmeasured=unmeasured,
            )
            for slot, (
                scheduled_s, first_token_s, finished_s, delay_sum_s, delay_worst_s, fetched_s, gain_before,
                gain_after, least_slack_s, unmeasured, output_tokens, num_preemptions, others_preempted, hit_tokens,
                attained, others_missed,
            ) in zip(slots, results.tolist(), strict=True)
        ]  # fmt: skip


def _ends_of(candidates: Sequence[Placeable], parts: Sequence[Sequence[RequestFacts]]) -> np.ndarray:
    """Return where each simulation's requests end: those of a group are in one, lengths of a request in several."""
    ends: list[int] = []
    first = 0
    for candidate, part in zip(candidates, parts, strict=True):
        end = first + len(part)
        ends += [end] if isinstance(candidate, RequestGroup) else range(first + 1, end + 1)
        first = end
    return np.array(ends, np.int64)


def _combined(candidate: Placeable, forecasts: Sequence[Forecast]) -> Forecast:
    """Return the forecast of a candidate from those of its requests, or of its lengths."""
    if isinstance(candidate, RequestGroup):
        return merged(forecasts, candidate.request_id, candidate.leaders)
    return averaged(forecasts, candidate.request_id)
