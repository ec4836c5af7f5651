"""From what a state file shows to a snapshot that the engine model can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from predictor.config import FIELD_NAMES, EngineConfig
from predictor.lengths import Tag
from predictor.request import Request
from predictor.snapshot import VERSION, KvCache, LiveRequest, Snapshot, StepUnderWay
from services.export import layout
from services.export.identity import client_id
from services.export.reader import Contents, View
from services.names import require_known

FARTHEST_PRIORITY = 2**31
NO_TAGS: Mapping[str, Tag] = {}


def config_of(view: View) -> EngineConfig:
    """Read the engine's settings."""
    settings = view.settings.get("engine")
    if not isinstance(settings, dict):
        raise ValueError("settings.engine: is missing from the state file")
    try:
        require_known(settings, FIELD_NAMES, "engine setting")
        return EngineConfig(**settings)
    except ValueError as error:
        raise ValueError(f"settings.engine.{error}") from None


def snapshot_from_view(view: View, tags: Mapping[str, Tag] = NO_TAGS) -> Snapshot:
    """Build a snapshot; `tags` by the client's request id go before those that the requests carry themselves."""
    contents = view.contents
    nothing = (np.empty(0, np.uint64),) * len(view.slots)
    names = {slot: name.decode(errors="replace") for slot, name in _column(view, "request_id")}
    items = [
        _live(names[slot], view.live[slot], view.requests[slot], tags, table, hashes)
        for slot, table, hashes in zip(
            view.slots.tolist(),
            contents.tables if contents else nothing,
            contents.hashes if contents else nothing,
            strict=True,
        )
    ]
    num_running = len(view.running)
    return Snapshot(
        version=VERSION,
        taken_s=view.now_s,
        config=config_of(view),
        num_free_blocks=int(view.state["num_free_blocks"]),
        running=tuple(items[:num_running]),
        waiting=tuple(items[num_running:]),
        steps=tuple(_step(start_s, entries, names) for start_s, entries in view.steps),
        kv_cache=_kv_cache(contents) if contents else None,
        decodes_since_look=int(view.state["decodes_since_look"]),
    )


def _column(view: View, name: str) -> list[tuple[int, Any]]:
    slots = view.slots
    return list(zip(slots.tolist(), view.requests[name][slots].tolist(), strict=True))


def _live(
    name: str, live: np.void, fixed: np.void, tags: Mapping[str, Tag], table: np.ndarray, hashes: np.ndarray
) -> LiveRequest:
    (
        _, produced, computed, placeholders, in_flight, stale, num_blocks, full_blocks, _, num_preemptions, *_,
    ) = live.item()  # fmt: skip
    _, _, arrival_s, tag_tokens, tag_spread, priority, prompt_tokens, max_tokens = fixed.item()
    tag = tags.get(client_id(name))
    if tag is None and tag_tokens > 0:
        tag = Tag(median_tokens=tag_tokens, spread=tag_spread)
    return LiveRequest(
        request=Request(
            request_id=name,
            prompt_tokens=prompt_tokens,
            tag=tag,
            arrival_s=max(0.0, arrival_s),
            max_tokens=max_tokens,
            priority=max(-FARTHEST_PRIORITY, min(FARTHEST_PRIORITY, priority)),
            prefix_hashes=tuple(hashes.tolist()),
        ),
        produced_tokens=produced,
        computed_tokens=computed,
        placeholders=placeholders,
        in_flight_tokens=in_flight,
        stale_tokens=stale,
        num_blocks=num_blocks,
        full_blocks=full_blocks,
        block_ids=tuple(table.tolist()),
        num_preemptions=num_preemptions,
    )


def _step(start_s: float, entries: np.ndarray, names: Mapping[int, str]) -> StepUnderWay:
    rows = entries.tolist()
    return StepUnderWay(
        start_s=start_s,
        scheduled={names[slot]: tokens for slot, _, tokens in rows},
        sampled=tuple(names[slot] for slot, sampled, _ in rows if sampled),
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
