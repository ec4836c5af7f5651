"""Settings of a cluster on one machine, by flags and by the tables [cluster] and [vllm] of a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from predictor.suggestions import require_choice, require_known
from scheduler.policy import policy_from
from services.cluster.instance_range import MAX_INSTANCES, InstanceRange, engine_capacity_of, instance_range_from
from services.cluster.pools import PlannedEngine, planned_engines
from services.emulator.settings import MAX_RANKS
from services.logs import LEVELS, LogSettings
from services.objectives import ObjectivesFile
from services.security.exposure import is_on_loopback
from services.settings import PORTS, TABLES, Option, default_of, settings_of
from simulator.codec import read_text

# flags of `vllm serve` that the cluster sets itself
RESERVED = ("--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile", "--data-parallel-size", "-dp")
MAX_SCHEDULERS = 16
DEFAULT_INSTANCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Engines that run vLLM, in place of emulated ones.

    Without `devices` each engine gets as many of this machine's accelerators as it spreads over; where there are none
    it gets CPU cores, for vLLM's CPU build.
    """

    model: Annotated[str, Option("Model that vLLM serves, in place of emulated engines.", flag="vllm", metavar="MODEL")]
    command: Annotated[str, Option("The vllm executable.", flag="vllm_command", metavar="PATH")] = "vllm"
    arguments: Annotated[
        tuple[str, ...], Option("More arguments of `vllm serve`; on the command line they follow --.", flag=None)
    ] = ()
    devices: Annotated[
        tuple[str, ...], Option("Accelerators to use, by their CUDA index.", flag=None, unset="all of this machine")
    ] = ()

    def __post_init__(self) -> None:
        """Refuse an engine that cannot be started."""
        for name in ("model", "command"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or value.startswith("-"):
                raise ValueError(f"{name}: must be a text, and no flag, not {value!r}")
        for word in self.arguments:
            if (name := word.partition("=")[0]) in RESERVED:
                raise ValueError(f"arguments: {name} is not for the engines of a cluster, which sets it itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The components of a cluster. Each policy has its own gateway, and schedulers if any, before the same instances.

    `tables_file` is a TOML file with a table for each kind of process; each process reads its own.
    """

    instances: Annotated[
        int | None,
        Option(
            "Number of engines that serve whole requests, each with a sidecar.",
            short="-n",
            unset="4; 0 with prefill or decode",
        ),
    ] = None
    prefill: Annotated[int, "Number of engines that only prefill, for engines that decode."] = 0
    decode: Annotated[int, "Number of engines that decode what others prefilled; they can serve whole requests."] = 0
    data_parallel: Annotated[
        int, "Number of data-parallel ranks of each emulated engine; each rank is an instance: engine-0-rank-1."
    ] = 1
    lockstep: Annotated[
        bool, "Ranks of an engine step together, as those of a model with experts; with data_parallel."
    ] = False
    provision: Annotated[
        str,
        Option("Have a provisioner run between MIN and MAX instances, in place of a fixed number.", metavar="MIN-MAX"),
    ] = ""
    engines_per_sidecar: Annotated[
        int, "Number of engines that one sidecar process follows; a scheduler queries all of them in one call."
    ] = 16
    schedulers: Annotated[
        int, "Number of schedulers for each policy; with 0 each gateway decides in its own process."
    ] = 0
    policies: Annotated[tuple[str, ...], Option("Policy; each has its own gateway. Repeatable.", flag="policy")] = (
        "block",
    )
    objectives: ObjectivesFile = ""  # of every gateway and scheduler
    host: Annotated[str, "Address that every component listens on."] = "127.0.0.1"
    mirror: Annotated[
        bool, "Mirror the engines from their traffic instead of reading their state; [predictor] must name the profile."
    ] = False
    port: Annotated[int, "Port of the first gateway; further gateways use any free port."] = PORTS["gateway"]
    folder: Annotated[
        str,
        Option(
            "Folder for the cluster's files, among them the state files of its engines; it is removed at the end.",
            metavar="DIR",
            unset="a new one in /dev/shm",
        ),
    ] = ""
    tls: Annotated[
        bool,
        "Use TLS on every connection, with certificates of both sides between the components; clients of the gateway "
        "need none.",
    ] = False
    tls_folder: Annotated[
        str,
        Option(
            "Folder with the certificates, as `block certs` makes them; those that are not there are made.",
            metavar="DIR",
            unset="in --folder",
        ),
    ] = ""
    insecure: Annotated[bool, "Listen beyond this machine (--host) without TLS and without API keys."] = False
    vllm: VllmSettings | None = None  # without, engines are emulated
    tables_file: str | None = None
    engine_flags: tuple[str, ...] = ()  # of every engine, in addition to its table
    sidecar_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    capacity: Mapping[str, int] = field(default_factory=dict)  # of every engine, as flags of the provisioner
    log_level: Annotated[str, Option("Least severe level that is logged.", choices=LEVELS)] = default_of(
        LogSettings, "log_level"
    )

    def __post_init__(self) -> None:
        """Refuse a cluster that cannot be started."""
        self._check_numbers()
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ValueError(f"port: must lie between 0 and 65535, not {self.port!r}")
        for name in ("host", "objectives", "folder", "tls_folder"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: must be a text, not {getattr(self, name)!r}")
        for name in ("mirror", "tls", "insecure", "lockstep"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: must be true or false, not {getattr(self, name)!r}")
        self._check_tls()
        require_choice("log_level", self.log_level, LEVELS)
        if self.instance_range is not None and (self.prefill or self.decode):
            raise ValueError(
                "provision: goes without prefill and decode: instances that it starts serve whole requests"
            )
        self._check_ranks()
        if self.instance_range is not None and (self.vllm is not None or self.mirror):
            raise ValueError(
                "provision: is for emulated engines that export their state; see block serve provisioner for others"
            )
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ValueError("policies: name at least one, and each once")
        for policy in self.policies:
            policy_from(policy)

    def _check_tls(self) -> None:
        if self.tls_folder and not self.tls:
            raise ValueError("tls_folder: has no effect without tls")
        if not (self.tls or self.insecure or is_on_loopback(self.host)):
            raise ValueError(
                f"host: {self.host} is reached from other machines, in plain text: give --tls, or --insecure where the "
                "network is trusted"
            )

    def _check_ranks(self) -> None:
        if self.lockstep and self.data_parallel == 1:
            raise ValueError("lockstep: needs data_parallel above 1")
        if self.data_parallel > 1 and (self.prefill or self.decode or self.mirror or self.instance_range is not None):
            raise ValueError("data_parallel: goes without prefill, decode, mirror and provision")
        if self.data_parallel > 1 and self.vllm is not None:
            raise ValueError("data_parallel: is of emulated engines only; list the ranks of vLLM in an instances file")

    def _check_numbers(self) -> None:
        pooled = self.prefill != 0 or self.decode != 0
        for name, minimum, maximum in (
            ("prefill", 0, MAX_INSTANCES),
            ("decode", 0, MAX_INSTANCES),
            ("instances", 0 if pooled else 1, MAX_INSTANCES),
            ("engines_per_sidecar", 1, MAX_INSTANCES),
            ("data_parallel", 1, MAX_RANKS),
            ("schedulers", 0, MAX_SCHEDULERS),
        ):
            value = getattr(self, name)
            if name == "instances" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
                raise ValueError(f"{name}: must be a whole number from {minimum} to {maximum}, not {value!r}")
        if self.prefill and not (self.decode or self.instances):
            raise ValueError("decode: must be at least 1 with prefill, or instances must: no engine would decode")
        if len(self.engines) * self.data_parallel > MAX_INSTANCES and self.data_parallel > 1:
            raise ValueError(
                f"data_parallel: {self.data_parallel} ranks of {len(self.engines)} engines are more than "
                f"{MAX_INSTANCES} instances"
            )
        if len(self.engines) > MAX_INSTANCES:
            raise ValueError(
                f"instances: {len(self.engines)} with prefill and decode are more than {MAX_INSTANCES} engines"
            )

    @property
    def engines(self) -> tuple[PlannedEngine, ...]:
        """The engines, unless a provisioner starts them."""
        num_both = self.instances
        if num_both is None:
            num_both = 0 if self.prefill or self.decode else DEFAULT_INSTANCES
        return planned_engines(self.prefill, self.decode, num_both)

    @property
    def instance_range(self) -> InstanceRange | None:
        """The numbers of instances that a provisioner may choose; None without a provisioner."""
        return instance_range_from(self.provision) if self.provision != "" else None


def settings_from_file(path: str) -> dict[str, Any]:
    """Read the table [cluster] of a TOML file; an unknown key or table is refused by name."""
    document = _document(path)
    table = document.get("cluster", {})
    try:
        require_known(document, TABLES, "table")
        if not isinstance(table, Mapping):
            raise ValueError("cluster: must be a table")
        require_known(table, [setting.name for setting in settings_of(ClusterSettings)], "setting of [cluster]")
        given = dict(table)
        if "policies" in given:
            given["policies"] = _texts("policies", given["policies"])
        given.update(_provisioned(document, given))
        ClusterSettings(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return given


def _provisioned(document: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Find in [provisioner] whether there is one, and in [engine] the capacity that [provisioner] leaves out."""
    engine, table = (document.get(name, {}) for name in ("engine", "provisioner"))
    if not (isinstance(engine, Mapping) and isinstance(table, Mapping)):
        return {}  # the processes that read these tables refuse them
    named = {name.replace("-", "_"): value for name, value in table.items()}
    capacity = {name: num for name, num in engine_capacity_of(engine).items() if name not in named}
    found: dict[str, Any] = {"capacity": capacity}
    if "max_instances" in named and "provision" not in given:
        found["provision"] = f"{named.get('min_instances', 1)}-{named['max_instances']}"
    return found


def vllm_from_file(path: str) -> dict[str, Any]:
    """Read the table [vllm] of a TOML file, in which every key is optional."""
    table = _document(path).get("vllm", {})
    try:
        if not isinstance(table, Mapping):
            raise ValueError("must be a table")
        require_known(table, [setting.name for setting in settings_of(VllmSettings)], "setting")
        lists = {name: _texts(name, table[name]) for name in ("arguments", "devices") if name in table}
        given = {**table, **lists}
        VllmSettings(**{"model": "any", **given})
    except ValueError as error:
        raise ValueError(f"{path}: vllm: {error}") from None
    return given


def profile_in_file(path: str) -> bool:
    """Return whether the table [predictor] of a TOML file names a latency profile."""
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
