"""The target that reads engines' state files: an input is a list of patches of a valid one."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from predictor.lengths import DEFAULT_RESIDUAL
from predictor.profile import load_profile
from predictor.request import RequestFacts
from scripts.fuzzing.inputs import CHUNKS
from scripts.fuzzing.targets import require
from services.engine_state import layout
from services.engine_state.file import StateFile
from services.predictor_server.engine_source import DownError
from services.predictor_server.exported import ExportedEngine
from tests.services.engine_state.files import busy, counting, writer_at

PATCH = struct.Struct("<IB")
STATE: Any = layout.STATE
WRITTEN_AT, SEQUENCE_AT = (STATE.fields[name][1] for name in ("written_ns", "sequence"))
SECTION_TYPES: Mapping[str, np.dtype[Any]] = {
    "state": layout.STATE, "clients": layout.CLIENT, "running": layout.SLOT, "waiting": layout.SLOT,
    "held": layout.SLOT, "batch": layout.SCHEDULED, "live": layout.LIVE, "requests": layout.REQUEST,
    "steps": layout.STEP, "outcomes": layout.OUTCOME, "blocks": layout.BLOCK, "tables": layout.TABLE_ENTRY,
    "hashes": layout.HASH,
}  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e30, 1.7e308, float("nan"), float("inf"), float("-inf"), 4.5)
WHOLES = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    31,
    32,
    33,
    63,
    127,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
CANDIDATE = RequestFacts(request_id="new", prompt_tokens=20, output_tokens=10, prefix_hashes=(11, 12))


class StateFileTarget:
    """Patches the file of a live engine, and has a sidecar follow it and forecast."""

    name = "state_file"

    def __init__(self, path: Path) -> None:
        """Write a valid file; the writer stays, as a file without one is not read."""
        self._path = path
        self._writer = counting(busy(writer_at(path, num_clients=8)))
        self._base = path.read_bytes()
        self._sections = StateFile(path)._sections  # noqa: SLF001 - as the reader sees them
        self._profile = load_profile("llama-2-7b-a30")
        self._descriptor = os.open(path, os.O_RDWR)
        self._patched: list[tuple[int, int]] = []
        self._engine: ExportedEngine | None = None
        self._num = 0
        self._sequence = 2

    async def drawn(self, draw: Random) -> bytes:
        """Draw patches of fields, of the header and of anything."""
        made = b""
        for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
            kind = draw.randrange(10)
            if kind == 0:
                at, data = draw.randrange(layout.HEADER_SIZE), draw.randbytes(draw.randrange(1, 9))
            elif kind == 1:
                settings = self._sections["settings"]
                at, data = settings.offset + draw.randrange(settings.size), draw.choice(CHUNKS)[:200]
            else:
                at, data = self._field(draw)
            made += PATCH.pack(at, len(data)) + data
        return made

    def _field(self, draw: Random) -> tuple[int, bytes]:
        name = draw.choice(list(SECTION_TYPES)) if draw.random() < 0.6 else draw.choice(("state", "live", "requests"))
        section = self._sections[name]
        dtype: Any = SECTION_TYPES[name]
        row = draw.randrange(min(section.rows, 10)) if section.rows else 0
        at = section.offset + row * section.row_size
        if dtype.fields is not None:
            field = draw.choice(list(dtype.fields))
            dtype, offset = dtype.fields[field][:2]
            at += offset
        if dtype.subdtype is not None:
            at += draw.randrange(int(np.prod(dtype.shape))) * dtype.base.itemsize
            dtype = dtype.base
            if dtype.fields is not None:
                dtype = dtype.fields[draw.choice(list(dtype.fields))][0]
        if dtype.kind == "f":
            return at, struct.pack("<d", draw.choice(FLOATS))
        if dtype.kind in "iu":
            return at, (draw.choice(WHOLES) % 2 ** (8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little")
        return at, draw.randbytes(min(dtype.itemsize, 16))

    def _write(self, at: int, data: bytes) -> None:
        os.pwrite(self._descriptor, data, at)
        self._patched.append((at, len(data)))

    def _restore(self) -> None:
        for at, size in self._patched:
            os.pwrite(self._descriptor, self._base[at : at + size], at)
        self._patched.clear()

    async def put(self, data: bytes) -> None:
        """Patch the file, and let a sidecar read it; another one after some inputs."""
        self._restore()
        now_ns = time.monotonic_ns()
        state = self._sections["state"].offset
        self._write(state + WRITTEN_AT, now_ns.to_bytes(8, "little"))
        self._sequence += 2
        for at in (layout.SEQUENCE_AT, state + SEQUENCE_AT):
            self._write(at, self._sequence.to_bytes(8, "little"))
        place = 0
        while place + PATCH.size <= len(data):
            at, size = PATCH.unpack_from(data, place)
            place += PATCH.size
            if at < len(self._base):
                self._write(at, data[place : place + min(size, len(self._base) - at)])
            place += size
        self._num += 1
        if self._num % 20 == 0:
            self.close()
        if self._engine is None:
            self._engine = ExportedEngine(str(self._path), self._profile, DEFAULT_RESIDUAL, 30.0)
            self._engine._reader._patience_s = 0.0  # noqa: SLF001 - nothing else writes
        with suppress(DownError):
            self._forecast(self._engine)
        with suppress(DownError, ValueError):
            self._engine.snapshot()

    def _forecast(self, engine: ExportedEngine) -> None:
        view = engine.refresh()
        engine.take_shown()
        engine.take_ended()
        with suppress(ValueError):
            (forecast,) = view.forecaster.forecast([CANDIDATE], view.arrival_s, delays=True, serial=view.serial)
            require(forecast.ttft_s >= 0 and forecast.e2e_s >= forecast.ttft_s, "a forecast that is no time")

    def close(self) -> None:
        """Close the reader."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    async def audit(self) -> None:
        """Read the valid file."""
        self.close()
        await self.put(b"")
        if self._engine is not None:
            self._engine.refresh()


@asynccontextmanager
async def open_state_file(folder: Path) -> AsyncIterator[StateFileTarget]:
    """Read state files of engines."""
    target = StateFileTarget(folder / "one.state")
    try:
        yield target
    finally:
        target.close()
