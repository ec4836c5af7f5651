"""A list of instances, with those that are registered by HTTP, and with the instances that an operator drains."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from scheduler.objectives import Objectives
from services.instances.instance import DRAINING, Instance, Instances, distinct
from services.instances.registrations import DrainOrder, Registration, RegistrationFile, Registrations
from services.instances.settings import BY_HTTP
from services.instances.sources import InstanceSource
from services.logs import log_event
from services.rpc.errors import BusyError, UnknownNameError

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REGISTERED = 1024
GONE_S = 600.0  # after which an order to drain is forgotten whose instance is in no list
NEW, SAME, CHANGED = "registered", "registered again", "replaced"


class ConflictError(Exception):
    """The change contradicts what is registered or listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownInstance:
    """An instance, which list it is from, and the order to drain it, if one was given."""

    instance: Instance
    source: str
    registration: Registration | None = None
    order: DrainOrder | None = None


class RegisteredInstances(InstanceSource):
    """Adds to another source; an instance that the source lists has precedence over a registered one of its id.

    Each change is passed to `changed` at once. With a file, changes are kept there, and those that others make to the
    file are followed.
    """

    may_come_later = True

    def __init__(
        self,
        listed: InstanceSource,
        path: str = "",
        *,
        changed: Callable[[Instances], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read nothing yet."""
        self.changed = changed
        self._source = listed
        self.kind = listed.kind
        self.may_come_later = listed.may_come_later
        self._file = RegistrationFile(path) if path else None
        self._clock = clock
        self._listed: Instances = ()
        self._has_listed = False
        self._registered = Registrations()
        self._reported: Instances | None = None
        self._gone_since: dict[str, float] = {}  # drained instances that are in no list
        self._shadowed: set[str] = set()
        self._one_change = asyncio.Lock()

    # As a source.

    async def poll(self) -> Instances | None:
        """Return the list where it changed; a change of the file or an expiry counts also while the source fails."""
        if self._file is not None:
            async with self._one_change:
                read = await asyncio.to_thread(self._file.read)
                self._registered = self._registered if read is None else read
        await self._forget()
        try:
            listed = await self._source.poll()
        except ValueError:
            if self._has_listed or self._registered.instances:
                self._report()
            raise
        if listed is not None:
            self._listed, self._has_listed = listed, True
        now = self._merged()
        if now == self._reported:
            return None
        self._reported = now
        return now

    async def wait(self, every_s: float) -> None:
        """Wait for the source, and at most for the interval where a file or an expiry has to be noticed."""
        if self._file is None and not (self._registered.instances or self._registered.drains):
            await self._source.wait(every_s)
            return
        try:
            async with asyncio.timeout(every_s):
                await self._source.wait(every_s)
        except TimeoutError:
            pass

    def problem(self) -> str:
        """Return the problem of the source, unless instances are registered."""
        return "" if self._registered.instances else self._source.problem()

    def objectives(self) -> Objectives:
        """Return those of the source."""
        return self._source.objectives()

    async def close(self) -> None:
        """Stop following the source."""
        await self._source.close()

    def _merged(self) -> Instances:
        known = {one.instance_id: one for one in self._listed}
        shadowed = known.keys() & self._registered.instances.keys()
        for name in shadowed - self._shadowed:
            log_event(log, logging.WARNING, "registered instance is listed as well, the list counts", instance=name)
        self._shadowed = set(shadowed)
        for name, one in self._registered.instances.items():
            known.setdefault(name, one.instance)
        for name, order in self._registered.drains.items():
            if name in known:
                known[name] = replace(known[name], state=DRAINING, drain=order.drain())
        return tuple(known.values())

    def _report(self) -> None:
        """Pass the list on, where it changed."""
        now = self._merged()
        if now != self._reported:
            self._reported = now
            self.changed(now)

    async def _forget(self) -> None:
        """Forget registrations that expired, and orders whose instances have been gone for long."""
        now_s = self._clock()
        listed = {one.instance_id for one in self._listed}
        present = listed | self._registered.instances.keys()
        gone = [name for name in self._registered.drains if name not in present] if self._has_listed else []
        self._gone_since = {name: self._gone_since.get(name, now_s) for name in gone}
        long_gone = [name for name, since_s in self._gone_since.items() if now_s - since_s > GONE_S]
        if not long_gone and all(one.expires_unix_s > now_s for one in self._registered.instances.values()):
            return

        def change(registered: Registrations) -> list[str]:
            for name in long_gone:
                registered.drains.pop(name, None)
            return registered.expire(now_s)

        try:
            expired = await self._change(change)
        except OSError as error:
            log_event(log, logging.WARNING, "registered instances cannot be written", reason=str(error))
            expired = self._registered.expire(now_s)
        for name in expired:
            log_event(log, logging.WARNING, "instance expired, it was not registered again in time", instance=name)

    async def _change(self, make: Callable[[Registrations], T]) -> T:
        async with self._one_change:
            if self._file is None:
                changed = Registrations(dict(self._registered.instances), dict(self._registered.drains))
                result = make(changed)
                self._registered = changed
            else:
                result, self._registered = await asyncio.to_thread(self._file.change, make)
        return result

    # For operators.

    def known(self) -> list[KnownInstance]:
        """Return all instances, by id."""
        listed = {one.instance_id for one in self._listed}
        return [
            KnownInstance(
                instance=one,
                source=self.kind if one.instance_id in listed else BY_HTTP,
                registration=self._registered.instances.get(one.instance_id),
                order=self._registered.drains.get(one.instance_id),
            )
            for one in sorted(self._merged(), key=lambda one: one.instance_id)
        ]

    def find(self, instance_id: str) -> KnownInstance | None:
        """Return an instance."""
        return next((one for one in self.known() if one.instance.instance_id == instance_id), None)

    async def register(self, registration: Registration, *, replaces: bool = False) -> str:
        """Add an instance, or renew it; ConflictError where its id has other facts, and it is not to be replaced."""
        name = registration.instance.instance_id
        self._require_unlisted(name)
        self._require_consistent(registration.instance)

        def change(registered: Registrations) -> str:
            before = registered.instances.get(name)
            if before is None and len(registered.instances) >= MAX_REGISTERED:
                raise BusyError(f"instances: {MAX_REGISTERED} are registered, which is the limit")
            is_other = before is not None and before.instance != registration.instance
            if is_other and not replaces:
                raise ConflictError(
                    f"instance_id: {name!r} is registered with other facts; replace them with PUT or ?replace=true"
                )
            registered.instances[name] = registration
            return NEW if before is None else CHANGED if is_other else SAME

        result = await self._change(change)
        self._report()
        level = logging.DEBUG if result == SAME else logging.INFO
        log_event(log, level, f"instance {result}", instance=name, ttl_s=registration.ttl_s)
        return result

    def _require_consistent(self, instance: Instance) -> None:
        """Raise ValueError for a data-parallel rank or a bound of a tier that contradicts another instance."""
        others = (one for one in self._merged() if one.instance_id != instance.instance_id)
        try:
            distinct([*others, instance])
        except ValueError as error:
            raise ValueError(str(error).partition("].")[2]) from None

    async def remove(self, instance_id: str) -> bool:
        """Remove a registered instance; return False where it is not known."""
        self._require_unlisted(instance_id)

        def change(registered: Registrations) -> bool:
            registered.drains.pop(instance_id, None)
            return registered.instances.pop(instance_id, None) is not None

        was_known = await self._change(change)
        self._report()
        if was_known:
            log_event(log, logging.INFO, "instance removed", instance=instance_id)
        return was_known

    async def drain(self, instance_id: str, order: DrainOrder) -> DrainOrder:
        """Drain an instance of any source; the same order again changes nothing, and keeps its times."""
        if self.find(instance_id) is None:
            raise UnknownNameError(f"instance_id: there is no instance {instance_id!r}")

        def change(registered: Registrations) -> DrainOrder:
            before = registered.drains.get(instance_id)
            if before is None or not before.asks_for_the_same(order):
                registered.drains[instance_id] = order
            return registered.drains[instance_id]

        before = self._registered.drains.get(instance_id)
        now = await self._change(change)
        self._report()
        if now != before:
            log_event(
                log, logging.INFO, "instance drains", instance=instance_id, deadline_s=now.deadline_s,
                migrate=now.migrate, force_after_s=now.force_after_s,
            )  # fmt: skip
        return now

    async def undrain(self, instance_id: str) -> None:
        """Take requests again; ConflictError where the source itself says that the instance drains."""
        known = self.find(instance_id)
        if known is None:
            raise UnknownNameError(f"instance_id: there is no instance {instance_id!r}")
        listed = next((one for one in self._listed if one.instance_id == instance_id), None)
        if listed is not None and listed.state == DRAINING:
            raise ConflictError(f"instance_id: {instance_id!r} drains by the {self.kind} that lists it")
        await self._change(lambda registered: registered.drains.pop(instance_id, None))
        self._report()
        if known.order is not None:
            log_event(log, logging.INFO, "instance drains no longer", instance=instance_id)

    def expires_in_s(self, known: KnownInstance) -> float | None:
        """Return the time until a registration expires; None where it does not."""
        registration = known.registration
        if registration is None or registration.expires_unix_s == math.inf:
            return None
        return max(0.0, registration.expires_unix_s - self._clock())

    def _require_unlisted(self, instance_id: str) -> None:
        if any(one.instance_id == instance_id for one in self._listed):
            raise ConflictError(f"instance_id: {instance_id!r} is listed by the {self.kind}, and can be changed there")
