"""Instances as a proxy names them: by address and port."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection, Iterable
from dataclasses import replace
from urllib.parse import urlsplit

from protos.block.v1 import common_pb2
from scheduler.instances import PREFILL_ROLE, InstanceStatus
from services.http.data_parallel import rank_of
from services.http.origin import origin_of
from services.instances.instance import Instance, Instances
from services.instances.sources import FromFile, InstanceSource, Listed
from services.placement.instance_registry import InstanceRegistry


def endpoint_of(engine_url: str) -> str:
    """Return an engine's endpoint, `address:port`; an IPv6 address is in brackets."""
    origin = origin_of(engine_url)
    if origin.prefix:
        raise ValueError(f"engine_url: {engine_url} has a path, which a proxy does not add; leave it out")
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return f"{host}:{origin.port}"


def address_of(endpoint: str) -> str:
    """Return the address of an endpoint, or of an entry without a port."""
    host, colon, port = endpoint.rpartition(":")
    is_port = bool(colon) and port.isascii() and port.isdigit() and (":" not in host or host.endswith("]"))
    return host if is_port else endpoint


class EndpointTable:
    """Finds the endpoints of instances and the instances of endpoints, in the present list."""

    def __init__(self, registry: InstanceRegistry) -> None:
        """Follow a registry."""
        self._registry = registry
        self._seen: dict[str, InstanceStatus] | None = None
        self._by_instance: dict[str, str] = {}
        self._by_endpoint: dict[str, dict[int | None, str]] = {}  # its instances by data-parallel rank
        self._by_address: dict[str, list[str]] = {}  # endpoints

    def __len__(self) -> int:
        """Return the number of instances."""
        return len(self._registry.directory.by_id)

    def _follow(self) -> None:
        """Read the list again, if it is another one."""
        if self._registry.directory.by_id is self._seen:
            return
        self._seen = self._registry.directory.by_id
        instances = [handle.instance for handle in self._registry.handles()]
        self._by_instance = {one.instance_id: endpoint_of(one.engine_url) for one in instances}
        self._by_endpoint = {}
        for one in instances:
            ranks = self._by_endpoint.setdefault(self._by_instance[one.instance_id], {})
            ranks[one.data_parallel_rank] = one.instance_id
        self._by_address = {}
        for endpoint in self._by_endpoint:
            self._by_address.setdefault(address_of(endpoint), []).append(endpoint)

    def instance_at(self, endpoint: str, rank: int | None = None) -> str | None:
        """Return the instance at an endpoint; where that serves several data-parallel ranks, the one of a rank."""
        self._follow()
        return self._by_endpoint.get(endpoint, {}).get(rank)

    def named(self, entries: Iterable[str]) -> list[str]:
        """Return the known endpoints among some entries, in their order; an address stands for all its ports."""
        self._follow()
        found: dict[str, None] = {}
        for entry in entries:
            some = [entry] if entry in self._by_endpoint else self._by_address.get(entry, ())
            found.update(dict.fromkeys(some))
        return list(found)

    def outside(self, subset: Collection[str]) -> frozenset[str]:
        """Return the instances that a subset of endpoints does not contain."""
        allowed = set(self.named(subset))
        return frozenset(name for name, endpoint in self._by_instance.items() if endpoint not in allowed)

    def serving(self, decision: common_pb2.Decision) -> list[str]:
        """Return the endpoints that may serve a request, best first.

        The request names one data-parallel rank, so only endpoints where that rank may serve it are among them.
        """
        rank = rank_of(decision.instance)
        others = (one for one in decision.next_best if one.role != PREFILL_ROLE and rank_of(one) == rank)
        return list(dict.fromkeys(self.endpoint_of(one) for one in (decision.instance, *others)))

    def endpoint_of(self, instance: common_pb2.Instance) -> str:
        """Return the endpoint of an instance, which may have been removed meanwhile."""
        self._follow()
        return self._by_instance.get(instance.instance_id) or endpoint_of(instance.engine_url)


def with_addresses(source: InstanceSource) -> InstanceSource:
    """Return a source whose engines have addresses; lists by hand may have names instead."""
    return ResolvedSource(source) if isinstance(source, Listed | FromFile) else source


class ResolvedSource(InstanceSource):
    """A source of instances whose engines are named by addresses, as a proxy needs them."""

    def __init__(self, source: InstanceSource) -> None:
        """Resolve the names in another source's lists."""
        self._source = source
        self._listed: Instances = ()
        self._resolved: Instances | None = None

    async def poll(self) -> Instances | None:
        """Return the list, or None where neither it nor the address of a name has changed."""
        listed = await self._source.poll()
        if listed is not None:
            self._listed = listed
        elif all(map(_has_address, self._listed)):
            return None
        names = {_host_of(one.engine_url) for one in self._listed if not _has_address(one)}
        addresses = dict(zip(names, await asyncio.gather(*map(_resolved, names)), strict=True))
        resolved = tuple(
            one
            if _has_address(one)
            else replace(one, engine_url=_with_host(one.engine_url, addresses[_host_of(one.engine_url)]))
            for one in self._listed
        )
        for one in resolved:
            endpoint_of(one.engine_url)
        if resolved == self._resolved:
            return None
        self._resolved = resolved
        return resolved


def _host_of(url: str) -> str:
    return origin_of(url).host


def _has_address(instance: Instance) -> bool:
    try:
        ipaddress.ip_address(_host_of(instance.engine_url))
    except ValueError:
        return False
    return True


def _with_host(url: str, address: str) -> str:
    parts = urlsplit(url)
    host = f"[{address}]" if ":" in address else address
    return parts._replace(netloc=host if parts.port is None else f"{host}:{parts.port}").geturl()


async def _resolved(name: str) -> str:
    """Return the first address of a name; IPv4 before IPv6."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"engine_url: {name} cannot be resolved: {getattr(error, 'strerror', error)}") from None
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
