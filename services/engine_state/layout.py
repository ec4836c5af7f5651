"""The layout of a state file, byte by byte; `FORMAT.md` has the meaning."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

MAGIC = b"BLKSTATE"
VERSION = 5

ID_BYTES = 120
NAME_BYTES = 64  # of a tenant or a session
NUM_STEPS = 256  # rows of the ring of steps
NUM_OUTCOMES = 1024  # rows of the ring of outcomes
MEMORY_SIZE = 8  # numbers that a local scheduler remembers between steps
MAX_DRAFT_TOKENS = 32  # per request and step
MAX_STEPS_IN_FLIGHT = 2
HELD = 0  # a block's `reuse` while a request holds it
# Where the transfer of a request's KV blocks stands.
NO_TRANSFER, TO_FETCH, FETCHING, FETCHED, FETCH_FAILED, BLOCKS_HELD, ARRIVED, LOST = range(8)
SERVE, PREFILL, DECODE = range(3)  # the part of a request that its engine serves

LIVE_FILE, SUPERSEDED, CLOSED = 0, 1, 2
REASONS = ("stop", "length", "abort", "error")

STATE = np.dtype(
    [
        ("sequence", "<u8"),
        ("written_ns", "<i8"),
        ("clock_origin_s", "<f8"),
        ("clock_rate", "<f8"),
        ("num_running", "<u4"),
        ("num_waiting", "<u4"),
        ("num_in_flight", "<u4"),
        ("num_blocks", "<u4"),
        ("num_free_blocks", "<u4"),
        ("num_scheduled", "<u4", (2,)),
        ("decodes_since_look", "<u4"),
        ("start_s", "<f8", (2,)),
        ("last_step_s", "<f8"),
        ("num_planned", "<u8"),
        ("num_steps", "<u8"),
        ("num_outcomes", "<u8"),
        ("num_preemptions", "<u8"),
        ("prefix_queries", "<u8"),
        ("prefix_hits", "<u8"),
        ("correction", "<f8"),
        ("memory", "<f8", (MEMORY_SIZE,)),
        ("num_fetched", "<u8"),
        ("num_clients", "<u4"),
        ("num_held", "<u4"),
        ("num_drafts", "<u8"),
        ("num_draft_tokens", "<u8"),
        ("num_draft_chances", "<u8"),
        ("num_accepted", "<u8", (MAX_DRAFT_TOKENS,)),
        ("num_adapters", "<u8"),
    ]
)

CLIENT = np.dtype([("tenant", "<i8"), ("weight", "<f8"), ("tokens", "<f8"), ("waits", "<i8")])

ADAPTER = np.dtype([("number", "<i8"), ("is_active", "<i8")])

LIVE = np.dtype(
    [
        ("serial", "<u8"),
        ("output_tokens", "<i4"),
        ("computed_tokens", "<i4"),
        ("placeholders", "<i4"),
        ("in_flight_tokens", "<i4"),
        ("stale_tokens", "<i4"),
        ("num_blocks", "<i4"),
        ("full_blocks", "<i4"),
        ("num_hashes", "<i4"),
        ("num_preemptions", "<i4"),
        ("hit_tokens", "<i4"),
        ("prefill_tokens", "<i4"),
        ("stage", "<i4"),
        ("draft_tokens", "<i4"),
        ("unused", "<i4"),
        ("scheduled_s", "<f8"),
        ("first_token_s", "<f8"),
        ("fetch_started_s", "<f8"),
        ("fetch_ended_s", "<f8"),
        ("held_until_s", "<f8"),
    ]
)

LIVE_ROW = struct.Struct("<Q14i5d")  # the same, to write

REQUEST = np.dtype(
    [
        ("serial", "<u8"),
        ("request_id", f"S{ID_BYTES}"),
        ("arrival_s", "<f8"),
        ("tag_tokens", "<f8"),
        ("tag_spread", "<f8"),
        ("priority", "<i8"),
        ("prompt_tokens", "<i4"),
        ("max_tokens", "<i4"),
        ("min_tokens", "<i4"),
        ("request_class", "<i4"),
        ("leg", "<i4"),
        ("reserved", "<i4"),
        ("ttft_slo_s", "<f8"),
        ("tpot_slo_s", "<f8"),
        ("weight", "<f8"),
        ("tenant", "<i8"),
        ("client_id", f"S{NAME_BYTES}"),
        ("session_id", f"S{NAME_BYTES}"),
        ("adapter", "<i8"),
        ("adapter_name", f"S{NAME_BYTES}"),
    ]
)

SCHEDULED = np.dtype([("slot", "<i4"), ("sampled", "<i2"), ("drafts", "<i2"), ("tokens", "<i8")])
SCHEDULED_ROW = struct.Struct("<ihhq")  # the same, to write

STEP = np.dtype(
    [
        ("number", "<u8"),
        ("start_s", "<f8"),
        ("seconds", "<f8"),
        ("num_tokens", "<i4"),
        ("num_sampled", "<i4"),
        ("num_decodes", "<i4"),
        ("num_prefills", "<i4"),
        ("decode_context", "<i8"),
        ("decode_longest", "<i8"),
        ("prefill_qq", "<f8"),
        ("prefill_qkv", "<f8"),
        ("adapter_loads", "<i4"),
        ("adapter_activations", "<i4"),
    ]
)

STEP_ROW = struct.Struct("<Qdd4iqqdd2i")  # the same, to write

OUTCOME = np.dtype(
    [
        ("serial", "<u8"),
        ("request_id", f"S{ID_BYTES}"),
        ("arrival_s", "<f8"),
        ("scheduled_s", "<f8"),
        ("first_token_s", "<f8"),
        ("finished_s", "<f8"),
        ("prompt_tokens", "<i4"),
        ("output_tokens", "<i4"),
        ("hit_tokens", "<i4"),
        ("num_preemptions", "<i4"),
        ("reason", "<i4"),
        ("reserved", "<i4"),
    ]
)

BLOCK = np.dtype([("content", "<u8"), ("reuse", "<i8")])

SLOT = np.dtype("<u4")
TABLE_ENTRY = np.dtype("<i4")
HASH = np.dtype("<u8")

# In this order in the file and in the header's table. Every publication writes the first eight, together.
SECTIONS = (
    "state", "clients", "adapters", "running", "waiting", "held", "batch", "live",
    "requests", "steps", "outcomes", "blocks", "tables", "hashes", "settings",
)  # fmt: skip

# magic, version, header size, generation, life, pid, pid's start, pid namespace, boot, created, file size
IDENTITY = struct.Struct("<8sIIQQqQQ16sqQ")
SECTION = struct.Struct("<QII")
TABLE_AT = IDENTITY.size
CHECKSUM_AT = TABLE_AT + len(SECTIONS) * SECTION.size
CHECKSUM = struct.Struct("<I")
SEQUENCE_AT = 512
SEQUENCE = struct.Struct("<Q")
STATUS_AT = 520
STATUS = struct.Struct("<I")
HEADER_SIZE = 1024

ALIGNMENT = 64
MAX_FILE_BYTES = 1 << 36
MAX_SETTINGS_BYTES = 1 << 20
MAX_TABLE_BYTES = 1 << 22
MAX_SLOTS = 1 << 20
MAX_BLOCKS = 1 << 26
MAX_CLIENTS = 1 << 20
MAX_ADAPTERS = 1 << 12


class Section(NamedTuple):
    """The position of a section in the file."""

    offset: int
    row_size: int
    rows: int

    @property
    def size(self) -> int:
        """Bytes of all its rows."""
        return self.row_size * self.rows


def row_sizes(blocks_per_request: int) -> dict[str, int]:
    """Return the bytes per row of each section."""
    return {
        "state": STATE.itemsize,
        "clients": CLIENT.itemsize,
        "adapters": ADAPTER.itemsize,
        "running": SLOT.itemsize,
        "waiting": SLOT.itemsize,
        "held": SLOT.itemsize,
        "batch": SCHEDULED.itemsize,
        "live": LIVE.itemsize,
        "requests": REQUEST.itemsize,
        "steps": STEP.itemsize,
        "outcomes": OUTCOME.itemsize,
        "blocks": BLOCK.itemsize,
        "tables": TABLE_ENTRY.itemsize * blocks_per_request,
        "hashes": HASH.itemsize * blocks_per_request,
        "settings": 1,
    }


def sections_for(  # noqa: PLR0913 - the sizes of a file
    *,
    num_slots: int,
    num_clients: int,
    num_blocks: int,
    blocks_per_request: int,
    settings_bytes: int,
    num_adapters: int = 0,
) -> dict[str, Section]:
    """Return the sections of a file with these sizes."""
    rows = {
        "state": 1,
        "clients": num_clients,
        "adapters": num_adapters,
        "running": num_slots,
        "waiting": num_slots,
        "held": num_slots,
        "batch": MAX_STEPS_IN_FLIGHT * num_slots,
        "live": num_slots,
        "requests": num_slots,
        "steps": NUM_STEPS,
        "outcomes": NUM_OUTCOMES,
        "blocks": num_blocks,
        "tables": num_slots if num_blocks else 0,
        "hashes": num_slots if num_blocks else 0,
        "settings": settings_bytes,
    }
    sizes = row_sizes(blocks_per_request)
    laid_out, offset = {}, HEADER_SIZE
    for name in SECTIONS:
        laid_out[name] = Section(offset, sizes[name], rows[name])
        offset = _aligned(offset + laid_out[name].size)
    return laid_out


def end_of(sections: Mapping[str, Section]) -> int:
    """Return the size of a file with these sections."""
    return max(section.offset + section.size for section in sections.values())


def checksum(header: bytes, settings: bytes) -> int:
    """Return the checksum of the constant parts of a file: writer, sections, and the engine's settings."""
    return zlib.crc32(settings, zlib.crc32(header[:CHECKSUM_AT]))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
