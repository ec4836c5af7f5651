"""The list of instances: from flags, a file that is watched, the addresses of a DNS name, or pods of Kubernetes."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from predictor.suggestions import require_known
from scheduler.instances import BOTH, ROLES, role_named
from scheduler.objectives import NO_OBJECTIVES, Objectives
from services.drains import Drain, drain_from_table
from services.http.client import origin_of
from services.kubernetes.settings import KUBERNETES, KubernetesSettings
from services.kv_events.settings import require_endpoint
from services.logs import log_event
from services.security.certificates import engine_access
from services.settings import Nested, Option
from services.watched_file import WatchedFile
from simulator.codec import read_text

log = logging.getLogger(__name__)

LONGEST_ID = 256
STATES = READY, DRAINING = "ready", "draining"
BY_HTTP = "http"  # the value of --instances-from for those that are registered by HTTP alone
FLAG_SETTINGS = ("role=", "tier=", "rank=", "kv_events=", "kv_events_replay=")
MAX_RANK = 65535

Instances = tuple["Instance", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One engine with its sidecar. Without `models` it serves any model."""

    instance_id: str
    engine_url: str
    sidecar_address: str
    models: tuple[str, ...] = ()
    state: str = READY
    role: str = "both"  # or prefill, or decode
    tier: str = ""
    tier_tpot_s: float = math.inf  # the bound of its tier
    tier_closed: bool = False  # it takes only requests of its tier
    drain: Drain | None = None  # when its requests have to leave, while it drains
    kv_events: str = ""  # where its engine publishes KV events, if schedulers shall follow them
    kv_events_replay: str = ""  # where it repeats them
    data_parallel_rank: int | None = None  # of an engine that serves several ranks at one URL

    def __post_init__(self) -> None:
        """Check the values; ValueError names the field."""
        if not self.instance_id.isprintable() or not 0 < len(self.instance_id) <= LONGEST_ID:
            raise ValueError(f"instance_id: must be 1 to {LONGEST_ID} printable characters")
        try:
            origin_of(self.engine_url)
        except ValueError as error:
            raise ValueError(f"engine_url: {error}") from None
        require_address("sidecar_address", self.sidecar_address)
        if not all(self.models):
            raise ValueError("models: one of them is empty")
        if self.state not in STATES:
            raise ValueError(f"state: {self.state!r} is neither {' nor '.join(STATES)}")
        if self.role not in ROLES:
            raise ValueError(f"role: {self.role!r} is none of {', '.join(ROLES)}")
        is_number = isinstance(self.tier_tpot_s, int | float) and not isinstance(self.tier_tpot_s, bool)
        if not (is_number and self.tier_tpot_s > 0):
            raise ValueError(f"tier_tpot_s: must be a time above 0, not {self.tier_tpot_s!r}")
        if not isinstance(self.tier_closed, bool):
            raise ValueError(f"tier_closed: must be true or false, not {self.tier_closed!r}")
        self._check_events()
        if self.drain is not None and self.state != DRAINING:
            raise ValueError("drain: needs the state draining")
        rank = self.data_parallel_rank
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= MAX_RANK):
            raise ValueError(f"data_parallel_rank: must be a whole number from 0 to {MAX_RANK}, not {rank!r}")

    def _check_events(self) -> None:
        for name in ("kv_events", "kv_events_replay"):
            if endpoint := getattr(self, name):
                require_endpoint(name, endpoint)
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay: goes with kv_events only")


FIELDS = tuple(spec.name for spec in fields(Instance))
REQUIRED = ("instance_id", "engine_url", "sidecar_address")


def require_address(field: str, address: str) -> None:
    """Raise ValueError for an address that is not host:port."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and _is_port(port) and " " not in host):
        raise ValueError(f"{field}: {address!r} must be host:port")


def instance_from_flag(text: str) -> Instance:
    """Parse ID=ENGINE_URL,SIDECAR_ADDRESS, with models and settings (role=ROLE, tier=TIER, …) after further commas."""
    instance_id, equals, rest = text.partition("=")
    parts = [part.strip() for part in rest.split(",")]
    if not equals or len(parts) < 2:
        raise ValueError(f"instance: {text!r} must be ID=ENGINE_URL,SIDECAR_ADDRESS")
    settings = dict(part.split("=", 1) for part in parts[2:] if part.startswith(FLAG_SETTINGS))
    try:
        return Instance(
            instance_id=instance_id.strip(),
            engine_url=parts[0],
            sidecar_address=parts[1],
            models=tuple(part for part in parts[2:] if not part.startswith(FLAG_SETTINGS)),
            role=role_named(settings.get("role", BOTH)),
            tier=settings.get("tier", ""),
            kv_events=settings.get("kv_events", ""),
            kv_events_replay=settings.get("kv_events_replay", ""),
            data_parallel_rank=_rank_named(settings["rank"]) if "rank" in settings else None,
        )
    except ValueError as error:
        raise ValueError(f"instance: {text!r}: {error}") from None


def _rank_named(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"rank: must be a whole number from 0 to {MAX_RANK}, not {text!r}")
    return int(text)


def instances_from_file(path: str) -> Instances:
    """Read a TOML or JSON file: `instances`, a list of tables; JSON may be the bare list."""
    text = read_text(path)
    try:
        data = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not {'JSON' if path.endswith('.json') else 'TOML'}: {error}") from None
    try:
        if isinstance(data, Mapping):
            require_known(data, ["instances"], "key")
            data = data.get("instances", [])
        if not isinstance(data, list):
            raise ValueError("instances: must be a list")
        return distinct([_listed_at(place, table) for place, table in enumerate(data)])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _listed_at(place: int, table: Any) -> Instance:
    try:
        return instance_from_table(table)
    except ValueError as error:
        raise ValueError(f"instances[{place}].{error}") from None


def instance_from_table(table: Any) -> Instance:
    """Read an instance from a table of TOML or JSON; ValueError names the field."""
    if not isinstance(table, Mapping):
        raise ValueError("must be a table with instance_id, engine_url and sidecar_address")
    require_known(table, FIELDS, "field")
    for name in REQUIRED:
        if name not in table:
            raise ValueError(f"{name}: is missing")
    models = table.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise ValueError("models: must be a list of strings")
    for name in (*REQUIRED, "state", "role", "tier", "kv_events", "kv_events_replay"):
        if not isinstance(table.get(name, ""), str):
            raise ValueError(f"{name}: must be a string, not {table[name]!r}")
    read: dict[str, Any] = {"models": tuple(models), "role": role_named(table.get("role", BOTH))}
    if "drain" in table:
        read["drain"] = drain_from_table(table["drain"])
    return Instance(**{**table, **read})


def table_of(instance: Instance) -> dict[str, Any]:
    """Write an instance as a table of TOML or JSON, without what has its default."""
    table: dict[str, Any] = {}
    for spec in fields(Instance):
        value = getattr(instance, spec.name)
        if spec.name in REQUIRED or value != spec.default:
            table[spec.name] = list(value) if isinstance(value, tuple) else value
    if instance.drain is not None:
        table["drain"] = instance.drain.table()
    return table


def distinct(instances: Iterable[Instance]) -> Instances:
    """Raise ValueError for two instances of one id, and for ranks of one URL that cannot be distinguished."""
    known: dict[str, Instance] = {}
    by_url: dict[str, dict[int | None, str]] = {}
    for place, instance in enumerate(instances):
        if instance.instance_id in known:
            raise ValueError(f"instances[{place}].instance_id: {instance.instance_id!r} occurs twice")
        known[instance.instance_id] = instance
        _require_other_rank(instance, place, by_url.setdefault(instance.engine_url.rstrip("/"), {}))
    return tuple(known.values())


def _require_other_rank(instance: Instance, place: int, names: dict[int | None, str]) -> None:
    """Note an instance among those at its URL; ValueError where ranks are there, and its own is missing or taken."""
    rank = instance.data_parallel_rank
    has_ranks = rank is not None or any(other is not None for other in names)
    if has_ranks and names and (rank is None or None in names):
        raise ValueError(
            f"instances[{place}].data_parallel_rank: is missing from {instance.instance_id!r} or "
            f"{next(iter(names.values()))!r}: both are at {instance.engine_url}"
        )
    if rank is not None and rank in names:
        raise ValueError(
            f"instances[{place}].data_parallel_rank: {rank} at {instance.engine_url} is {names[rank]!r} already"
        )
    names[rank] = instance.instance_id


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


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSourceSettings:
    """Where the list of instances comes from: flags, a file, a DNS name or Kubernetes."""

    listed: Annotated[
        tuple[str, ...],
        Option(
            "An instance: its id, the URL of its engine and host:port of its sidecar; names of its models, "
            "role=prefill or role=decode, tier=NAME, and rank=R for a data-parallel rank of an engine that serves "
            "several at this URL may follow after further commas. Repeatable; in the environment variable, instances "
            "are separated by spaces.",
            name="instance",
            metavar="ID=ENGINE_URL,SIDECAR",
        ),
    ] = ()
    instances_file: Annotated[
        str, Option("TOML or JSON file with a list `instances`; it is read again when it changes.", metavar="FILE")
    ] = ""
    instances_dns: Annotated[
        str,
        Option(
            "DNS name; each of its addresses is an instance with the id ADDRESS:ENGINE_PORT.",
            metavar="NAME:ENGINE_PORT:SIDECAR_PORT",
        ),
    ] = ""
    instances_from: Annotated[
        str | None,
        Option(
            "Where else the instances come from: kubernetes follows the ready pods of an InferencePool (--pool-name), "
            "or those that have labels (--endpoint-selector); http starts with none, and waits for those that are "
            "registered at the port for operators (--metrics-port).",
            choices=(KUBERNETES, BY_HTTP),
            unset="the flags above",
        ),
    ] = None
    kubernetes: Annotated[KubernetesSettings, Nested()] = field(default_factory=KubernetesSettings)
    poll_s: Annotated[float, "Interval at which the file or the DNS name is checked for changes, in seconds."] = 1.0

    def __post_init__(self) -> None:
        """Refuse several sources, or none."""
        if not 0 < self.poll_s < 1e6:
            raise ValueError(f"poll_s: must be a time above 0, not {self.poll_s}")
        sources = (self.listed, self.instances_file, self.instances_dns, self.instances_from)
        if [bool(source) for source in sources].count(True) != 1:
            raise ValueError(
                "instances: give one of --instance, --instances-file, --instances-dns and --instances-from"
            )
        if self.instances_from == KUBERNETES:
            self.kubernetes.require_complete()
        elif self.kubernetes != KubernetesSettings():
            raise ValueError("instances_from: must be kubernetes, as the settings of kubernetes need it")

    def source(self) -> InstanceSource:
        """Make the source."""
        if self.instances_file:
            return FromFile(self.instances_file)
        if self.instances_dns:
            return source_from_name(self.instances_dns)
        if self.instances_from == KUBERNETES:
            from services.kubernetes.source import FromKubernetes

            return FromKubernetes(self.kubernetes)
        return Listed([instance_from_flag(text) for text in self.listed])


def source_from_name(text: str) -> FromName:
    """Parse NAME:ENGINE_PORT:SIDECAR_PORT."""
    name, _, ports = text.partition(":")
    engine_port, colon, sidecar_port = ports.partition(":")
    if not (name and colon and _is_port(engine_port) and _is_port(sidecar_port)):
        raise ValueError(f"instances_dns: {text!r} must be NAME:ENGINE_PORT:SIDECAR_PORT")
    return FromName(name, engine_port=int(engine_port), sidecar_port=int(sidecar_port))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


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
