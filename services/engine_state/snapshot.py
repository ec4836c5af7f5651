"""Converts the view of a state file to a snapshot, and to the reported state of an engine replica."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from predictor.batching import batcher_named
from predictor.config import FIELD_NAMES, EngineConfig
from predictor.lengths import Tag
from predictor.reported_state import ReportedContents, ReportedMemory, ReportedState, ReportedStep
from predictor.request import CLASSES, LEGS, MAX_PRIORITY, REAL_TIME, SERVE, RequestFacts, Slo
from predictor.snapshot import (
    STAGES,
    VERSION,
    KvCache,
    LiveRequest,
    LoadedAdapter,
    Memory,
    ServedClient,
    Snapshot,
    StepUnderWay,
)
from predictor.suggestions import require_known
from services.engine_state import layout
from services.engine_state.identity import client_id
from services.engine_state.view import Contents, View

STAGE_NAMES = {
    **dict(enumerate(STAGES)),
    layout.ARRIVED: STAGES[layout.FETCHED],
    layout.LOST: STAGES[layout.FETCH_FAILED],
}
MAX_NOT_MODELLED = 4  # that forecasts name
NO_TAGS: Mapping[str, Tag] = {}
NO_SETTINGS: Mapping[str, Any] = {}


def config_of(view: View, suggested: Mapping[str, Any] = NO_SETTINGS) -> EngineConfig:
    """Return the engine's configuration; `suggested` are settings that hold where the engine does not know them."""
    settings = view.settings.get("engine")
    if not isinstance(settings, dict):
        raise ValueError("settings.engine: is missing from the state file")
    try:
        require_known(settings, FIELD_NAMES, "engine setting")
        return EngineConfig(**{**suggested, **settings})
    except ValueError as error:
        raise ValueError(f"settings.engine.{error}") from None


def not_modelled_by(view: View) -> tuple[str, ...]:
    """Return what the engine does that the engine model does not, in its own words."""
    named = view.settings.get("not_modelled", ())
    if not isinstance(named, list | tuple) or not all(isinstance(one, str) and one.isprintable() for one in named):
        raise ValueError("settings.not_modelled: must be a list of texts without control characters")
    return tuple(named[:MAX_NOT_MODELLED])


def snapshot_from_view(view: View, tags: Mapping[str, Tag] = NO_TAGS) -> Snapshot:
    """Return a snapshot; `tags`, by the client's request id, override those that the requests have themselves."""
    contents = view.contents
    no_rows = (np.empty(0, np.uint64),) * len(view.slots)
    names = {slot: _name(view, slot) for slot in view.slots.tolist()}
    config = config_of(view)
    items = [
        _live(view, config, slot, tags=tags, table=table, hashes=hashes)
        for slot, table, hashes in zip(
            view.slots.tolist(),
            contents.tables if contents else no_rows,
            contents.hashes if contents else no_rows,
            strict=True,
        )
    ]
    num_running, num_live = len(view.running), len(view.running) + len(view.waiting)
    return Snapshot(
        version=VERSION,
        taken_s=view.now_s,
        config=config,
        num_free_blocks=int(view.state["num_free_blocks"]),
        running=tuple(items[:num_running]),
        waiting=tuple(items[num_running:num_live]),
        held=tuple(items[num_live:]),
        steps=tuple(_step(start_s, entries, names) for start_s, entries in view.steps),
        kv_cache=_kv_cache(contents) if contents else None,
        decodes_since_look=int(view.state["decodes_since_look"]),
        adapters=_adapters(view),
        memory=_memory(view) if batcher_named(config.batcher).estimates else Memory(),
    )


def _memory(view: View) -> Memory:
    try:
        return Memory(
            num_steps=int(view.state["num_planned"]),
            correction=float(view.state["correction"]),
            numbers=tuple(np.trim_zeros(view.state["memory"], "b").tolist()),
            clients=tuple(
                ServedClient(tenant=tenant, weight=weight, tokens=tokens, waits=bool(waits))
                for tenant, weight, tokens, waits in view.clients.tolist()
            ),
        )
    except ValueError as error:
        raise ValueError(f"memory.{error}") from None


def _adapters(view: View) -> tuple[LoadedAdapter, ...]:
    try:
        return tuple(
            LoadedAdapter(number=number, is_active=bool(is_active)) for number, is_active in view.adapters.tolist()
        )
    except ValueError as error:
        raise ValueError(f"adapters.{error}") from None


def _name(view: View, slot: int) -> str:
    name: bytes = view.requests["request_id"][slot]
    return name.decode(errors="replace")


def facts_of(row: Any, *, model: str, hashes: np.ndarray, tags: Mapping[str, Tag] = NO_TAGS) -> RequestFacts:
    """Return the facts in a row of `requests`; `hashes` are the contents of the request's full blocks."""
    (
        _, name_bytes, arrival_s, tag_tokens, tag_spread, priority, prompt_tokens, max_tokens, min_tokens,
        request_class, leg, _, ttft_s, tpot_s, weight, _, client, session, _, adapter,
    ) = row.item()  # fmt: skip
    name = name_bytes.decode(errors="replace")
    tag = tags.get(client_id(name))
    if tag is None:
        tag = _tag(tag_tokens, tag_spread)
    return RequestFacts(
        request_id=name,
        model=model,
        prompt_tokens=prompt_tokens,
        tag=tag,
        arrival_s=max(0.0, arrival_s),
        max_tokens=max_tokens,
        min_tokens=min_tokens if min_tokens > 0 else None,
        priority=max(-MAX_PRIORITY, min(MAX_PRIORITY, priority)),
        prefix_hashes=tuple(hashes.tolist()),
        request_class=CLASSES[request_class] if 0 <= request_class < len(CLASSES) else REAL_TIME,
        slo=_slo(ttft_s, tpot_s),
        weight=weight if math.isfinite(weight) and weight > 0 else 1.0,
        client_id=client.decode(errors="replace"),
        session_id=session.decode(errors="replace"),
        leg=LEGS[leg] if 0 <= leg < len(LEGS) else SERVE,
        adapter=adapter.decode(errors="replace"),
    )


def _live(  # noqa: PLR0913 - what a request consists of
    view: View, config: EngineConfig, slot: int, *, tags: Mapping[str, Tag], table: np.ndarray, hashes: np.ndarray
) -> LiveRequest:
    (
        _, produced, computed, placeholders, in_flight, stale, num_blocks, full_blocks, _, num_preemptions, _,
        prefill_tokens, _, draft_tokens, _, _, first_token_s, *_,
    ) = view.live[slot].item()  # fmt: skip
    return LiveRequest(
        request=facts_of(view.requests[slot], model=str(view.settings.get("model", "")), hashes=hashes, tags=tags),
        produced_tokens=produced,
        computed_tokens=computed,
        placeholders=placeholders,
        in_flight_tokens=in_flight,
        stale_tokens=stale,
        num_blocks=num_blocks,
        full_blocks=full_blocks,
        block_ids=tuple(table.tolist()),
        num_preemptions=num_preemptions,
        prefill_tokens=prefill_tokens if prefill_tokens >= 0 else None,
        first_token_s=first_token_s if 0 <= first_token_s < math.inf else None,
        draft_tokens=max(0, draft_tokens),
        stage=STAGE_NAMES.get(int(view.live["stage"][slot]), ""),
        transfer_left_s=_transfer_left_s(view, config, slot),
    )


def _transfer_left_s(view: View, config: EngineConfig, slot: int) -> float | None:
    """Return how long a request's blocks will be fetched, or held; None where they are not."""
    live = view.live[slot]
    if live["stage"] == layout.BLOCKS_HELD:
        return max(0.0, float(live["held_until_s"]) - view.now_s)
    if live["stage"] != layout.FETCHING:
        return None
    num_tokens = max(0, int(view.requests["prompt_tokens"][slot] - live["hit_tokens"]))
    end_s = float(live["fetch_started_s"]) + config.transfer_s(num_tokens, -(-num_tokens // config.block_size))
    return max(0.0, end_s - view.now_s)


def _tag(median_tokens: float, spread: float) -> Tag | None:
    """Return a request's tag; an impossible one is ignored, because a client must not make the engine unreadable."""
    try:
        return Tag(median_tokens=median_tokens, spread=spread)
    except ValueError:
        return None


def _slo(ttft_s: float, tpot_s: float) -> Slo | None:
    """Return a request's targets, those of them that are possible."""
    targets = [value if math.isfinite(value) and value > 0 else None for value in (ttft_s, tpot_s)]
    return None if targets == [None, None] else Slo(ttft_s=targets[0], tpot_s=targets[1])


def _step(start_s: float, entries: np.ndarray, names: Mapping[int, str]) -> StepUnderWay:
    rows = entries.tolist()
    return StepUnderWay(
        start_s=start_s,
        scheduled={names[slot]: tokens for slot, _, _, tokens in rows},
        sampled=tuple(names[slot] for slot, sampled, *_ in rows if sampled),
        drafts={names[slot]: drafts for slot, _, drafts, _ in rows if drafts},
    )


def _kv_cache(contents: Contents) -> KvCache:
    blocks = contents.blocks
    free = np.flatnonzero(blocks["reuse"] != layout.HELD)
    order = free[np.argsort(blocks["reuse"][free], kind="stable")]
    cached = np.flatnonzero(blocks["content"])
    return KvCache(
        free_block_ids=tuple(order.tolist()),
        contents=dict(zip(cached.tolist(), blocks["content"][cached].tolist(), strict=True)),
    )


def reported_state(  # noqa: PLR0913 - what is expected of requests
    view: View,
    *,
    known_tokens: np.ndarray,
    tag_median: np.ndarray,
    tag_spread: np.ndarray,
    remembers: bool,
    held_s: np.ndarray | None = None,
) -> ReportedState:
    """Convert a view for an engine replica; what is expected of requests is given by slot.

    `remembers` says whether the engine's local scheduler remembers anything between steps.
    """
    contents = view.contents
    return ReportedState(
        now_s=view.now_s,
        num_free_blocks=int(view.state["num_free_blocks"]),
        decodes_since_look=int(view.state["decodes_since_look"]),
        running=view.running.astype(np.int64),
        waiting=view.waiting.astype(np.int64),
        steps=tuple(
            ReportedStep(
                start_s=start_s,
                slots=rows["slot"],
                tokens=rows["tokens"],
                sampled=rows["sampled"],
                drafts=rows["drafts"],
            )
            for start_s, rows in view.steps
        ),
        live=view.live,
        facts=view.requests,
        known_tokens=known_tokens,
        tag_median=tag_median,
        tag_spread=tag_spread,
        held=view.held.astype(np.int64),
        held_s=held_s,
        adapters=view.adapters,
        contents=None
        if contents is None
        else ReportedContents(
            content=contents.blocks["content"],
            reuse=contents.blocks["reuse"],
            tables=contents.tables,
            hashes=contents.hashes,
        ),
        memory=ReportedMemory(
            num_steps=int(view.state["num_planned"]),
            correction=float(view.state["correction"]),
            numbers=view.state["memory"],
            clients=view.clients,
        )
        if remembers
        else None,
    )
