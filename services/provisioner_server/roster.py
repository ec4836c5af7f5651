"""The instances of the pool and their states: on the disk, and in a file that schedulers watch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scheduler.instances import BOTH, PREFILL_ROLE, role_named
from simulator.codec import checked, read_json

STARTING, READY, DRAINING = "starting", "ready", "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance; its address may be unknown until it is ready."""

    instance_id: str
    state: str = STARTING
    action_id: str = ""  # that started it
    asked_unix_s: float = 0.0
    since_unix_s: float = 0.0  # in this state
    engine_url: str = ""
    sidecar_address: str = ""
    models: tuple[str, ...] = ()
    role: str = BOTH  # or decode
    tier: str = ""  # empty: the best-effort pool
    tier_tpot_s: float = 0.0  # the bound of its tier; 0 without one
    tier_closed: bool = False
    drain: Mapping[str, float | bool] = field(default_factory=dict)  # while it drains: when its requests leave

    @property
    def has_address(self) -> bool:
        """Tell whether it can be called."""
        return bool(self.engine_url and self.sidecar_address)


def role_in_roster(text: str) -> str:
    """Return the role that a hook reports; ValueError for prefill, as no rule knows how many of these are needed."""
    role = role_named(text or BOTH)
    if role == PREFILL_ROLE:
        raise ValueError(
            "role: a provisioner runs no prefill instances; start them without it, and register them with the "
            "schedulers (block instances add --role prefill)"
        )
    return role


class Roster:
    """The instances by name; each change is on the disk before it takes effect."""

    def __init__(self, path: Path, instances_file: Path) -> None:
        """Read the instances of the last leader."""
        self._path, self._instances_file = path, instances_file
        self._members: dict[str, Member] = {}
        if path.exists():
            try:
                members = checked(list[Member], read_json(str(path)))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            self._members = {member.instance_id: member for member in members}

    def __iter__(self) -> Iterator[Member]:
        """Iterate over all, by name."""
        return iter([self._members[name] for name in sorted(self._members)])

    def find(self, instance_id: str) -> Member | None:
        """Find an instance."""
        return self._members.get(instance_id)

    def in_state(self, *states: str) -> list[Member]:
        """Return those in any of the states, by name."""
        return [member for member in self if member.state in states]

    def put(self, *members: Member) -> None:
        """Add or replace instances."""
        self._members.update({member.instance_id: member for member in members})
        self._write()

    def change(self, instance_id: str, at_unix_s: float, **changes: object) -> None:
        """Change an instance, and note when its state changed."""
        member = self._members[instance_id]
        if changes.get("state", member.state) != member.state:
            changes["since_unix_s"] = at_unix_s
        self.put(replace(member, **changes))  # type: ignore[arg-type]

    def place(self, places: Mapping[str, tuple[str, float, bool]]) -> None:
        """Set the tiers of some instances, by name: the tier, its bound, and whether they are closed."""
        known = {name: place for name, place in places.items() if name in self._members}
        self.put(
            *(
                replace(self._members[name], tier=tier, tier_tpot_s=tpot_slo_s, tier_closed=closed)
                for name, (tier, tpot_slo_s, closed) in known.items()
            )
        )

    def drop(self, *instance_ids: str) -> None:
        """Remove instances."""
        for name in instance_ids:
            self._members.pop(name, None)
        self._write()

    def _write(self) -> None:
        _replace(self._path, json.dumps([asdict(member) for member in self]))
        listed = [_listed(member) for member in self if member.state in (READY, DRAINING) and member.has_address]
        _replace(self._instances_file, json.dumps({"instances": listed}))


def _listed(member: Member) -> dict[str, object]:
    """Return an instance as schedulers read it."""
    table: dict[str, object] = {
        "instance_id": member.instance_id,
        "engine_url": member.engine_url,
        "sidecar_address": member.sidecar_address,
        "models": list(member.models),
        "state": member.state,
    }
    if member.role != BOTH:
        table |= {"role": member.role}
    if member.tier:
        table |= {"tier": member.tier, "tier_tpot_s": member.tier_tpot_s}
    if member.state == DRAINING and member.drain:
        table |= {"drain": dict(member.drain)}
    if member.tier_closed:
        table |= {"tier_closed": True}
    return table


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
