"""Writes an engine's state file."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any

import numpy as np

from . import layout, process
from .layout import HEADER_SIZE, REASONS, SEQUENCE, SEQUENCE_AT

NEVER = -1.0
UNKNOWN = -1
DIGEST_BYTES = 16
IS_ORDERED = platform.machine() == "x86_64"  # other processes see stores in their order; elsewhere system calls write
MAX_SINGLE_WRITES = 16  # of changed blocks; for more, all blocks are written at once


class Writer:
    """One engine's state file: fill in the arrays, then `publish` them all at once.

    The arrays (`state`, `clients`, `running`, `waiting`, `held`, `batch`, `live`, `blocks`) are in this process's
    memory; readers see them only after `publish`. `grow` replaces a file that is too small by a larger one. Failures
    are OSErrors; after one, the file can only be closed.

    The file is written through a mapping, and only where memory has been allocated: writing to a page without memory
    would kill the process. System calls would be simpler, but each releases the interpreter lock, and beside vLLM's
    threads it took up to a millisecond until the engine's loop had the lock again.
    """

    def __init__(  # noqa: PLR0913 - the sizes of a file
        self,
        path: str,
        settings: Mapping[str, Any],
        *,
        num_slots: int,
        num_blocks: int = 0,
        blocks_per_request: int = 0,
        num_clients: int = 0,
        num_adapters: int = 0,
    ) -> None:
        """Create the file of an idle engine; `num_blocks` is 0 where the contents of blocks are not exported.

        `num_clients` is the highest number of clients whose tokens the engine's local scheduler counts, `num_adapters`
        that of LoRA adapters in host memory.
        """
        self.path = Path(path).absolute()
        self._settings = json.dumps(settings).encode()
        if len(self._settings) > layout.MAX_SETTINGS_BYTES:
            raise ValueError(f"settings: {len(self._settings)} bytes are more than {layout.MAX_SETTINGS_BYTES}")
        self._blocks_per_request = blocks_per_request
        self._num_clients, self._num_adapters = num_clients, num_adapters
        self._sequence = self._generation = 0
        self._life = int.from_bytes(os.urandom(8))
        self._descriptor = -1
        self._mapping: mmap | None = None
        self._allocated = bytearray()  # for each page of the file, whether it has memory
        self._num_steps = 0
        self._rows: list[tuple[str, int, bytes]] = []  # section, offset, data: for the next publication
        self.blocks = np.zeros(num_blocks, layout.BLOCK)
        self._allocate(num_slots)
        self.state["clock_rate"] = self.state["correction"] = 1.0
        _refuse_to_replace(self.path)
        self._create_file()

    @property
    def num_slots(self) -> int:
        """The number of requests that fit into the file."""
        return len(self.live)

    def put_request(  # noqa: PLR0913 - the fields of a row
        self,
        slot: int,
        *,
        serial: int,
        request_id: str,
        arrival_s: float,
        prompt_tokens: int,
        max_tokens: int,
        min_tokens: int = 0,
        priority: int = 0,
        tag_tokens: float = math.nan,
        tag_spread: float = 0.0,
        ttft_slo_s: float = math.nan,
        tpot_slo_s: float = math.nan,
        request_class: int = 0,
        leg: int = 0,
        weight: float = 1.0,
        client_id: str = "",
        session_id: str = "",
        adapter: str = "",
    ) -> None:
        """Write the facts of the request in a slot; its `serial` is above 0 and never used again."""
        row = (
            serial, short_id(request_id), arrival_s, tag_tokens, tag_spread, priority, prompt_tokens, max_tokens,
            min_tokens, request_class, leg, 0, ttft_slo_s, tpot_slo_s, weight, tenant_number(client_id),
            short_id(client_id, layout.NAME_BYTES), short_id(session_id, layout.NAME_BYTES), adapter_number(adapter),
            short_id(adapter, layout.NAME_BYTES),
        )  # fmt: skip
        self._put("requests", slot, 0, np.array([row], layout.REQUEST))
        live = self.live[slot]
        live["serial"] = serial
        for name in ("scheduled_s", "first_token_s", "fetch_started_s", "fetch_ended_s", "held_until_s"):
            live[name] = NEVER
        live["prefill_tokens"] = UNKNOWN

    def put_hashes(self, slot: int, hashes: np.ndarray, start: int = 0) -> None:
        """Write the contents of a request's full blocks, from its block `start` on."""
        self._put("hashes", slot, start, np.ascontiguousarray(hashes, layout.HASH))

    def put_blocks(self, slot: int, block_ids: np.ndarray, start: int = 0) -> None:
        """Write the blocks that a request holds, from its block `start` on."""
        self._put("tables", slot, start, np.ascontiguousarray(block_ids, layout.TABLE_ENTRY))

    def free_slot(self, slot: int) -> None:
        """Clear the slot of a request."""
        self.live[slot] = np.zeros((), layout.LIVE)

    def add_step(self, row: tuple[float, ...], loads: tuple[int, int] = (0, 0)) -> None:
        """Record a step that has ended: the fields of `layout.STEP`, the last ones from `loads`."""
        index = self._num_steps % layout.NUM_STEPS
        self._rows.append(("steps", index * layout.STEP_ROW.size, layout.STEP_ROW.pack(*row, *loads)))
        self._num_steps += 1
        self.state["num_steps"] = self._num_steps
        self.state["last_step_s"] = row[2]

    def add_outcome(  # noqa: PLR0913 - the fields of a row
        self,
        *,
        serial: int,
        request_id: str,
        arrival_s: float,
        scheduled_s: float | None,
        first_token_s: float | None,
        finished_s: float | None,
        prompt_tokens: int,
        output_tokens: int,
        hit_tokens: int,
        num_preemptions: int,
        reason: str,
    ) -> None:
        """Record the outcome of a request."""
        times = (NEVER if time_s is None else time_s for time_s in (scheduled_s, first_token_s, finished_s))
        row = (
            serial, short_id(request_id), arrival_s, *times, prompt_tokens, output_tokens, hit_tokens,
            num_preemptions, REASONS.index(reason), 0,
        )  # fmt: skip
        index = int(self.state["num_outcomes"][0]) % layout.NUM_OUTCOMES
        self._put("outcomes", index, 0, np.array([row], layout.OUTCOME))
        self.state["num_outcomes"] += 1

    def publish(self, changed: Collection[int] | None = None) -> None:
        """Publish the current state; `changed` are the indexes of the `blocks` that have changed, None if unknown."""
        self._sequence += 2
        self.state["sequence"] = self._sequence
        self.state["written_ns"] = time.monotonic_ns()
        self._write(SEQUENCE.pack(self._sequence - 1), SEQUENCE_AT)
        self._write(self._core, HEADER_SIZE)
        for name, offset, row in self._rows:
            self._write(row, self._sections[name].offset + offset)
        self._rows.clear()
        offset, size = self._sections["blocks"].offset, self.blocks.itemsize
        if changed is None or len(changed) > MAX_SINGLE_WRITES:
            self._write(self.blocks.data, offset)
        else:
            for block in changed:
                self._write(self.blocks[block : block + 1].data, offset + block * size)
        self._write(SEQUENCE.pack(self._sequence), SEQUENCE_AT)

    def grow(self, num_slots: int) -> None:
        """Replace the file by a larger one with the same contents, at the same path."""
        old_sections, old_descriptor, old_arrays = self._sections, self._descriptor, self._arrays()
        old_mapping, self._mapping = self._mapping, None
        self._allocate(num_slots)
        for old, new in zip(old_arrays, self._arrays(), strict=True):
            new[: len(old)] = old
        rows = []
        for name in ("requests", "steps", "outcomes"):
            section = old_sections[name]
            rows.append((name, 0, os.pread(old_descriptor, section.size, section.offset)))
        for slot in np.flatnonzero(self.live["serial"]).tolist():
            live = self.live[slot]
            for name, count, dtype in (
                ("hashes", live["num_hashes"], layout.HASH),
                ("tables", max(live["num_blocks"], live["full_blocks"]), layout.TABLE_ENTRY),
            ):
                offset, row_size, _ = old_sections[name]
                size = min(int(count) * dtype.itemsize, row_size)
                rows.append((name, slot * row_size, os.pread(old_descriptor, size, offset + slot * row_size)))
        self._rows[:0] = rows
        try:
            self._create_file()
        finally:
            if old_mapping is not None:
                old_mapping.close()
            os.pwrite(old_descriptor, layout.STATUS.pack(layout.SUPERSEDED), layout.STATUS_AT)
            os.close(old_descriptor)

    def close(self) -> None:
        """Mark the file as closed, and remove it."""
        if self._descriptor < 0:
            return
        with suppress(OSError):
            os.pwrite(self._descriptor, layout.STATUS.pack(layout.CLOSED), layout.STATUS_AT)
        with suppress(OSError):
            if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                self.path.unlink()
        self._release()

    def _release(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        os.close(self._descriptor)
        self._descriptor = -1

    def _allocate(self, num_slots: int) -> None:
        """Lay out the file, and create the arrays over the sections that every publication writes."""
        self._sections = layout.sections_for(
            num_slots=num_slots,
            num_clients=self._num_clients,
            num_adapters=self._num_adapters,
            num_blocks=len(self.blocks),
            blocks_per_request=self._blocks_per_request,
            settings_bytes=len(self._settings),
        )
        live = self._sections["live"]
        self._core = bytearray(live.offset + live.size - HEADER_SIZE)
        self.state = self._over("state", layout.STATE)
        self.clients = self._over("clients", layout.CLIENT)
        self.adapters = self._over("adapters", layout.ADAPTER)
        self.running = self._over("running", layout.SLOT)
        self.waiting = self._over("waiting", layout.SLOT)
        self.held = self._over("held", layout.SLOT)
        self.batch = self._over("batch", layout.SCHEDULED).reshape(layout.MAX_STEPS_IN_FLIGHT, num_slots)
        self.live = self._over("live", layout.LIVE)

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.state, self.clients, self.adapters, self.running, self.waiting, self.held, *self.batch, self.live

    def _over(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        section = self._sections[name]
        return np.frombuffer(self._core, dtype, section.rows, section.offset - HEADER_SIZE)

    def _put(self, name: str, row: int, item: int, items: np.ndarray) -> None:
        section = self._sections[name]
        if not 0 <= row < section.rows or (item + len(items)) * items.itemsize > section.row_size:
            raise ValueError(f"{name}: row {row}, items {item} to {item + len(items)} are outside of the state file")
        self._rows.append((name, row * section.row_size + item * items.itemsize, items.tobytes()))

    def _create_file(self) -> None:
        """Write a complete file beside the path, and rename it to the path."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with suppress(FileNotFoundError):
            beside.unlink()
        self._descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            process.lock_as_writer(self._descriptor)
            size = layout.end_of(self._sections)
            os.truncate(self._descriptor, size)
            self._allocated = bytearray(-(-size // PAGESIZE))
            self._allocate_memory(0, self._sections["tables"].offset)  # the rest may never be needed
            if IS_ORDERED:
                self._mapping = mmap(self._descriptor, size)
            self._generation += 1
            self._write(self._header(), 0)
            self._write(self._settings, self._sections["settings"].offset)
            self.publish()
            beside.replace(self.path)
        except BaseException:
            beside.unlink(missing_ok=True)
            self._release()
            raise

    def _header(self) -> bytes:
        header = bytearray(HEADER_SIZE)
        pid = os.getpid()
        layout.IDENTITY.pack_into(
            header, 0, layout.MAGIC, layout.VERSION, HEADER_SIZE, self._generation, self._life, pid,
            process.start_ticks(pid) or 0, process.pid_namespace(), process.boot_id(), time.time_ns(),
            layout.end_of(self._sections),
        )  # fmt: skip
        for number, name in enumerate(layout.SECTIONS):
            layout.SECTION.pack_into(header, layout.TABLE_AT + number * layout.SECTION.size, *self._sections[name])
        layout.CHECKSUM.pack_into(header, layout.CHECKSUM_AT, layout.checksum(bytes(header), self._settings))
        return bytes(header)

    def _write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        size = memoryview(data).nbytes
        if self._mapping is None:
            if os.pwrite(self._descriptor, data, offset) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        elif size:
            self._allocate_memory(offset, size)
            self._mapping[offset : offset + size] = data

    def _allocate_memory(self, offset: int, size: int) -> None:
        """Allocate memory for a part of the file, where it has none."""
        first, end = offset // PAGESIZE, -(-(offset + size) // PAGESIZE)
        if not all(self._allocated[first:end]):
            os.posix_fallocate(self._descriptor, offset, size)
            self._allocated[first:end] = b"\1" * (end - first)


def short_id(text: str, size: int = layout.ID_BYTES) -> bytes:
    """Encode an id for its field: one that is too long is cut, and ends with a digest of the whole."""
    data = text.encode("utf-8", "surrogatepass").replace(b"\0", b"?")
    if len(data) <= size:
        return data
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest().encode()
    return data[: size - len(digest) - 1] + b"#" + digest


def tenant_number(client_id: str) -> int:
    """Number a tenant by the first eight bytes of the BLAKE2b hash of its client id; 0 where it has none."""
    if not client_id:
        return 0
    digest = hashlib.blake2b(client_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def adapter_number(adapter: str) -> int:
    """Number a LoRA adapter by its name, as a tenant; 0 for the base model."""
    return tenant_number(adapter)


def _refuse_to_replace(path: Path) -> None:
    """Refuse a path where another engine writes, or where another kind of file is."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        header = os.pread(descriptor, layout.IDENTITY.size, 0)
        if not header.startswith(layout.MAGIC):
            raise ValueError(f"state file: {path} exists, and is no state file")
        if process.is_held(descriptor):
            raise ValueError(f"state file: another engine writes {path}")
    finally:
        os.close(descriptor)
