"""The journal of actions: each is on the disk, with its reason and numbers, before it is carried out.

A file of JSON lines, each the new state of an action. A new leader continues from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from protos.block.v1 import provisioner_pb2 as pb

OPEN = (pb.ACTION_STATE_WRITTEN, pb.ACTION_STATE_CALLED)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The state of an action from a moment on."""

    at_unix_s: float
    action: pb.Action


class Journal:
    """An append-only file; an incomplete last line, left by a crash, is removed."""

    def __init__(self, path: Path) -> None:
        """Read the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._num_complete_bytes = 0
        self._latest: dict[str, pb.Action] = {}
        for entry, end in _read(path):
            self._latest[entry.action.action_id] = entry.action
            self._num_complete_bytes = end
        if path.exists() and path.stat().st_size > self._num_complete_bytes:
            os.truncate(path, self._num_complete_bytes)

    def next_id(self, pool: str) -> str:
        """Return the id of the next action."""
        return f"{pool}-{len(self._latest) + 1}"

    def write(self, action: pb.Action, at_unix_s: float) -> None:
        """Write the present state of an action to the disk."""
        line = json.dumps({"at_unix_s": at_unix_s, "action": as_plain(action)}) + "\n"
        is_new = not self._path.exists()
        with self._path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self._path.parent)
        kept = pb.Action()
        kept.CopyFrom(action)
        self._latest[action.action_id] = kept

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
                entry = JournalEntry(
                    float(data["at_unix_s"]), ParseDict(data["action"], pb.Action(), ignore_unknown_fields=True)
                )
            except (ValueError, KeyError, TypeError, ParseError):
                raise ValueError(f"{path}: line {place}: is not an action") from None
            end += len(line)
            yield entry, end


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
