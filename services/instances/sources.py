"""Sources of the list of instances: a fixed list, a file that is watched, or the addresses of a DNS name."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from scheduler.objectives import NO_OBJECTIVES, Objectives
from services.instances.instance import Instance, Instances, distinct, instances_from_file, is_port
from services.logs import log_event
from services.security.certificates import engine_access
from services.watched_file import WatchedFile

log = logging.getLogger(__name__)


class InstanceSource:
    """A source of the list of instances; a bad list is a ValueError.

    `may_come_later` says that a start without a list is no mistake of the settings, `kind` what the list is.
    """

    may_come_later: bool = False
    kind: str = "list"

    async def poll(self) -> Instances | None:
        """Return the list, or None where it has not changed since the last call."""
        raise NotImplementedError

    async def wait(self, every_s: float) -> None:
        """Return when it is time for the next poll."""
        await asyncio.sleep(every_s)

    def problem(self) -> str:
        """Say why a server that depends on this list is not ready; empty where it is."""
        return ""

    def objectives(self) -> Objectives:
        """Return the objectives that come with the instances."""
        return NO_OBJECTIVES

    async def close(self) -> None:
        """Stop following the list."""


class Listed(InstanceSource):
    """A fixed list."""

    kind = "flags"

    def __init__(self, instances: Sequence[Instance]) -> None:
        """Check the list."""
        self._instances: Instances | None = distinct(instances)

    async def poll(self) -> Instances | None:
        """Return the list once."""
        instances, self._instances = self._instances, None
        return instances


class FromFile(WatchedFile[Instances], InstanceSource):
    """A file, read when it changes."""

    kind = "file"

    def __init__(self, path: str) -> None:
        """Read nothing yet."""
        super().__init__(path, instances_from_file)


class FromName(InstanceSource):
    """The addresses behind a DNS name, each an engine and a sidecar on the same two ports."""

    may_come_later = True
    kind = "dns"

    def __init__(self, name: str, *, engine_port: int, sidecar_port: int) -> None:
        """Resolve nothing yet."""
        self._name = name
        self._ports = (engine_port, sidecar_port)
        self._seen: Instances = ()

    async def poll(self) -> Instances | None:
        """Resolve the name; a name without addresses is an error, as it is usually a fault of the DNS."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(self._name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{self._name}: cannot be resolved: {getattr(error, 'strerror', error)}") from None
        addresses = sorted({str(address[0]) for *_, address in found})
        instances = tuple(self._at(f"[{address}]" if ":" in address else address) for address in addresses)
        if instances == self._seen:
            return None
        self._seen = instances
        return instances

    def _at(self, host: str) -> Instance:
        engine_port, sidecar_port = self._ports
        return Instance(
            instance_id=f"{host}:{engine_port}",
            engine_url=f"{engine_access().engine_scheme}://{host}:{engine_port}",
            sidecar_address=f"{host}:{sidecar_port}",
        )


def source_from_name(text: str) -> FromName:
    """Parse NAME:ENGINE_PORT:SIDECAR_PORT."""
    name, _, ports = text.partition(":")
    engine_port, colon, sidecar_port = ports.partition(":")
    if not (name and colon and is_port(engine_port) and is_port(sidecar_port)):
        raise ValueError(f"instances_dns: {text!r} must be NAME:ENGINE_PORT:SIDECAR_PORT")
    return FromName(name, engine_port=int(engine_port), sidecar_port=int(sidecar_port))


async def watch(source: InstanceSource, every_s: float, changed: Callable[[Instances], None]) -> None:
    """Report changes of a list until cancelled; while it is unavailable, the last valid one stays."""
    reason = ""
    while True:
        try:
            instances = await source.poll()
        except ValueError as error:
            if str(error) != reason:
                reason = str(error)
                log_event(log, logging.WARNING, "list of instances is unavailable, keeping the last one", reason=reason)
        else:
            if instances is not None:
                changed(instances)
                reason = ""
                log_event(
                    log,
                    logging.INFO,
                    "instances changed",
                    num=len(instances),
                    ids=",".join(i.instance_id for i in instances),
                )
        await source.wait(every_s)
