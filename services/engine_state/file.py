"""One state file, open for reading; all of its contents are checked."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from services.engine_state import layout, process
from services.engine_state.layout import HEADER_SIZE, SEQUENCE, SEQUENCE_AT, Section
from services.engine_state.view import BUSY, CORRUPT, ENDED, FOREIGN, MISSING, Contents, UnreadableError, View

PAUSE_S = 0.0001
SILENT_S = 1.0  # without a publication for this long, check the writer's process although the file is locked


class Core(NamedTuple):
    """The sections that every publication writes, as they were read."""

    data: bytes
    state: np.ndarray
    clients: np.ndarray
    adapters: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    held: np.ndarray
    live: np.ndarray

    @property
    def slots(self) -> np.ndarray:
        """The slots of all requests that run, wait, or have ended while their blocks are held."""
        return np.concatenate((self.running, self.waiting, self.held))


class StateFile:
    """A file that an engine writes or has written, or another file at its path."""

    def __init__(self, path: Path) -> None:
        """Open and check the file at a path."""
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise UnreadableError(MISSING, f"{path}: does not exist; no engine writes it") from None
        except OSError as error:
            raise UnreadableError(MISSING, f"{path}: cannot be opened: {error.strerror}") from None
        try:
            self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._known_rows: dict[str, dict[int, tuple[tuple[int, ...], np.ndarray]]] = {}
        self._requests = np.zeros(self._sections["requests"].rows, layout.REQUEST)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def is_at(self, path: Path) -> bool:
        """Return whether this file is at a path."""
        return os.path.samestat(path.stat(), os.fstat(self._descriptor))

    def is_ended(self) -> bool:
        """Return whether nothing will be written to the file any more."""
        return self.is_closed() or not process.is_held(self._descriptor)

    def is_closed(self) -> bool:
        """Return whether the writer has closed the file: it ended, or continues in a larger file."""
        return self._status() != layout.LIVE_FILE

    def sequence(self) -> int:
        """Return the number of the last publication; it is odd while one is being written."""
        (sequence,) = SEQUENCE.unpack(self._pread(SEQUENCE_AT, SEQUENCE.size))
        return int(sequence)

    def read(self, patience_s: float, *, contents: bool) -> View:
        """Return the newest publication, after waiting for one that is being written."""
        deadline_s = time.monotonic() + patience_s
        while True:
            sequence = self._settled_sequence(deadline_s)
            core = self._read_core()
            if core is not None and int(core.state["sequence"][0]) == sequence:
                self._update_requests(core)
                blocks = self._read_contents(core) if contents else None
                if self.sequence() == sequence:
                    break
            self._pause(deadline_s)
        self._require_live(core)
        return self._view(core, blocks)

    def ring(
        self, name: str, counter: str, dtype: np.dtype[Any], num_seen: int, patience_s: float
    ) -> tuple[np.ndarray, int]:
        """Return the rows that were added to a ring after the first `num_seen`, and the number of all its rows."""
        section, deadline_s = self._sections[name], time.monotonic() + patience_s
        while True:
            sequence = self._settled_sequence(deadline_s)
            state = np.frombuffer(self._pread(HEADER_SIZE, layout.STATE.itemsize), layout.STATE)
            count = int(state[counter][0])
            first = max(num_seen if num_seen <= count else 0, count - section.rows)
            rows = np.frombuffer(self._pread(section.offset, section.size), dtype)
            if self.sequence() == sequence:
                return rows[(first % section.rows + np.arange(count - first)) % section.rows], count
            self._pause(deadline_s)

    def _read_header(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._error(FOREIGN, "is not a regular file")
        header = self._pread(0, HEADER_SIZE)
        (
            magic, version, header_size, self.generation, self.life, self._pid, self._start_ticks, self._namespace,
            boot, _, size,
        ) = layout.IDENTITY.unpack_from(header)  # fmt: skip
        if magic != layout.MAGIC:
            raise self._error(FOREIGN, "is not an engine's state file")
        if version != layout.VERSION:
            raise self._error(FOREIGN, _other_version(version))
        if header_size != HEADER_SIZE or size != status.st_size or size > layout.MAX_FILE_BYTES:
            raise self._error(CORRUPT, f"is {status.st_size} bytes long, its header has {size}")
        if boot != process.boot_id():
            raise self._error(ENDED, "was written before this machine started")
        self._sections = self._table(header, size)
        settings = self._sections["settings"]
        text = self._pread(settings.offset, settings.size)
        (checksum,) = layout.CHECKSUM.unpack_from(header, layout.CHECKSUM_AT)
        if checksum != layout.checksum(header, text):
            raise self._error(CORRUPT, "has a damaged header")
        try:
            self._settings = json.loads(text)
        except (ValueError, RecursionError):
            raise self._error(CORRUPT, "has settings that are not JSON") from None
        if not isinstance(self._settings, dict):
            raise self._error(CORRUPT, "has settings that are not a JSON object")
        live = self._sections["live"]
        self._core_size = live.offset + live.size - HEADER_SIZE

    def _table(self, header: bytes, size: int) -> dict[str, Section]:
        """Read the offsets of the sections, and refuse those that this layout does not have."""
        sections = {
            name: Section(*layout.SECTION.unpack_from(header, layout.TABLE_AT + number * layout.SECTION.size))
            for number, name in enumerate(layout.SECTIONS)
        }
        expected = layout.sections_for(
            num_slots=sections["live"].rows,
            num_clients=sections["clients"].rows,
            num_adapters=sections["adapters"].rows,
            num_blocks=sections["blocks"].rows,
            blocks_per_request=sections["tables"].row_size // layout.TABLE_ENTRY.itemsize,
            settings_bytes=sections["settings"].rows,
        )
        too_many = (
            sections["live"].rows > layout.MAX_SLOTS
            or sections["clients"].rows > layout.MAX_CLIENTS
            or sections["adapters"].rows > layout.MAX_ADAPTERS
            or sections["blocks"].rows > layout.MAX_BLOCKS
            or sections["tables"].row_size > layout.MAX_TABLE_BYTES
        )
        if (
            too_many
            or sections != expected
            or layout.end_of(sections) > size
            or sections["settings"].size > layout.MAX_SETTINGS_BYTES
        ):
            raise self._error(CORRUPT, "has a damaged table of sections")
        return sections

    def _read_core(self) -> Core | None:
        """Read the sections of every publication; None where they are half written or corrupt."""
        data = self._pread(HEADER_SIZE, self._core_size)
        state = np.frombuffer(data, layout.STATE, 1)
        core = Core(
            data=data,
            state=state,
            clients=self._over(data, "clients", layout.CLIENT)[: int(state["num_clients"][0])],
            adapters=self._over(data, "adapters", layout.ADAPTER)[: int(state["num_adapters"][0])],
            running=self._over(data, "running", layout.SLOT)[: int(state["num_running"][0])],
            waiting=self._over(data, "waiting", layout.SLOT)[: int(state["num_waiting"][0])],
            held=self._over(data, "held", layout.SLOT)[: int(state["num_held"][0])],
            live=self._over(data, "live", layout.LIVE),
        )
        return core if core.slots.max(initial=0) < len(core.live) else None

    def _update_requests(self, core: Core) -> None:
        """Read the facts of requests again, where there are new requests."""
        slots = core.slots
        if not np.array_equal(self._requests["serial"][slots], core.live["serial"][slots]):
            section = self._sections["requests"]
            self._requests = np.frombuffer(self._pread(section.offset, section.size), layout.REQUEST)

    def _read_contents(self, core: Core) -> Contents | None:
        section = self._sections["blocks"]
        if section.rows == 0:
            return None
        live, slots = core.live, core.slots
        # of a preempted request: its former blocks, which may still hold its tokens
        waiting = np.maximum(live["num_blocks"][core.waiting], live["full_blocks"][core.waiting])
        held = np.concatenate((live["num_blocks"][core.running], waiting, live["num_blocks"][core.held]))
        serials, preemptions = live["serial"][slots].tolist(), live["num_preemptions"][slots].tolist()
        # waiting requests may not keep their blocks
        sequence, num_running, num_waiting = int(core.state["sequence"][0]), len(core.running), len(core.waiting)
        since = [0] * num_running + [sequence] * num_waiting + [0] * len(core.held)
        table_keys = list(zip(np.maximum(held, 0).tolist(), serials, preemptions, since, strict=True))
        hash_keys = list(zip(np.maximum(live["num_hashes"][slots], 0).tolist(), serials, strict=True))
        return Contents(
            blocks=np.frombuffer(self._pread(section.offset, section.size), layout.BLOCK),
            tables=self._rows("tables", layout.TABLE_ENTRY, slots, table_keys),
            hashes=self._rows("hashes", layout.HASH, slots, hash_keys),
        )

    def _rows(
        self, name: str, dtype: np.dtype[Any], slots: np.ndarray, keys: Sequence[tuple[int, ...]]
    ) -> tuple[np.ndarray, ...]:
        """Read the rows of some slots; the first number of each key is the number of entries to read.

        A row whose key has not changed since the last call is not read again: the same array is returned.
        """
        offset, row_size, _ = self._sections[name]
        max_entries = row_size // dtype.itemsize
        known = self._known_rows.get(name, {})
        rows = {}
        for slot, key in zip(slots.tolist(), keys, strict=True):
            row = known.get(slot)
            if row is None or row[0] != key:
                size = min(key[0], max_entries) * dtype.itemsize
                row = (key, np.frombuffer(self._pread(offset + slot * row_size, size) if size else b"", dtype))
            rows[slot] = row
        self._known_rows[name] = rows
        return tuple(row for _, row in rows.values())

    def _view(self, core: Core, contents: Contents | None) -> View:
        head, slots, live = core.state[0], core.slots, core.live
        self._require(len(core.clients) == head["num_clients"], "num_clients")
        self._require(len(core.adapters) == head["num_adapters"], "num_adapters")
        self._require(len(core.running) == head["num_running"], "num_running")
        self._require(len(core.waiting) == head["num_waiting"], "num_waiting")
        self._require(len(core.held) == head["num_held"], "num_held")
        self._require(len(np.unique(slots)) == len(slots), "running, waiting and held")
        self._require((live["serial"][slots] > 0).all(), "live.serial")
        self._require((self._requests["serial"][slots] == live["serial"][slots]).all(), "requests.serial")
        rate, origin_s = float(head["clock_rate"]), float(head["clock_origin_s"])
        self._require(np.isfinite((rate, origin_s)).all() and rate > 0, "clock")
        now_s = time.monotonic()
        return View(
            life=self.life,
            generation=self.generation,
            sequence=int(head["sequence"]),
            now_s=max(0.0, (now_s - origin_s) * rate),
            age_s=now_s - int(head["written_ns"]) / 1e9,
            clock_rate=rate,
            settings=self._settings,
            state=head,
            clients=core.clients,
            adapters=core.adapters,
            running=core.running,
            waiting=core.waiting,
            held=core.held,
            steps=self._steps(core.data, head, {*core.running.tolist(), *core.waiting.tolist()}),
            live=live,
            requests=self._requests,
            contents=contents,
        )

    def _steps(self, data: bytes, head: np.void, slots: set[int]) -> tuple[tuple[float, np.ndarray], ...]:
        """Return the steps in flight, without requests that have ended since."""
        batch = self._over(data, "batch", layout.SCHEDULED).reshape(layout.MAX_STEPS_IN_FLIGHT, -1)
        self._require(head["num_in_flight"] <= len(batch), "num_in_flight")
        steps = []
        for ahead in range(head["num_in_flight"]):
            self._require(head["num_scheduled"][ahead] <= batch.shape[1], "num_scheduled")
            entries = batch[ahead, : head["num_scheduled"][ahead]]
            live = [slot in slots for slot in entries["slot"].tolist()]
            steps.append((float(head["start_s"][ahead]), entries[live]))
        return tuple(steps)

    def _over(self, data: bytes, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        section = self._sections[name]
        return np.frombuffer(data, dtype, section.rows, section.offset - HEADER_SIZE)

    def _settled_sequence(self, deadline_s: float) -> int:
        """Wait until no publication is being written, and return the number of the last one."""
        while (sequence := self.sequence()) % 2 or sequence == 0:
            self._pause(deadline_s)
        return sequence

    def _status(self) -> int:
        (status,) = layout.STATUS.unpack(self._pread(layout.STATUS_AT, layout.STATUS.size))
        return int(status)

    def _pause(self, deadline_s: float) -> None:
        if time.monotonic() < deadline_s:
            time.sleep(PAUSE_S)
            return
        if not process.is_held(self._descriptor):
            raise self._error(ENDED, "is half written, by an engine that has ended")
        raise self._error(BUSY, "stays half written: its engine is stopped, or the file is damaged")

    def _require_live(self, core: Core) -> None:
        if self.is_closed():
            raise self._error(ENDED, "is closed: its engine has ended")
        if not process.is_held(self._descriptor):
            raise self._error(ENDED, f"has no writer: its engine, process {self._pid}, has ended")
        silent_s = time.monotonic() - int(core.state["written_ns"][0]) / 1e9
        if silent_s > SILENT_S and process.has_ended(self._pid, self._start_ticks, self._namespace):
            raise self._error(ENDED, f"has no writer: its engine, process {self._pid}, has ended")

    def _require(self, condition: bool | np.bool, what: str) -> None:
        if not condition:
            raise self._error(CORRUPT, f"is inconsistent in {what}")

    def _pread(self, offset: int, size: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise self._error(CORRUPT, f"cannot be read: {error.strerror}") from None
        if len(data) != size:
            raise self._error(CORRUPT, f"ends before byte {offset + size}")
        return data

    def _error(self, reason: str, message: str) -> UnreadableError:
        return UnreadableError(reason, f"{self._path}: {message}")


def _other_version(version: int) -> str:
    """Return how a file's format version differs from the one that is read here, and what to do."""
    if version < layout.VERSION:
        return (
            f"has format version {version}, older than the {layout.VERSION} read here: "
            "install this release's block-vllm-export beside vLLM, or restart the emulated engine"
        )
    return f"has format version {version}, newer than the {layout.VERSION} read here: update this sidecar"
