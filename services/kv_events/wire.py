"""The wire format of KV events: vLLM's frames and its msgpack, read within bounds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from predictor.kv_events.events import GPU, BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch

MAX_FRAME_BYTES = 16 * 2**20
MAX_ITEMS = 2**21  # in a list
MAX_TEXT_BYTES = 64 * 2**10
MAX_EVENTS = 2**16  # in a batch
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

# Fields of events in the order of former versions (up to 0.11), which wrote lists; later ones write maps.
STORED_FIELDS = (
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
)  # fmt: skip
REMOVED_FIELDS = ("type", "block_hashes", "medium")
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"


def sequence_of(frame: bytes) -> int:
    """Read the frame of a sequence number."""
    if len(frame) != SEQUENCE_BYTES:
        raise ValueError(f"sequence: has {len(frame)} bytes, not {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big", signed=True)


def batch_from(payload: bytes) -> tuple[KvEventBatch, int]:
    """Read a batch, vLLM 0.28 to 0.33: `[ts, events, rank]`; return it with the number of unknown events in it."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"payload: has {len(payload)} bytes, more than {MAX_FRAME_BYTES}")
    try:
        data = msgpack.unpackb(
            payload,
            use_list=False,
            raw=False,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=MAX_TEXT_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_TEXT_BYTES,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"payload: is no msgpack: {error}") from None
    if not isinstance(data, tuple) or len(data) < 2 or not isinstance(data[1], tuple):
        raise ValueError("payload: must be [ts, events, rank]")
    published_s, rank = data[0], data[2] if len(data) > 2 else None
    if not isinstance(published_s, int | float) or not math.isfinite(published_s):
        raise ValueError("ts: must be a number")
    if rank is not None and type(rank) is not int:
        raise ValueError("data_parallel_rank: must be a whole number")
    if len(data[1]) > MAX_EVENTS:
        raise ValueError(f"events: are {len(data[1])}, more than {MAX_EVENTS}")
    events = [_event_from(one) for one in data[1]]
    known = tuple(one for one in events if one is not None)
    digest = hashlib.blake2b(payload, digest_size=16).digest()
    batch = KvEventBatch(published_s=float(published_s), events=known, rank=rank, digest=digest)
    return batch, len(events) - len(known)


def _event_from(data: Any) -> KvEvent | None:
    """Read one event; None for a kind that is not known."""
    if isinstance(data, tuple) and data:
        fields = STORED_FIELDS if data[0] == STORED else REMOVED_FIELDS
        data = dict(zip(fields, data, strict=False))
    if not isinstance(data, Mapping):
        raise ValueError("events: contain something that is no event")
    kind = data.get("type")
    if kind == CLEARED:
        return CacheCleared()
    if kind not in (STORED, REMOVED):
        return None
    hashes = _list_in(data, "block_hashes")
    if not all(isinstance(one, bytes) or type(one) is int for one in hashes):
        raise ValueError("block_hashes: must be bytes or whole numbers")
    medium = data.get("medium")
    if medium is not None and not isinstance(medium, str):
        raise ValueError("medium: must be a text")
    group = data.get("group_idx")
    if group is not None and type(group) is not int:
        raise ValueError("group_idx: must be a whole number")
    places: dict[str, Any] = {"hashes": hashes, "medium": medium or GPU, "group": group or 0}
    return _stored_from(data, places) if kind == STORED else BlocksRemoved(**places)


def _stored_from(data: Mapping[Any, Any], places: Mapping[str, Any]) -> BlocksStored:
    parent, token_ids, block_size = data.get("parent_block_hash"), _list_in(data, "token_ids"), data.get("block_size")
    if not (parent is None or isinstance(parent, bytes) or type(parent) is int):
        raise ValueError("parent_block_hash: must be bytes or a whole number")
    if not all(type(one) is int for one in token_ids):
        raise ValueError("token_ids: must be whole numbers")
    if type(block_size) is not int:
        raise ValueError("block_size: must be a whole number")
    extra_keys = data.get("extra_keys")
    if extra_keys is not None and not isinstance(extra_keys, tuple):
        raise ValueError("extra_keys: must be a list")
    adapter = data.get("lora_name")
    if extra_keys is None and adapter is not None:
        extra_keys = ((adapter,),) * len(places["hashes"])
    return BlocksStored(parent=parent, token_ids=token_ids, block_size=block_size, extra_keys=extra_keys, **places)


def _list_in(data: Mapping[Any, Any], field: str) -> tuple[Any, ...]:
    value = data.get(field)
    if not isinstance(value, tuple):
        raise ValueError(f"{field}: must be a list")
    return value


def payload_of(batch: KvEventBatch) -> bytes:
    """Write a batch as vLLM 0.32 does."""
    packed: bytes = msgpack.packb([batch.published_s, [_map_of(event) for event in batch.events], batch.rank or 0])
    return packed


def _map_of(event: KvEvent) -> dict[str, Any]:
    match event:
        case BlocksStored():
            return {
                "type": STORED,
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": None,
                **({} if event.extra_keys is None else {"extra_keys": event.extra_keys}),
                "group_idx": event.group,
            }
        case BlocksRemoved():
            return {"type": REMOVED, "block_hashes": event.hashes, "medium": event.medium, "group_idx": event.group}
        case CacheCleared():
            return {"type": CLEARED}


def frames_of(topic: str, sequence: int, payload: bytes) -> Sequence[bytes]:
    """Return the frames of a published batch."""
    return topic.encode(), sequence.to_bytes(SEQUENCE_BYTES, "big"), payload
