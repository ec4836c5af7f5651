"""One instance, and how flags, files and bodies describe it."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from predictor.suggestions import require_choice, require_known
from scheduler.instances import BOTH, ROLES, role_named
from services.http.origin import origin_of
from services.instances.drains import Drain, drain_from_table
from services.kv_events.settings import require_endpoint
from simulator.codec import read_text

LONGEST_ID = 256
STATES = READY, DRAINING = "ready", "draining"
REMOVED_FROM_LIST = "instance was removed from the list"  # why it is not called
FLAG_SETTINGS = ("role=", "tier=", "tier_tpot_ms=", "rank=", "kv_events=", "kv_events_replay=")
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
    tier_closed: bool = False  # it takes only requests of its tier; without one, none with a TPOT target
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
        require_choice("role", self.role, ROLES)
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
    if not (host and colon and is_port(port) and " " not in host):
        raise ValueError(f"{field}: {address!r} must be host:port")


def is_port(text: str) -> bool:
    """Return whether a text is the number of a port."""
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def instance_from_flag(text: str) -> Instance:
    """Parse ID=ENGINE_URL,SIDECAR_ADDRESS, with models and settings (role=ROLE, rank=R, …) after further commas."""
    instance_id, equals, rest = text.partition("=")
    parts = [part.strip() for part in rest.split(",")]
    if not equals or len(parts) < 2:
        raise ValueError(f"instance: {text!r} must be ID=ENGINE_URL,SIDECAR_ADDRESS")
    settings = dict(part.split("=", 1) for part in parts[2:] if part.startswith(FLAG_SETTINGS))
    try:
        _require_whole_tier(settings, "tier_tpot_ms")
        return Instance(
            instance_id=instance_id.strip(),
            engine_url=parts[0],
            sidecar_address=parts[1],
            models=tuple(part for part in parts[2:] if not part.startswith(FLAG_SETTINGS)),
            role=role_named(settings.get("role", BOTH)),
            tier=settings.get("tier", ""),
            tier_tpot_s=_seconds_named(settings["tier_tpot_ms"]) if "tier_tpot_ms" in settings else math.inf,
            kv_events=settings.get("kv_events", ""),
            kv_events_replay=settings.get("kv_events_replay", ""),
            data_parallel_rank=_rank_named(settings["rank"]) if "rank" in settings else None,
        )
    except ValueError as error:
        raise ValueError(f"instance: {text!r}: {error}") from None


def _require_whole_tier(settings: Mapping[str, Any], bound: str) -> None:
    """Raise ValueError for a tier without its bound, or a bound without the name of its tier."""
    if settings.get("tier") and settings.get(bound, math.inf) == math.inf:
        raise ValueError(f"{bound}: is missing; the tier {settings['tier']!r} needs its bound of the time per token")
    if bound in settings and not settings.get("tier"):
        raise ValueError(f"tier: is missing; {bound} needs the name of the tier")


def _seconds_named(text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise ValueError(f"tier_tpot_ms: must be a time above 0, in milliseconds, not {text!r}")
    return milliseconds / 1e3


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
    instance = Instance(**{**table, **read})
    _require_whole_tier(table, "tier_tpot_s")
    return instance


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
    """Raise ValueError for two instances of one id, ranks of one URL that are alike, and two bounds of one tier."""
    known: dict[str, Instance] = {}
    by_tier: dict[str, Instance] = {}
    by_url: dict[str, dict[int | None, str]] = {}
    for place, instance in enumerate(instances):
        if instance.instance_id in known:
            raise ValueError(f"instances[{place}].instance_id: {instance.instance_id!r} is a duplicate")
        known[instance.instance_id] = instance
        first = by_tier.setdefault(instance.tier, instance)
        if instance.tier and instance.tier_tpot_s != first.tier_tpot_s:
            raise ValueError(
                f"instances[{place}].tier_tpot_s: {instance.tier_tpot_s:g} of {instance.instance_id!r} is not the "
                f"{first.tier_tpot_s:g} of {first.instance_id!r}; a tier has one bound, and {instance.tier!r} has both"
            )
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
