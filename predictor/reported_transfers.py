"""Transfers of KV blocks as a real engine reports them, in its replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor import remote_kv
from predictor.compiled import kernel, small_kernel
from predictor.state import (
    ARRIVED,
    DECODE_LEG,
    FETCH_FAILED,
    FETCHED,
    FETCHING,
    HELD,
    LOST,
    NO_TRANSFER,
    PENDING,
    PREFILL_LEG,
    TO_FETCH,
    State,
)

NOTHING_LEFT_S = 1e-6  # more than the rounding of times on a clock that has run for years


@kernel
def put_transfers(
    state: State, slots: np.ndarray, num_running: int, num_waiting: int, live: np.ndarray, held_s: np.ndarray,
    lease_s: float, now_s: float,
) -> None:  # fmt: skip
    """Continue the transfers of reported requests: those that run, those that wait, and those that have ended."""
    engine = state.engine[0]
    engine.link_s, engine.link_at_s = 0.0, now_s
    put_fetches(state, slots[num_running:], live, now_s)
    is_first = True
    for index in range(len(slots)):
        slot = slots[index]
        request = state.requests[slot]
        waits = num_running <= index < num_running + num_waiting
        is_first = is_first and (index < num_running or (waits and request.num_blocks > 0))
        engine.num_holding += is_first and waits and engine.holding_first
        if request.stage == FETCHING:
            request.transfer_s += engine.link_s if engine.transfer_shared else now_s
            remote_kv.add_transfer(state, slot)
        elif waits and request.leg == DECODE_LEG:
            put_stage(state, slot, live[slot])
        elif index >= num_running and not waits:
            put_hold(state, slot, live[slot], held_s[index], now_s)
        if request.leg == PREFILL_LEG and request.stage == NO_TRANSFER:
            request.transfer_s = lease_s if np.isnan(held_s[index]) else held_s[index]


@small_kernel
def put_stage(state: State, slot: int, reported: np.record) -> None:
    """Put the stage of a waiting request whose fetch has not started, or has ended."""
    request, stage = state.requests[slot], reported.stage
    if stage in (ARRIVED, LOST):  # the engine knows it before its next step
        stage = FETCHED if stage == ARRIVED else FETCH_FAILED
    if state.engine[0].fetches and stage in (TO_FETCH, FETCHED, FETCH_FAILED):
        request.stage = stage
        request.transfer_s = np.nan if stage == TO_FETCH else reported.fetch_ended_s  # NaN: as configured


@small_kernel
def put_hold(state: State, slot: int, reported: np.record, held_s: float, now_s: float) -> None:
    """Hold the blocks of a finished prefill for as long as predicted, at most until its lease ends."""
    until_s = reported.held_until_s
    if not np.isnan(held_s) and reported.first_token_s >= 0:  # which was its end
        until_s = min(until_s, reported.first_token_s + held_s)
    state.requests[slot].stage = HELD
    state.requests[slot].transfer_s = max(now_s, until_s)
    remote_kv.add_transfer(state, slot)


@kernel
def put_fetches(state: State, slots: np.ndarray, live: np.ndarray, now_s: float) -> None:
    """Continue fetches, with the work that is left of each in `transfer_s`.

    A shared link was divided equally among the fetches of each moment: those under way, those that have ended since,
    and not those that must have ended although the engine does not know it yet.
    """
    engine = state.engine[0]
    at_s = now_s
    for slot in slots:
        if live[slot].stage == FETCHING:
            engine.num_fetching += 1
            state.requests[slot].stage = FETCHING
            state.requests[slot].transfer_s = remote_kv.missing_seconds(state, slot)
            if live[slot].fetch_started_s >= 0:
                at_s = min(at_s, live[slot].fetch_started_s)
    while at_s < now_s:
        num_sharing, next_s = sharing_until(state, live, at_s, now_s)
        got_s = (next_s - at_s) / num_sharing if engine.transfer_shared else next_s - at_s
        for slot in slots:
            request = state.requests[slot]
            if request.stage == FETCHING and 0 <= live[slot].fetch_started_s <= at_s:
                request.transfer_s = max(0.0, request.transfer_s - got_s)
        at_s = next_s


@kernel
def sharing_until(state: State, live: np.ndarray, at_s: float, until_s: float) -> tuple[int, float]:
    """Return how many fetches share the link at a time, at least one, and until when there are as many."""
    num_sharing, least_s, next_s = 0, np.inf, until_s
    for slot in range(len(live)):
        request, started_s, ended_s = state.requests[slot], live[slot].fetch_started_s, live[slot].fetch_ended_s
        if request.status == PENDING or started_s < 0:  # no request is there, or nothing was fetched
            continue
        fetches = request.stage == FETCHING
        if started_s > at_s:
            next_s = min(next_s, started_s)
        elif fetches and request.transfer_s > NOTHING_LEFT_S:
            num_sharing += 1
            least_s = min(least_s, request.transfer_s)
        elif not fetches and ended_s > at_s:
            num_sharing += 1
            next_s = min(next_s, ended_s)
    num_sharing = max(1, num_sharing)
    return num_sharing, min(next_s, at_s + least_s * (num_sharing if state.engine[0].transfer_shared else 1))


def fetch_starts(got_s: Sequence[float], now_s: float, *, shared: bool) -> list[float]:
    """Return when fetches must have started that have got so much of their link until now, if there were no others."""
    starts_s = [now_s] * len(got_s)
    at_s, before_s = now_s, 0.0
    for place, index in enumerate(sorted(range(len(got_s)), key=got_s.__getitem__)):
        num_sharing = len(got_s) - place if shared else 1
        at_s -= num_sharing * (max(0.0, got_s[index]) - before_s)
        before_s = max(0.0, got_s[index])
        starts_s[index] = max(0.0, at_s)
    return starts_s
