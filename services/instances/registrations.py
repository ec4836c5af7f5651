"""Instances that are registered by HTTP, and orders to drain: values, and the file that keeps them.

The file is JSON: `version` 1, `instances` (the fields of an instances file, and `ttl_s` with `expires_unix_s`), and
`drains` by instance id. Processes that name the same file share what it says.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from predictor.suggestions import require_known
from services.instances.drains import MAX_DRAIN_S, Drain
from services.instances.instance import Instance, instance_from_table, table_of
from services.logs import log_event

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 1
MAX_TTL_S = 86400.0
DEFAULT_DEADLINE_S = 60.0
LOCK_S, LOCK_PAUSE_S = 2.0, 0.01  # that a change waits for other processes
MAX_FILE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An instance that was registered; with a `ttl_s`, it is forgotten unless it is registered again in time."""

    instance: Instance
    ttl_s: float | None = None
    expires_unix_s: float = math.inf

    def __post_init__(self) -> None:
        """Check the time; ValueError names the field."""
        require_time("ttl_s", self.ttl_s, MAX_TTL_S)

    @classmethod
    def from_table(cls, table: Any, now_unix_s: float) -> Registration:
        """Read what a caller sends: the fields of an instance, and `ttl_s`."""
        if not isinstance(table, Mapping):
            raise ValueError("body: must be an object with instance_id, engine_url and sidecar_address")
        ttl_s = table.get("ttl_s")
        require_time("ttl_s", ttl_s, MAX_TTL_S)
        instance = instance_from_table({name: value for name, value in table.items() if name != "ttl_s"})
        return cls(
            instance=instance, ttl_s=ttl_s, expires_unix_s=math.inf if ttl_s is None else now_unix_s + float(ttl_s)
        )

    def table(self) -> dict[str, Any]:
        """Write it for the file."""
        expiry = {} if self.ttl_s is None else {"ttl_s": self.ttl_s, "expires_unix_s": self.expires_unix_s}
        return {**table_of(self.instance), **expiry}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder:
    """What an operator asked for: the requests of an instance leave after `deadline_s`, and end after `force_after_s`.

    Both count from `since_unix_s`.
    """

    deadline_s: float = DEFAULT_DEADLINE_S
    migrate: bool = True
    force_after_s: float | None = None
    since_unix_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the values; ValueError names the field."""
        if self.deadline_s is None:
            raise ValueError("deadline_s: must be a number")
        require_time("deadline_s", self.deadline_s, MAX_DRAIN_S, from_zero=True)
        require_time("force_after_s", self.force_after_s, MAX_DRAIN_S, from_zero=True)
        if not isinstance(self.migrate, bool):
            raise ValueError(f"migrate: must be true or false, not {self.migrate!r:.40}")
        if self.force_after_s is not None and self.force_after_s < self.deadline_s:
            raise ValueError("force_after_s: must not be below deadline_s")

    @classmethod
    def from_table(cls, table: Any, now_unix_s: float) -> DrainOrder:
        """Read what a caller sends."""
        if not isinstance(table, Mapping):
            raise ValueError("body: must be an object with deadline_s, migrate and force_after_s, each optional")
        require_known(table, ("deadline_s", "migrate", "force_after_s"), "field")
        return cls(**table, since_unix_s=now_unix_s)

    def asks_for_the_same(self, other: DrainOrder) -> bool:
        """Return whether two orders differ only in when they were given."""
        return (self.deadline_s, self.migrate, self.force_after_s) == (
            other.deadline_s, other.migrate, other.force_after_s,
        )  # fmt: skip

    def drain(self) -> Drain:
        """Return the times."""
        force_s = math.inf if self.force_after_s is None else self.since_unix_s + self.force_after_s
        return Drain(deadline_unix_s=self.since_unix_s + self.deadline_s, migrate=self.migrate, force_unix_s=force_s)

    def table(self) -> dict[str, Any]:
        """Write it for the file."""
        return {
            "deadline_s": self.deadline_s,
            "migrate": self.migrate,
            "force_after_s": self.force_after_s,
            "since_unix_s": self.since_unix_s,
        }


def require_time(name: str, value: Any, maximum: float, *, from_zero: bool = False) -> None:
    """Raise ValueError for a time that is out of range; None is no time."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= maximum or (value == 0 and not from_zero):
        lowest = "from 0" if from_zero else "above 0"
        raise ValueError(f"{name}: must be a time {lowest} to {maximum:g}, not {value!r:.40}")


@dataclass(slots=True)
class Registrations:
    """All registered instances and all orders to drain, by instance id."""

    instances: dict[str, Registration] = field(default_factory=dict)
    drains: dict[str, DrainOrder] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Registrations:
        """Read the text of a file; ValueError names the field."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise ValueError(f"version: must be {VERSION}")
        found = cls()
        tables, orders = data.get("instances", []), data.get("drains", {})
        if not isinstance(tables, list) or not isinstance(orders, dict):
            raise ValueError("instances: must be a list, and drains an object")
        for place, table in enumerate(tables):
            try:
                expires_s = table.get("expires_unix_s", math.inf) if isinstance(table, dict) else math.inf
                require_time("expires_unix_s", expires_s, math.inf)
                given = {name: value for name, value in dict(table).items() if name != "expires_unix_s"}
                one = Registration.from_table(given, 0.0)
            except (ValueError, TypeError) as error:
                raise ValueError(f"instances[{place}].{error}") from None
            found.instances[one.instance.instance_id] = Registration(
                instance=one.instance, ttl_s=one.ttl_s, expires_unix_s=expires_s
            )
        for name, table in orders.items():
            try:
                found.drains[name] = DrainOrder(**table)
                found.drains[name].drain()  # whose times are checked, too
            except (ValueError, TypeError) as error:
                raise ValueError(f"drains.{name}: {error}") from None
        return found

    def json(self) -> str:
        """Write the text of a file."""
        return json.dumps(
            {
                "version": VERSION,
                "instances": [one.table() for one in self.instances.values()],
                "drains": {name: order.table() for name, order in self.drains.items()},
            },
            indent=1,
        )

    def expire(self, now_unix_s: float) -> list[str]:
        """Forget the instances whose time is over, and return their ids."""
        over = [name for name, one in self.instances.items() if one.expires_unix_s <= now_unix_s]
        for name in over:
            del self.instances[name]
            self.drains.pop(name, None)
        return over


class RegistrationFile:
    """Keeps registrations on the disk; each change is there before it takes effect. Calls block."""

    def __init__(self, path: str) -> None:
        """Read nothing yet."""
        self.path = Path(path)
        self._seen: tuple[int, int, int] | None = None
        self._last = Registrations()

    def read(self) -> Registrations | None:
        """Read the file where it changed; a damaged one counts as empty, which is logged."""
        try:
            status = self.path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen == self._seen:
                return None
            self._seen = seen
            if status.st_size > MAX_FILE_BYTES:
                raise ValueError(f"has {status.st_size} bytes, more than {MAX_FILE_BYTES}")
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if self._seen == (0, 0, 0):
                return None
            self._seen, text = (0, 0, 0), Registrations().json()
        except (OSError, ValueError) as error:
            return self._damaged(error)
        try:
            self._last = Registrations.from_json(text)
        except ValueError as error:
            return self._damaged(error)
        return self._last

    def _damaged(self, error: Exception) -> Registrations:
        log_event(
            log, logging.ERROR, "registered instances cannot be read, continuing without them", file=str(self.path),
            reason=" ".join(str(error).split()),
        )  # fmt: skip
        self._last = Registrations()
        return self._last

    def change(self, make: Callable[[Registrations], T]) -> tuple[T, Registrations]:
        """Apply a change to what the file says now, and write it; OSError where that fails, and nothing changes."""
        with self._locked():
            now = self.read() or self._last
            changed = Registrations(dict(now.instances), dict(now.drains))
            result = make(changed)
            if changed != now:
                self._write(changed.json())
                status = self.path.stat()
                self._seen, self._last = (status.st_mtime_ns, status.st_size, status.st_ino), changed
            return result, self._last

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(f"{self.path.name}.lock").open("w") as lock:
            until_s = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise TimeoutError(f"{self.path} is locked by another process") from None
                    time.sleep(LOCK_PAUSE_S)
            yield

    def _write(self, text: str) -> None:
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self.path)
