"""Draining: until when the requests of an instance may stay there, as a value and on the wire."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protos.block.v1 import common_pb2

MAX_DRAIN_S = 7 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """When the requests of an instance that drains have to leave; infinite times never come.

    At the deadline requests move to other instances, unless they stay (`migrate` is False) or cannot continue
    elsewhere. From `force_unix_s` on, those that are left are ended.
    """

    deadline_unix_s: float = math.inf
    migrate: bool = True
    force_unix_s: float = math.inf

    def __post_init__(self) -> None:
        """Check the values; ValueError names the field."""
        for name in ("deadline_unix_s", "force_unix_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"drain.{name}: must be a time above 0, not {value!r:.40}")
        if not isinstance(self.migrate, bool):
            raise ValueError(f"drain.migrate: must be true or false, not {self.migrate!r:.40}")
        if self.force_unix_s < self.deadline_unix_s < math.inf:
            raise ValueError("drain.force_unix_s: must not be before the deadline")

    def shifted(self, by_s: float) -> Drain:
        """Return the same drain by another clock."""
        return Drain(
            deadline_unix_s=self.deadline_unix_s + by_s, migrate=self.migrate, force_unix_s=self.force_unix_s + by_s
        )

    def is_close_to(self, other: Drain, within_s: float) -> bool:
        """Return whether two drains differ by little time only."""
        times = ((self.deadline_unix_s, other.deadline_unix_s), (self.force_unix_s, other.force_unix_s))
        return self.migrate == other.migrate and all(one == two or abs(one - two) <= within_s for one, two in times)

    def message(self) -> common_pb2.Drain:
        """Convert to the wire form."""
        return common_pb2.Drain(
            deadline_unix_s=self.deadline_unix_s if self.deadline_unix_s < math.inf else None,
            stays=not self.migrate,
            force_unix_s=self.force_unix_s if self.force_unix_s < math.inf else None,
        )

    def table(self) -> dict[str, float | bool]:
        """Convert to a table of TOML or JSON; times that never come are left out."""
        times = {"deadline_unix_s": self.deadline_unix_s, "force_unix_s": self.force_unix_s}
        return {**{name: value for name, value in times.items() if value < math.inf}, "migrate": self.migrate}


NEVER = Drain()  # a drain without a deadline: all requests stay to their end
FIELDS = ("deadline_unix_s", "migrate", "force_unix_s")


def drain_from_table(table: object) -> Drain:
    """Read a drain from a table of TOML or JSON; ValueError names the field."""
    if not isinstance(table, Mapping):
        raise ValueError("drain: must be a table")
    for name in table:
        if name not in FIELDS:
            raise ValueError(f"drain.{name}: is no known field; there are {', '.join(FIELDS)}")
    return Drain(**table)


def drain_from_message(message: common_pb2.Drain) -> Drain:
    """Read a drain from the wire; what is malformed never comes."""
    times = {name: getattr(message, name) for name in ("deadline_unix_s", "force_unix_s") if message.HasField(name)}
    try:
        return Drain(migrate=not message.stays, **times)
    except ValueError:
        return NEVER


def drains_in(instances: Iterable[common_pb2.Instance]) -> dict[str, Drain]:
    """Return the drains of those among some instances that drain, by instance id."""
    return {
        one.instance_id: drain_from_message(one.drain) if one.HasField("drain") else NEVER
        for one in instances
        if one.state == common_pb2.INSTANCE_STATE_DRAINING
    }
