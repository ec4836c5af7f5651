"""From a tracker's engine model to what a twin, or a snapshot, shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from predictor.mirror.tracker import Tracker
from predictor.request import Request
from predictor.reserved_requests import Length
from predictor.snapshot import Snapshot
from predictor.state import RUNNING, WAITING
from predictor.transfer import snapshot_of
from predictor.twin import Shown, ShownStep
from services.engine_state import layout

LIVE = [name for name in layout.LIVE.names or () if name not in ("serial", "num_hashes", "reserved")]
FACTS = ("arrival_s", "priority", "prompt_tokens", "max_tokens")


def shown_from(tracker: Tracker, lengths: Mapping[str, Length], now_s: float, most: int) -> Shown:
    """Put the model as a twin of so many slots takes it; the lengths of answers are given by name."""
    state = tracker.engine.state
    head, rows = state.engine[0], state.requests.view(np.ndarray)
    running = state.running[: head.num_running]
    waiting = _ring(state.waiting, int(head.waiting_head), int(head.num_waiting))
    pending = _ring(state.pending, int(head.pending_head), int(head.num_pending))
    slots = np.concatenate((running, waiting, pending))[:most].astype(np.int64)
    num = len(slots)
    live, facts = np.zeros(num, layout.LIVE), np.zeros(num, layout.REQUEST)
    for name in LIVE:
        live[name] = rows[name][slots]
    for name in FACTS:
        facts[name] = rows[name][slots]
    for name in state.facts.dtype.names or ():
        facts[name] = state.facts[name][slots]
    known, median, spread = np.zeros(num, np.int64), np.full(num, np.nan), np.zeros(num)
    for place, slot in enumerate(slots.tolist()):
        tokens, tag = lengths.get(tracker.engine.id_of(slot), (0, None))
        known[place] = tokens
        if tag is not None:
            median[place], spread[place] = tag.median_tokens, tag.spread
    places = np.full(len(rows), -1)
    places[slots] = np.arange(num)
    return Shown(
        now_s=now_s,
        num_free_blocks=int(head.num_free_blocks),
        decodes_since_look=int(head.decodes_since_look),
        running=np.arange(len(running)),
        waiting=np.arange(len(running), num),
        steps=tuple(_step(tracker, ahead, places) for ahead in range(int(head.num_in_flight))),
        live=live,
        facts=facts,
        known_tokens=known,
        tag_median=median,
        tag_spread=spread,
    )


def _ring(ring: np.ndarray, head: int, length: int) -> np.ndarray:
    slots: np.ndarray = ring[(head + np.arange(length)) % len(ring)]
    return slots


def _step(tracker: Tracker, ahead: int, places: np.ndarray) -> ShownStep:
    state = tracker.engine.state
    index = (int(state.engine[0].oldest) + ahead) % 2
    step = state.steps[index]
    entries = state.batch.view(np.ndarray)[index, : int(step.num_scheduled)]
    status = state.requests["status"][entries["slot"]]
    entries = entries[((status == RUNNING) | (status == WAITING)) & (places[entries["slot"]] >= 0)]
    return ShownStep(
        start_s=float(step.start_s), slots=places[entries["slot"]], tokens=entries["tokens"], sampled=entries["sampled"]
    )


def snapshot_from(
    tracker: Tracker, lengths: Mapping[str, Length], reserved: tuple[Request, ...], now_s: float
) -> Snapshot:
    """Write the model down, with what is thought of the lengths of answers."""
    _agree(tracker)
    snapshot = snapshot_of(tracker.engine, now_s)
    return replace(
        snapshot,
        running=tuple(replace(one, request=_told(one.request, lengths)) for one in snapshot.running),
        waiting=tuple(replace(one, request=_told(one.request, lengths)) for one in snapshot.waiting),
        reserved=(*(_told(one, lengths) for one in snapshot.reserved), *reserved),
    )


def _told(request: Request, lengths: Mapping[str, Length]) -> Request:
    tokens, tag = lengths.get(request.request_id, (0, None))
    return replace(request, output_tokens=tokens or None, tag=tag)


def _agree(tracker: Tracker) -> None:
    """Have requests say of themselves what has become known since they came."""
    engine = tracker.engine
    for slot in engine.slots.values():
        row, request = engine.state.requests[slot], engine.request_in(slot)
        prompt_tokens, max_tokens = int(row.prompt_tokens), int(row.max_tokens)
        if (request.prompt_tokens, request.max_tokens) != (prompt_tokens, max_tokens):
            told = replace(request, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
            engine._requests[slot] = told  # noqa: SLF001 - what engines are asked does not change, but for estimates
