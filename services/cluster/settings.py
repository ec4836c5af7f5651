"""What a cluster on one machine is to have."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from scheduler.policy import policy_from
from services.codec import read_text
from services.names import TABLES, require_known

MOST_INSTANCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """How many of what. Each policy has schedulers and a gateway of its own in front of the same instances.

    `tables_file` is a TOML file with a table per kind of process, which each reads by itself.
    """

    instances: int = 4
    engines_per_sidecar: int = 16  # read by one process, of which a scheduler asks for all at once
    schedulers: int = 1
    policies: tuple[str, ...] = ("block",)
    host: str = "127.0.0.1"
    mirror: bool = False  # engines tell nothing, and sidecars mirror their traffic; [predictor] must name the profile
    port: int = 8000  # of the first gateway; the others take any free one
    tables_file: str | None = None
    engine_flags: tuple[str, ...] = ()  # for every engine, beyond what its table says
    scheduler_flags: tuple[str, ...] = ()
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
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ValueError("policies: name at least one, and each once")
        for policy in self.policies:
            policy_from(policy)


KEYS = tuple(
    spec.name
    for spec in fields(ClusterSettings)
    if spec.name not in ("tables_file", "engine_flags", "scheduler_flags", "log_level")
)


def settings_from_file(path: str) -> dict[str, Any]:
    """Read the table [cluster] of a TOML file; what is not known, there or as a table, is refused by name."""
    try:
        document = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    table = document.get("cluster", {})
    try:
        require_known(document, TABLES, "table")
        if not isinstance(table, Mapping):
            raise ValueError("cluster: must be a table")
        require_known(table, KEYS, "setting of [cluster]")
        given = dict(table)
        if "policies" in given:
            given["policies"] = _texts("policies", given["policies"])
        ClusterSettings(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return given


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise ValueError(f"{name}: must be a list of texts, not {value!r}")
    return tuple(value)
