"""The instances that there are, and what they do: on the disk, and told to schedulers by a file that they watch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

STARTING, READY, DRAINING = "starting", "ready", "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance; where it is may not be known before it is ready."""

    instance_id: str
    state: str = STARTING
    action_id: str = ""  # that brought it
    asked_unix_s: float = 0.0
    since_unix_s: float = 0.0  # in this state
    engine_url: str = ""
    sidecar_address: str = ""
    models: tuple[str, ...] = ()

    @property
    def has_address(self) -> bool:
        """Tell whether it can be asked."""
        return bool(self.engine_url and self.sidecar_address)


class Roster:
    """Who is there. Each change is on the disk before it is told."""

    def __init__(self, path: Path, instances_file: Path) -> None:
        """Read who was there."""
        self._path, self._instances_file = path, instances_file
        self._members: dict[str, Member] = {}
        if path.exists():
            for table in json.loads(path.read_text(encoding="utf-8")):
                member = Member(**{**table, "models": tuple(table.get("models", ()))})
                self._members[member.instance_id] = member

    def __iter__(self) -> Iterator[Member]:
        """Go through all, by name."""
        return iter([self._members[name] for name in sorted(self._members)])

    def named(self, instance_id: str) -> Member | None:
        """Find one."""
        return self._members.get(instance_id)

    def those(self, *states: str) -> list[Member]:
        """Find those in some states, by name."""
        return [member for member in self if member.state in states]

    def put(self, *members: Member) -> None:
        """Add or change some."""
        self._members.update({member.instance_id: member for member in members})
        self._write()

    def change(self, instance_id: str, at_unix_s: float, **changes: object) -> None:
        """Change one, and note when its state did."""
        member = self._members[instance_id]
        if changes.get("state", member.state) != member.state:
            changes["since_unix_s"] = at_unix_s
        self.put(replace(member, **changes))  # type: ignore[arg-type]

    def drop(self, *instance_ids: str) -> None:
        """Forget some."""
        for name in instance_ids:
            self._members.pop(name, None)
        self._write()

    def _write(self) -> None:
        _replace(self._path, json.dumps([asdict(member) for member in self]))
        shown = [
            {
                "instance_id": member.instance_id,
                "engine_url": member.engine_url,
                "sidecar_address": member.sidecar_address,
                "models": list(member.models),
                "state": member.state,
            }
            for member in self
            if member.state in (READY, DRAINING) and member.has_address
        ]
        _replace(self._instances_file, json.dumps({"instances": shown}))


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is there whole, or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
