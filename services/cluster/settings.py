"""What a cluster on one machine is to have."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from predictor.suggestions import require_known
from scheduler.policy import policy_from
from services.cluster.instance_range import MOST_INSTANCES, InstanceRange, instance_range_from, room_of
from services.settings_tables import TABLES
from simulator.codec import read_text

OURS = ("--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile", "--data-parallel-size", "-dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Real engines instead of emulated ones: which model, by which command, with which arguments, and where.

    Without `devices` each gets an accelerator, or as many as it spreads over, of those that there are; where there are
    none it gets cores, for vLLM's CPU build.
    """

    model: str
    command: str = "vllm"
    arguments: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what could not be started."""
        for name in ("model", "command"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or value.startswith("-"):
                raise ValueError(f"{name}: must be a text, and no flag, not {value!r}")
        for word in self.arguments:
            if (name := word.partition("=")[0]) in OURS:
                raise ValueError(f"arguments: {name} is not for the engines of a cluster, which talk to this machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """How many of what. Each policy has schedulers and a gateway of its own in front of the same instances.

    `tables_file` is a TOML file with a table per kind of process, which each reads by itself.
    """

    instances: int = 4
    provision: str = ""  # MIN-MAX: a provisioner sees to them instead
    engines_per_sidecar: int = 16  # read by one process, of which a scheduler asks for all at once
    schedulers: int = 1
    policies: tuple[str, ...] = ("block",)
    host: str = "127.0.0.1"
    mirror: bool = False  # engines tell nothing, and sidecars mirror their traffic; [predictor] must name the profile
    port: int = 8000  # of the first gateway; the others take any free one
    vllm: VllmSettings | None = None  # engines are emulated without
    tables_file: str | None = None
    engine_flags: tuple[str, ...] = ()  # for every engine, beyond what its table says
    sidecar_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    room: Mapping[str, int] = field(default_factory=dict)  # of every engine, as a provisioner is told
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Refuse what could not be started."""
        for name, most in (
            ("instances", MOST_INSTANCES),
            ("engines_per_sidecar", MOST_INSTANCES),
            ("schedulers", 16),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name}: must be a whole number from 1 to {most}, not {value!r}")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ValueError(f"port: must lie between 0 and 65535, not {self.port!r}")
        if not isinstance(self.host, str):
            raise ValueError(f"host: must be a text, not {self.host!r}")
        if not isinstance(self.mirror, bool):
            raise ValueError(f"mirror: must be true or false, not {self.mirror!r}")
        if self.span is not None and (self.vllm is not None or self.mirror):
            raise ValueError("provision: is for emulated engines that tell of themselves; see block serve provisioner")
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ValueError("policies: name at least one, and each once")
        for policy in self.policies:
            policy_from(policy)

    @property
    def span(self) -> InstanceRange | None:
        """Between how many instances a provisioner may choose; None where there is none."""
        return instance_range_from(self.provision) if self.provision != "" else None


KEYS = tuple(
    spec.name
    for spec in fields(ClusterSettings)
    if spec.name not in ("vllm", "tables_file", "engine_flags", "sidecar_flags", "scheduler_flags", "room", "log_level")
)


VLLM_KEYS = tuple(spec.name for spec in fields(VllmSettings))


def settings_from_file(path: str) -> dict[str, Any]:
    """Read the table [cluster] of a TOML file; what is not known, there or as a table, is refused by name."""
    document = _document(path)
    table = document.get("cluster", {})
    try:
        require_known(document, TABLES, "table")
        if not isinstance(table, Mapping):
            raise ValueError("cluster: must be a table")
        require_known(table, KEYS, "setting of [cluster]")
        given = dict(table)
        if "policies" in given:
            given["policies"] = _texts("policies", given["policies"])
        given.update(_provisioned(document, given))
        ClusterSettings(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return given


def _provisioned(document: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Take from [provisioner] whether there is one, and from [engine] what it is not told there of engines."""
    engine, table = (document.get(name, {}) for name in ("engine", "provisioner"))
    if not (isinstance(engine, Mapping) and isinstance(table, Mapping)):
        return {}  # who reads them refuses them
    said = {name.replace("-", "_"): value for name, value in table.items()}
    found: dict[str, Any] = {"room": {name: num for name, num in room_of(engine).items() if name not in said}}
    if "max_instances" in said and "provision" not in given:
        found["provision"] = f"{said.get('min_instances', 1)}-{said['max_instances']}"
    return found


def vllm_from_file(path: str) -> dict[str, Any]:
    """Read the table [vllm] of a TOML file, in which everything may be left out."""
    table = _document(path).get("vllm", {})
    try:
        if not isinstance(table, Mapping):
            raise ValueError("must be a table")
        require_known(table, VLLM_KEYS, "setting")
        lists = {name: _texts(name, table[name]) for name in ("arguments", "devices") if name in table}
        given = {**table, **lists}
        VllmSettings(**{"model": "any", **given})
    except ValueError as error:
        raise ValueError(f"{path}: vllm: {error}") from None
    return given


def profile_in_file(path: str) -> bool:
    """Tell whether the sidecars of a TOML file are told a latency profile there."""
    table = _document(path).get("predictor", {})
    return isinstance(table, Mapping) and "profile" in table


def _document(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise ValueError(f"{name}: must be a list of texts, not {value!r}")
    return tuple(value)
