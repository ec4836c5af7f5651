"""Reading an engine's state file, whatever became of it."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.export import layout, process
from services.export.layout import HEADER_SIZE, SEQUENCE, SEQUENCE_AT, Place

MISSING, FOREIGN, CORRUPT, ENDED, BUSY = "missing", "foreign", "corrupt", "ended", "busy"
PAUSE_S = 0.0001
SILENT_S = 1.0  # after so long without news it is worth asking whether the writer lives, though the file is held


class UnreadableError(ValueError):
    """Why a state file cannot be read: it is missing, foreign, corrupt, its engine has ended, or it stays busy."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep the reason beside the message."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the KV blocks hold: arrays by block, and by place in `View.slots` the blocks and contents of requests."""

    blocks: np.ndarray
    tables: tuple[np.ndarray, ...]
    hashes: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An engine's state as one publication shows it, in arrays that nobody changes.

    An engine's `life` is a number of its own, and `generation` counts the files of that life, each larger than the one
    before. `live` and `requests` have a row per slot. `running` and `waiting` are slots in the engine's order, `steps`
    the steps under way, oldest first. `now_s` is the time of reading on the engine's clock, `age_s` the wall-clock age
    of the publication, and `clock_rate` engine seconds per second.
    """

    life: int
    generation: int
    sequence: int
    now_s: float
    age_s: float
    clock_rate: float
    settings: dict[str, Any]
    state: np.void
    running: np.ndarray
    waiting: np.ndarray
    steps: tuple[tuple[float, np.ndarray], ...]
    live: np.ndarray
    requests: np.ndarray
    contents: Contents | None

    @property
    def slots(self) -> np.ndarray:
        """Slots of all requests that run or wait."""
        return np.concatenate((self.running, self.waiting))


class Reader:
    """Reads one engine's state again and again; follows the engine into larger files and over restarts.

    A file that is being written is waited for, `patience_s` at most. No file can hurt: what is wrong with it is an
    UnreadableError.
    """

    def __init__(self, path: str, *, patience_s: float = 0.02) -> None:
        """Read from a path where an engine's file is, or will be."""
        self.path = Path(path).absolute()
        self._patience_s = patience_s
        self._file: _File | None = None
        self._seen: dict[str, tuple[int, int]] = {}  # how many rows of each ring, of which engine's life

    def read(self, *, contents: bool = False) -> View:
        """Give the newest publication; `contents` of KV blocks where asked for and told."""
        file = self._current()
        try:
            return file.read(self._patience_s, contents=contents)
        except UnreadableError:
            if (newer := self._newer()) is None:  # it may have been replaced meanwhile
                raise
            return newer.read(self._patience_s, contents=contents)

    def new_steps(self) -> np.ndarray:
        """Give the records of steps (`layout.STEP`) that this reader has not given yet and that are still kept."""
        return self._new("steps", "num_steps", layout.STEP)

    def new_outcomes(self) -> np.ndarray:
        """Give the outcomes of requests (`layout.OUTCOME`) not given yet and still kept."""
        return self._new("outcomes", "num_outcomes", layout.OUTCOME)

    def close(self) -> None:
        """Let the file go."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new(self, name: str, counter: str, dtype: np.dtype[Any]) -> np.ndarray:
        def take(file: _File) -> np.ndarray:
            life, count = self._seen.get(name, (0, 0))
            rows, total = file.ring(name, counter, dtype, count if life == file.life else 0, self._patience_s)
            self._seen[name] = (file.life, total)
            return rows

        file = self._current()
        try:
            rows = take(file)
        except UnreadableError:
            if (newer := self._newer()) is None:
                raise
            return take(newer)
        if file.is_over() and (newer := self._newer()) is not None:
            return np.concatenate((rows, take(newer)))
        return rows

    def _current(self) -> _File:
        if self._file is None:
            self._file = _File(self.path)
        return self._file

    def _newer(self) -> _File | None:
        """Open what is at the path now, if that is another file."""
        assert self._file is not None  # noqa: S101
        with suppress(OSError):
            if self._file.is_at(self.path):
                return None
            newer = _File(self.path)
            self._file.close()
            self._file = newer
            return newer
        return None


class _File:
    """One state file, open."""

    def __init__(self, path: Path) -> None:
        """Open and check a file."""
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise UnreadableError(MISSING, f"{path}: is not there; no engine writes it") from None
        except OSError as error:
            raise UnreadableError(MISSING, f"{path}: cannot be opened: {error.strerror}") from None
        try:
            self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._requests = np.zeros(self._places["requests"].rows, layout.REQUEST)

    def close(self) -> None:
        os.close(self._descriptor)

    def is_at(self, path: Path) -> bool:
        return os.path.samestat(path.stat(), os.fstat(self._descriptor))

    def is_over(self) -> bool:
        """Tell whether nothing will be written to the file any more."""
        return self._status() != layout.LIVE_FILE or not process.is_held(self._descriptor)

    def read(self, patience_s: float, *, contents: bool) -> View:
        deadline_s = time.monotonic() + patience_s
        while True:
            sequence = self._settled_sequence(deadline_s)
            core = self._pread(HEADER_SIZE, self._core_size)
            state = np.frombuffer(core, layout.STATE, 1)
            mismatch = int(state["sequence"][0]) != sequence
            if mismatch or (read := self._read_rest(core, state, contents=contents)) is None:
                self._pause(deadline_s)
                continue
            if self._sequence() == sequence:
                break
            self._pause(deadline_s)
        self._refuse_if_ended(state)
        return self._view(core, state, *read)

    def ring(
        self, name: str, counter: str, dtype: np.dtype[Any], num_seen: int, patience_s: float
    ) -> tuple[np.ndarray, int]:
        """Rows that a ring got since so many had been seen."""
        place, deadline_s = self._places[name], time.monotonic() + patience_s
        while True:
            sequence = self._settled_sequence(deadline_s)
            state = np.frombuffer(self._pread(HEADER_SIZE, layout.STATE.itemsize), layout.STATE)
            count = int(state[counter][0])
            first = max(num_seen if num_seen <= count else 0, count - place.rows)
            rows = np.frombuffer(self._pread(place.offset, place.size), dtype)
            if self._sequence() == sequence:
                return rows[np.arange(first, count) % place.rows], count
            self._pause(deadline_s)

    def _read_header(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._wrong(FOREIGN, "is no regular file")
        header = self._pread(0, HEADER_SIZE)
        (
            magic, version, header_size, self.generation, self.life, self._pid, self._start_ticks, self._namespace,
            boot, _, size,
        ) = layout.IDENTITY.unpack_from(header)  # fmt: skip
        if magic != layout.MAGIC:
            raise self._wrong(FOREIGN, "is no engine's state file")
        if version != layout.VERSION:
            raise self._wrong(FOREIGN, f"has format version {version}; this release reads {layout.VERSION}")
        if header_size != HEADER_SIZE or size != status.st_size or size > layout.LARGEST_FILE:
            raise self._wrong(CORRUPT, f"is {status.st_size} bytes long and says {size}")
        if boot != process.boot_id():
            raise self._wrong(ENDED, "was written before this machine started")
        self._places = self._table(header, size)
        settings = self._places["settings"]
        text = self._pread(settings.offset, settings.size)
        (checksum,) = layout.CHECKSUM.unpack_from(header, layout.CHECKSUM_AT)
        if checksum != layout.checksum(header, text):
            raise self._wrong(CORRUPT, "has a damaged header")
        try:
            self._settings = json.loads(text)
        except (ValueError, RecursionError):
            raise self._wrong(CORRUPT, "has settings that are not JSON") from None
        if not isinstance(self._settings, dict):
            raise self._wrong(CORRUPT, "has settings that are no object")
        live = self._places["live"]
        self._core_size = live.offset + live.size - HEADER_SIZE

    def _table(self, header: bytes, size: int) -> dict[str, Place]:
        """Read where the sections lie, and refuse what this layout would not have made."""
        places = {
            name: Place(*layout.SECTION.unpack_from(header, layout.TABLE_AT + number * layout.SECTION.size))
            for number, name in enumerate(layout.SECTIONS)
        }
        expected = layout.places(
            num_slots=places["live"].rows,
            num_blocks=places["blocks"].rows,
            blocks_per_request=places["tables"].row_size // layout.TABLE_ENTRY.itemsize,
            settings_bytes=places["settings"].rows,
        )
        if places != expected or layout.end_of(places) > size or places["settings"].size > layout.LARGEST_SETTINGS:
            raise self._wrong(CORRUPT, "has a damaged table of sections")
        return places

    def _read_rest(self, core: bytes, state: np.ndarray, *, contents: bool) -> tuple[Any, ...] | None:
        """Read what lies behind the core; None where the core cannot be true, being half written or corrupt."""
        live = self._over(core, "live", layout.LIVE)
        running = self._over(core, "running", layout.SLOT)[: int(state["num_running"][0])]
        waiting = self._over(core, "waiting", layout.SLOT)[: int(state["num_waiting"][0])]
        slots = np.concatenate((running, waiting))
        if len(slots) and slots.max() >= len(live):
            return None
        if not np.array_equal(self._requests["serial"][slots], live["serial"][slots]):
            place = self._places["requests"]
            self._requests = np.frombuffer(self._pread(place.offset, place.size), layout.REQUEST)
        return running, waiting, live, self._read_contents(running, waiting, live) if contents else None

    def _read_contents(self, running: np.ndarray, waiting: np.ndarray, live: np.ndarray) -> Contents | None:
        place = self._places["blocks"]
        if place.rows == 0:
            return None
        slots = np.concatenate((running, waiting))
        held = np.concatenate((live["num_blocks"][running], live["full_blocks"][waiting]))  # or held until preempted
        return Contents(
            blocks=np.frombuffer(self._pread(place.offset, place.size), layout.BLOCK),
            tables=self._rows("tables", layout.TABLE_ENTRY, slots, held),
            hashes=self._rows("hashes", layout.HASH, slots, live["num_hashes"][slots]),
        )

    def _rows(self, name: str, dtype: np.dtype[Any], slots: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
        offset, row_size, _ = self._places[name]
        most = row_size // dtype.itemsize
        return tuple(
            np.frombuffer(self._pread(offset + slot * row_size, min(count, most) * dtype.itemsize), dtype)
            for slot, count in zip(slots.tolist(), np.maximum(counts, 0).tolist(), strict=True)
        )

    def _view(
        self,
        core: bytes,
        state: np.ndarray,
        running: np.ndarray,
        waiting: np.ndarray,
        live: np.ndarray,
        contents: Contents | None,
    ) -> View:
        head = state[0]
        slots = np.concatenate((running, waiting))
        self._require(len(running) == head["num_running"], "num_running")
        self._require(len(waiting) == head["num_waiting"], "num_waiting")
        self._require(len(np.unique(slots)) == len(slots), "running and waiting")
        self._require(bool((live["serial"][slots] > 0).all()), "live.serial")
        self._require(bool((self._requests["serial"][slots] == live["serial"][slots]).all()), "requests.serial")
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
            running=running,
            waiting=waiting,
            steps=self._steps(core, head, set(slots.tolist())),
            live=live,
            requests=self._requests,
            contents=contents,
        )

    def _steps(self, core: bytes, head: np.void, slots: set[int]) -> tuple[tuple[float, np.ndarray], ...]:
        """Steps under way, without requests that ended meanwhile."""
        batch = self._over(core, "batch", layout.SCHEDULED).reshape(layout.MOST_STEPS_UNDER_WAY, -1)
        self._require(head["num_in_flight"] <= len(batch), "num_in_flight")
        steps = []
        for place in range(head["num_in_flight"]):
            self._require(head["num_scheduled"][place] <= batch.shape[1], "num_scheduled")
            entries = batch[place, : head["num_scheduled"][place]]
            live = [slot in slots for slot in entries["slot"].tolist()]
            steps.append((float(head["start_s"][place]), entries[live]))
        return tuple(steps)

    def _over(self, core: bytes, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        place = self._places[name]
        return np.frombuffer(core, dtype, place.rows, place.offset - HEADER_SIZE)

    def _settled_sequence(self, deadline_s: float) -> int:
        """Wait until nothing is being written, and give the number of the last publication."""
        while (sequence := self._sequence()) % 2 or sequence == 0:
            self._pause(deadline_s)
        return sequence

    def _sequence(self) -> int:
        (sequence,) = SEQUENCE.unpack(self._pread(SEQUENCE_AT, SEQUENCE.size))
        return int(sequence)

    def _status(self) -> int:
        (status,) = layout.STATUS.unpack(self._pread(layout.STATUS_AT, layout.STATUS.size))
        return int(status)

    def _pause(self, deadline_s: float) -> None:
        if time.monotonic() < deadline_s:
            time.sleep(PAUSE_S)
            return
        if not process.is_held(self._descriptor):
            raise self._wrong(ENDED, "was left half written by an engine that has ended")
        raise self._wrong(BUSY, "stays half written: its engine has stopped, or the file is damaged")

    def _refuse_if_ended(self, state: np.ndarray) -> None:
        if self._status() != layout.LIVE_FILE:
            raise self._wrong(ENDED, "is closed: its engine has ended")
        if not process.is_held(self._descriptor):
            raise self._wrong(ENDED, f"is nobody's: its engine, process {self._pid}, has ended")
        silent_s = time.monotonic() - int(state["written_ns"][0]) / 1e9
        if silent_s > SILENT_S and process.has_ended(self._pid, self._start_ticks, self._namespace):
            raise self._wrong(ENDED, f"is left over: its engine, process {self._pid}, has ended")

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise self._wrong(CORRUPT, f"contradicts itself in {what}")

    def _pread(self, offset: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        if len(data) != size:
            raise self._wrong(CORRUPT, f"ends before byte {offset + size}")
        return data

    def _wrong(self, reason: str, message: str) -> UnreadableError:
        return UnreadableError(reason, f"{self._path}: {message}")
