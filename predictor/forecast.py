"""Forecasts: what a request would experience on an engine, and how it would delay the requests that are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from predictor import loop, queues
from predictor.batching import is_compiled
from predictor.compiled import direct, inner_kernel, kernel, small_kernel
from predictor.engine import Engine
from predictor.forecast_result import Forecast, averaged, merged
from predictor.loop import ANY_NUMBER, FOREVER
from predictor.request import RequestFacts
from predictor.request_group import Placeable, RequestGroup
from predictor.state import DECODE_LEG, FINISHED, NO_TRANSFER, NONE, State
from predictor.state_copies import copy_into, interpreted_layer, layer, stack_like

RESULT = np.dtype(
    [
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("finished_s", "f8"),
        ("delay_sum_s", "f8"),
        ("delay_worst_s", "f8"),
        ("fetched_s", "f8"),  # NaN where nothing is fetched
        ("gain_before", "f8"),
        ("gain_after", "f8"),
        ("least_slack_s", "f8"),
        ("unmeasured", "f8"),
        ("output_tokens", "i8"),
        ("num_preemptions", "i8"),
        ("others_preempted", "i8"),
        ("hit_tokens", "i8"),
        ("attained", "i8"),
        ("others_missed", "i8"),
    ],
    align=True,
)

SHARED, ALONE, WITH_CANDIDATE = 0, 1, 2  # the layers of the workspace
IS_MISSING, HAS_TIMES, HAS_TOKENS_ON_TIME = 0, 1, 2  # what a layer is ready for
NO_SLOTS = np.empty(0, np.int64)


class Forecaster:
    """Forecasts candidates on one engine, without changing it."""

    def __init__(self, engine: Engine) -> None:
        """Initialise it for an engine, with copies of its state to simulate in."""
        self.engine = engine
        self._simulate = (
            simulate_directly if is_compiled(engine.batcher) else simulation_with(engine.drive, interpreted_layer)
        )
        self._serial: int | None = None
        self._ready = np.zeros(2, np.int64)  # what the layers that candidates share can be used for
        self._delays = False  # asked for last
        self._shaped_like = engine.state
        self._workspace = stack_like(engine.state, 3)
        self._results = np.empty(1, RESULT).view(np.recarray)

    def forecast(
        self, candidates: Sequence[Placeable], now_s: float, *, delays: bool = True, serial: int | None = None
    ) -> list[Forecast]:
        """Forecast each candidate as if it alone arrived at the engine, now or `in_s` from now.

        They share one simulation up to the first step that could admit one of them, and with `delays` one simulation
        without any of them; without `delays` each simulation stops at its candidate's last token. The same `serial` as
        in the last call means that the engine has not changed since, so that what is shared is used again. A candidate
        with `length_quantiles` is simulated with several lengths, and a group with all its requests at once.
        """
        self._keep_shared(serial)
        self._delays = delays
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
        self._run(NO_SLOTS, NO_SLOTS, now_s, delays=self._delays)

    def _keep_shared(self, serial: int | None) -> None:
        if serial is None or serial != self._serial:
            self._ready[:] = IS_MISSING
        self._serial = serial

    def _run(self, slots: np.ndarray, ends: np.ndarray, now_s: float, *, delays: bool) -> None:
        state = self.engine.state
        if state is not self._shaped_like:
            self._shaped_like = state
            self._workspace = stack_like(state, 3)
            self._ready[:] = IS_MISSING
        if len(slots) > len(self._results):
            self._results = np.empty(len(slots), RESULT).view(np.recarray)
        self._simulate(state, self._workspace, slots, ends, float(now_s), bool(delays), self._ready, self._results)

    def _forecast_inserted(self, slots: np.ndarray, ends: np.ndarray, now_s: float, delays: bool) -> list[Forecast]:
        self._run(slots, ends, now_s, delays=delays)
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
                delay_sum_s=delay_sum_s if delays else None,
                delay_worst_s=delay_worst_s if delays else None,
                fetched_s=fetched_s if fetched_s == fetched_s else None,  # noqa: PLR0124 - not NaN
                attained=float(attained),
                others_missed=others_missed if delays else None,
                gain_before=gain_before if delays else None,
                gain_after=gain_after if delays else None,
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


@small_kernel
def stop_counting_on_time(state: State) -> None:
    """Count the tokens on time of no request that is there: without delays only the candidate's are asked for."""
    for place in range(queues.num_present(state)):
        state.requests[queues.present_at(state, place)].tokens_on_time = NONE


def simulation_with(drive: Callable[..., None], layer: Callable[[State, State, int], State]) -> Callable[..., None]:
    """Return the simulation of candidates that runs engines by `drive`; `layer` returns one copy of the workspace.

    `ends` says where the slots of each candidate end; the result of its first slot has what it does to others.
    """

    def simulate(
        source: State,
        workspace: State,
        slots: np.ndarray,
        ends: np.ndarray,
        now_s: float,
        delays: bool,
        ready: np.ndarray,
        results: np.ndarray,
    ) -> None:
        shared = layer(workspace, source, SHARED)
        purpose = HAS_TOKENS_ON_TIME if delays else HAS_TIMES
        if ready[SHARED] < purpose:
            copy_into(shared, source)
            if not delays:
                stop_counting_on_time(shared)
            shared.engine[0].least_slack_s = np.inf
            shared.engine[0].unmeasured_s = 0.0
            if not shared.engine[0].by_priority and queues.last_arrival_s(shared) <= now_s:
                drive(shared, FOREVER, ANY_NUMBER, loop.TAIL_OF_QUEUE)
                ready[SHARED] = purpose
        alone = layer(workspace, source, ALONE)
        if delays and ready[ALONE] < purpose:
            copy_into(alone, shared)
            drive(alone, FOREVER, ANY_NUMBER, NONE)
            ready[ALONE] = purpose
        after = layer(workspace, source, WITH_CANDIDATE)
        first = 0
        for candidate in range(len(ends)):
            end = ends[candidate]
            copy_into(after, shared)
            if purpose < ready[SHARED]:
                stop_counting_on_time(after)
            announce_all(after, source, slots, first, end)
            for position in range(first, first + 1 if delays else end):
                drive(after, FOREVER, ANY_NUMBER, NONE if delays else slots[position])
            for position in range(first, end):
                read_result(after, slots[position], now_s, results[position])
            if delays:
                compare(source, shared, alone, after, slots[first], results[first])
                count_others_of_group(after, slots, first, end, results[first])
            first = end

    return simulate


_simulate = inner_kernel(simulation_with(loop.run, layer))


@kernel
def simulate(
    source: State,
    workspace: State,
    slots: np.ndarray,
    ends: np.ndarray,
    now_s: float,
    delays: bool,
    ready: np.ndarray,
    results: np.ndarray,
) -> None:
    """Simulate the engine with each candidate, and record what the candidate experiences."""
    _simulate(source, workspace, slots, ends, now_s, delays, ready, results)


simulate_directly = direct(simulate)


@kernel
def read_result(after: State, slot: int, now_s: float, result: np.record) -> None:
    """Record what the candidate has experienced."""
    request = after.requests[slot]
    result.scheduled_s = request.scheduled_s - now_s if request.scheduled_s >= 0 else np.inf
    result.first_token_s = request.first_token_s - now_s if request.first_token_s >= 0 else np.inf
    result.finished_s = request.finished_s - now_s if request.status == FINISHED else np.inf
    result.fetched_s = np.nan
    if request.leg == DECODE_LEG:
        result.fetched_s = request.transfer_s - now_s if request.stage == NO_TRANSFER else np.inf
    result.output_tokens = request.final_tokens
    result.num_preemptions = request.num_preemptions
    result.hit_tokens = request.hit_tokens
    result.attained = attains(after, slot)
    simulated_s = after.engine[0].now_s - now_s
    result.unmeasured = min(1.0, after.engine[0].unmeasured_s / simulated_s) if simulated_s > 0 else 0.0


@small_kernel
def attains(state: State, slot: int) -> bool:
    """Return whether all tokens of a response have come by their deadlines; one without deadlines attains them."""
    request = state.requests[slot]
    if request.tokens_on_time < 0:
        return True
    num_due = 1 if np.isnan(state.facts[slot].tpot_slo_s) else request.final_tokens
    return bool(request.status == FINISHED and request.tokens_on_time >= num_due)


@kernel
def compare(source: State, shared: State, alone: State, after: State, slot: int, result: np.record) -> None:
    """Record what the candidate does to the others: delays, preemptions, missed deadlines and gain."""
    result.delay_sum_s = result.delay_worst_s = result.gain_before = result.gain_after = 0.0
    result.others_missed = 0
    for place in range(queues.num_present(source)):
        _compare_one(source, shared, alone, after, queues.present_at(source, place), result)
    result.gain_after += gain_of(after, slot, 0)
    result.least_slack_s = after.engine[0].least_slack_s
    preemptions = after.engine[0].num_preemptions - alone.engine[0].num_preemptions
    result.others_preempted = preemptions - after.requests[slot].num_preemptions


@kernel
def announce_all(after: State, source: State, slots: np.ndarray, first: int, end: int) -> None:
    """Add the requests of a candidate, which arrive in their order."""
    for position in range(first, end):
        slot = slots[position]
        after.requests[slot] = source.requests[slot]
        queues.announce(after, slot)


@kernel
def count_others_of_group(after: State, slots: np.ndarray, first: int, end: int, result: np.record) -> None:
    """Count further requests of a candidate: their gain, and that their preemptions are not those of others."""
    for position in range(first + 1, end):
        result.gain_after += gain_of(after, slots[position], 0)
        result.others_preempted -= after.requests[slots[position]].num_preemptions


@small_kernel
def gain_of(state: State, slot: int, before: int) -> float:
    """Return the value of a request's tokens that came by their deadlines, of those after the first `before`."""
    request = state.requests[slot]
    return state.facts[slot].weight * (request.tokens_on_time - before) if request.tokens_on_time > before else 0.0


@kernel
def _compare_one(source: State, shared: State, alone: State, after: State, slot: int, result: np.record) -> None:
    on_time = max(0, source.requests[slot].tokens_on_time)
    if shared.requests[slot].status == FINISHED:  # it ended before the candidate arrived, and the copies leave it out
        gain = gain_of(shared, slot, on_time)
        result.gain_before += gain
        result.gain_after += gain
        return
    result.gain_before += gain_of(alone, slot, on_time)
    result.gain_after += gain_of(after, slot, on_time)
    result.others_missed += attains(alone, slot) and not attains(after, slot)
    if alone.requests[slot].status != FINISHED:
        return  # it never ends without the candidate either
    delay_s = np.inf
    if after.requests[slot].status == FINISHED:
        delay_s = after.requests[slot].finished_s - alone.requests[slot].finished_s
    result.delay_sum_s += delay_s
    result.delay_worst_s = max(result.delay_worst_s, delay_s)
