"""Records decisions and outcomes as JSON lines, to explain them later or to replay them in the simulator.

A line is one of these, with the messages of protos/block/v1/common.proto:

    {"event": "decision", "request": Request, "decision": Decision}
    {"event": "outcome", "outcome": Outcome}

Prompts are not recorded. Requests are sampled by their ids, so that several schedulers record the same ones, and each
decision has its outcome. At half of the maximum size the file is renamed to FILE.1 and a new one is started. A line
that was cut off, by a full disk or a crash, is removed before the next one is written.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import queue
import threading
import zlib
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from protos.block.v1 import common_pb2
from scheduler.placement import Placement
from services.logs import log_event
from services.placement.listeners import PlacementListener
from services.placement.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

MAX_PENDING = 8192  # lines that are not written yet; further ones are dropped and counted
ALL = 1 << 32
CHUNK_BYTES = 1 << 16


class DecisionRecorder(PlacementListener):
    """Writes in its own thread, so that no decision waits for the disk."""

    def __init__(self, path: str, *, share: float, max_bytes: int, metrics: SchedulerMetrics) -> None:
        """Open the file to append; ValueError if it cannot be written."""
        self._path = Path(path)
        self._below = round(share * ALL)
        self._max_bytes = max_bytes
        self._lines = metrics.recorded
        self._waiting: queue.Queue[dict[str, Message] | None] = queue.Queue(MAX_PENDING)
        self._has_failed = False
        self._file = self._opened()
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def on_placement(self, request: common_pb2.Request, placement: Placement, message: common_pb2.Decision) -> None:
        """Record a decision."""
        del placement
        if self._is_sampled(request.request_id):
            self._put({"request": request, "decision": message})

    def on_outcome(self, outcome: common_pb2.Outcome) -> None:
        """Record an outcome."""
        if self._is_sampled(outcome.request_id):
            self._put({"outcome": outcome})

    def close(self) -> None:
        """Write the remaining lines, and close the file."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _is_sampled(self, request_id: str) -> bool:
        return zlib.crc32(request_id.encode()) < self._below

    def _put(self, line: dict[str, Message]) -> None:
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lines.labels("lost").inc()

    def _opened(self) -> io.FileIO:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = io.FileIO(self._path, "ab+")
        except OSError as error:
            raise ValueError(f"record: {self._path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ValueError(f"record: {self._path} is being written by another scheduler") from None
        try:
            _remove_cut_line(file)
        except OSError as error:
            file.close()
            raise ValueError(f"record: {self._path} cannot be written: {error.strerror}") from None
        return file

    def _write_all(self) -> None:
        while (line := self._waiting.get()) is not None:
            event = "outcome" if "outcome" in line else "decision"
            parts = {name: MessageToDict(part, preserving_proto_field_name=True) for name, part in line.items()}
            try:
                self._write(json.dumps({"event": event, **parts}, separators=(",", ":")).encode() + b"\n")
            except (OSError, ValueError) as error:
                self._lines.labels("lost").inc()
                if not self._has_failed:
                    log_event(log, logging.ERROR, "recording failed", file=str(self._path), reason=str(error))
                self._has_failed = True
            else:
                self._lines.labels("written").inc()
                self._has_failed = False

    def _write(self, line: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        if size and size + len(line) > self._max_bytes // 2:
            self._path.replace(f"{self._path}.1")
            self._file.close()
            self._file = self._opened()
            size = 0
        if self._file.write(line) != len(line):
            self._file.truncate(size)
            raise OSError("the disk is full")


def _remove_cut_line(file: io.FileIO) -> None:
    """Truncate a file to its last complete line."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - CHUNK_BYTES)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end < size:
        file.truncate(end)
