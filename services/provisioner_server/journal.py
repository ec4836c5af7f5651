"""The journal of actions: each is on the disk, with its reason and numbers, before it is carried out.

A file of JSON lines, each the new state of an action. A new leader continues from it. Moves between tiers can be many:
old ones that have ended are dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from protos.block.v1 import provisioner_pb2 as pb
from services.rpc.json_form import message_from

OPEN = (pb.ACTION_STATE_WRITTEN, pb.ACTION_STATE_CALLED)
MAX_LINES = 10_000  # after which moves are dropped; and again after half as many
KEPT_MOVES = 1_000  # the latest of those that have ended


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The state of an action from a moment on."""

    at_unix_s: float
    action: pb.Action


class Journal:
    """A file to which lines are appended; an incomplete last line, left by a crash, is removed."""

    def __init__(self, path: Path) -> None:
        """Read the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._num_complete_bytes = 0
        self._latest: dict[str, pb.Action] = {}
        self._last_number = 0  # of an action
        self._num_lines, self._max_lines = 0, MAX_LINES
        for entry, end in _read(path):
            self._note(entry.action)
            self._num_complete_bytes = end
        if path.exists() and path.stat().st_size > self._num_complete_bytes:
            os.truncate(path, self._num_complete_bytes)

    def next_id(self, pool: str) -> str:
        """Return the id of the next action."""
        return f"{pool}-{self._last_number + 1}"

    def _note(self, action: pb.Action) -> None:
        self._latest[action.action_id] = action
        self._num_lines += 1
        number = action.action_id.rpartition("-")[2]
        if number.isdigit():
            self._last_number = max(self._last_number, int(number))

    def write(self, action: pb.Action, at_unix_s: float) -> None:
        """Write the present state of an action to the disk."""
        is_new = not self._path.exists()
        with self._path.open("ab") as file:
            file.write(_line(action, at_unix_s))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self._path.parent)
        kept = pb.Action()
        kept.CopyFrom(action)
        self._note(kept)
        if self._num_lines >= self._max_lines:
            self._drop_old_moves()

    def _drop_old_moves(self) -> None:
        """Replace the file by one without old moves; a crash leaves one of the two."""
        ended = [
            name for name, one in self._latest.items() if one.kind == pb.ACTION_KIND_MOVE and one.state not in OPEN
        ]
        dropped = set(ended[:-KEPT_MOVES])
        fresh = self._path.with_name(f"{self._path.name}.new")
        with fresh.open("wb") as file:
            kept = [entry for entry in entries(self._path) if entry.action.action_id not in dropped]
            file.writelines(_line(entry.action, entry.at_unix_s) for entry in kept)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)
        _sync_folder(self._path.parent)
        self._latest = {name: one for name, one in self._latest.items() if name not in dropped}
        self._num_lines = len(kept)
        self._max_lines = max(MAX_LINES, self._num_lines + MAX_LINES // 2)

    def under_way(self) -> list[pb.Action]:
        """Return the actions that have not ended."""
        return [action for action in self._latest.values() if action.state in OPEN]

    def known(self, action_id: str) -> pb.Action | None:
        """Find an action."""
        return self._latest.get(action_id)


def entries(path: Path) -> list[JournalEntry]:
    """Read a journal that any process writes."""
    return [entry for entry, _ in _read(path)]


def as_plain(action: pb.Action) -> dict[str, object]:
    """Convert an action to JSON's types, with names as on the wire."""
    return MessageToDict(action, preserving_proto_field_name=True)


def _line(action: pb.Action, at_unix_s: float) -> bytes:
    return (json.dumps({"at_unix_s": at_unix_s, "action": as_plain(action)}) + "\n").encode()


def _read(path: Path) -> Iterator[tuple[JournalEntry, int]]:
    """Read the complete lines, each with the offset of its end."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for place, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                data = json.loads(line)
                entry = JournalEntry(float(data["at_unix_s"]), message_from(data["action"], pb.Action()))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                raise ValueError(f"{path}: line {place}: is not an action") from None
            end += len(line)
            yield entry, end


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
