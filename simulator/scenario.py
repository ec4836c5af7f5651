"""Scenarios: a cluster, its traffic and the conditions of a run, as values that a file describes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from predictor.batching import settled
from predictor.config import CONSUMER, FIELD_NAMES, PRODUCER, EngineConfig, require_count
from predictor.profile import Profile, load_profile, profile_from_json
from predictor.step_time import StepTime
from scheduler.instances import BOTH, PREFILL_ROLE, ROLES
from simulator.conditions import CONDITION_NAMES, Conditions, Outage
from simulator.fleet import InstanceSpec, has_roles
from simulator.hybrid_load import BestEffort
from simulator.metrics import SloTarget
from simulator.mix import Mix, as_tables, mix_from, mixed_workload
from simulator.pooled_bound import pooled_config, pooled_step_time
from simulator.traffic import EXPERIMENTS, Tags, Traffic, draw_workload, require_name
from simulator.workload import Workload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """`count` equal instances; `foreseen` is the profile that their predictors use, if it is another one.

    With `pooled`, each instance is one engine as large and as fast as that many: a bound for every placement. All have
    the same `role`, except that the first `num_prefill` have the role prefill; `prefill_engine` has the settings in
    which these differ. `added_step_s` makes every step longer than in the profile.
    """

    profile: str = "llama-3.1-8b-h100"
    count: int = 1
    engine: tuple[tuple[str, Any], ...] = ()
    pace: float = 1.0
    foreseen: str = ""
    foreseen_pace: float = 1.0
    pooled: int = 1
    role: str = BOTH
    num_prefill: int = 0
    prefill_engine: tuple[tuple[str, Any], ...] = ()
    added_step_s: float = 0.0

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        require_count("instances.count", self.count)
        require_count("instances.pooled", self.pooled)
        require_name(self.role, ROLES, "instances.role")
        require_count("instances.num_prefill", self.num_prefill, at_least=0)
        if self.num_prefill > self.count:
            raise ValueError(f"instances.num_prefill: {self.num_prefill} are more than the {self.count} instances")
        if not 0 <= self.added_step_s < math.inf:
            raise ValueError(f"instances.added_step_s: must be a time from 0 on, not {self.added_step_s}")
        for name in ("pace", "foreseen_pace"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"instances.{name}: must be a number above 0, not {getattr(self, name)}")
        for name, _ in (*self.engine, *self.prefill_engine):
            require_name(name, FIELD_NAMES, "instances.engine")

    def instance_specs(self) -> list[InstanceSpec]:
        """Describe these instances, those with the role prefill first."""
        num_others = self.count - self.num_prefill
        prefill = [self.instance_spec(PREFILL_ROLE)] * self.num_prefill if self.num_prefill else []
        return prefill + ([self.instance_spec()] * num_others if num_others else [])

    def instance_spec(self, role: str = "") -> InstanceSpec:
        """Describe one of these instances, with its own role or another one."""
        role = role or self.role
        profile = _profile(self.profile)
        given = dict(self.engine) | (dict(self.prefill_engine) if role == PREFILL_ROLE else {})
        config = settled(EngineConfig(**{**profile.suggested_settings, **given}))
        predicted = self._slowed(_profile(self.foreseen).step_time) if self.foreseen else None
        return InstanceSpec(
            config=pooled_config(config, self.pooled),
            step_time=self._slowed(profile.step_time),
            predicted_step_time=predicted,
            pace=self.pace,
            predicted_pace=self.foreseen_pace,
            role=role,
        )

    def _slowed(self, step_time: StepTime) -> StepTime:
        slowed = replace(step_time, constant_s=step_time.constant_s + self.added_step_s)
        return pooled_step_time(slowed if self.added_step_s else step_time, self.pooled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster, its traffic and tags, the conditions of the run, its SLO, and the mix of its requests.

    `best_effort` comes beside the traffic in experiments of kind hybrid.
    """

    instances: tuple[Instances, ...] = (Instances(),)
    traffic: Traffic = field(default_factory=Traffic)
    tags: Tags = field(default_factory=Tags)
    conditions: Conditions = field(default_factory=Conditions)
    slo: SloTarget = field(default_factory=SloTarget)
    mix: Mix = ()
    best_effort: BestEffort = field(default_factory=BestEffort)

    def instance_specs(self) -> list[InstanceSpec]:
        """Describe all instances."""
        specs = [spec for kind in self.instances for spec in kind.instance_specs()]
        return [_connected(spec) for spec in specs] if has_roles(specs) else specs

    def workload(self, rate: float | None, seed: int) -> Workload:
        """Draw the traffic: the same seed gives the same requests in the same pattern at any rate.

        Without a rate, a trace keeps its recorded arrival times.
        """
        drawn = draw_workload(self.traffic, self.tags, self.max_request_tokens(), rate, seed)
        return mixed_workload(drawn, self.mix, seed)

    def max_request_tokens(self) -> int:
        """The maximum length of a request, prompt and response, on any instance."""
        return max(kind.instance_spec().config.max_model_len for kind in self.instances)

    def changed(self, **changes: Any) -> Scenario:
        """Return a copy with the changes of a nested table."""
        return scenario_from(_merged(as_table(self), changes))


def _connected(spec: InstanceSpec) -> InstanceSpec:
    """Give an engine among others with roles the part of the KV connector that its role needs."""
    if spec.config.kv_role:
        return spec
    kv_role = PRODUCER if spec.role == PREFILL_ROLE else CONSUMER
    return replace(spec, config=replace(spec.config, kv_role=kv_role))


@functools.lru_cache(maxsize=32)
def _profile(name: str) -> Profile:
    """Load a shipped profile, or one from a JSON file, also of a shipped experiment."""
    if not name.endswith(".json"):
        return load_profile(name)
    path = next((near for near in (Path(name), EXPERIMENTS / name) if near.is_file()), Path(name))
    try:
        return profile_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror}") from None


# Reading and writing tables.


def scenario_from(table: Mapping[str, Any]) -> Scenario:
    """Read a scenario from a table; unknown keys are rejected by name."""
    _require_names(table, ("instances", "traffic", "tags", "conditions", "slo", "mix", "best_effort"), "scenario")
    kinds = table.get("instances", [{}])
    kinds = [kinds] if isinstance(kinds, Mapping) else kinds
    conditions = dict(table.get("conditions", {}))
    _require_names(conditions, CONDITION_NAMES, "conditions")
    if "outages" in conditions:
        conditions["outages"] = tuple(_made(Outage, outage, "conditions.outages") for outage in conditions["outages"])
    traffic = dict(table.get("traffic", {}))
    if "schedule" in traffic:
        traffic["schedule"] = tuple((float(start_s), float(rate)) for start_s, rate in traffic["schedule"])
    return Scenario(
        instances=tuple(_instances(kind) for kind in kinds),
        traffic=_made(Traffic, traffic, "traffic"),
        tags=_made(Tags, table.get("tags", {}), "tags"),
        conditions=_made(Conditions, conditions, "conditions"),
        slo=_made(SloTarget, table.get("slo", {}), "slo"),
        mix=mix_from(table["mix"]) if table.get("mix") else (),
        best_effort=_made(BestEffort, table.get("best_effort", {}), "best_effort"),
    )


def _instances(table: Mapping[str, Any]) -> Instances:
    settings = {}
    for name in ("engine", "prefill_engine"):
        engine = table.get(name, {})
        settings[name] = tuple(sorted(engine.items() if isinstance(engine, Mapping) else engine))
    return _made(Instances, {**table, **settings}, "instances")


def as_table(scenario: Scenario) -> dict[str, Any]:
    """Write a scenario as a table that `scenario_from` can read."""
    plain: dict[str, Any] = {}
    for part in fields(scenario):
        value = getattr(scenario, part.name)
        if part.name == "mix":
            continue
        plain[part.name] = [_plain(kind) for kind in value] if part.name == "instances" else _plain(value)
    return {**plain, "mix": as_tables(scenario.mix)} if scenario.mix else plain


def _plain(value: Any) -> dict[str, Any]:
    plain = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    for name in ("engine", "prefill_engine"):
        if name in plain:
            plain[name] = dict(plain[name])
    if "outages" in plain:
        plain["outages"] = [_plain(outage) for outage in plain["outages"]]
    return {name: kept for name, kept in plain.items() if kept is not None}


def _merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a table; changes of `instances` apply to every kind of instance."""
    merged = dict(table)
    for name, change in changes.items():
        old = merged.get(name)
        if isinstance(change, Mapping) and isinstance(old, Mapping):
            merged[name] = _merged(old, change)
        elif isinstance(change, Mapping) and isinstance(old, Sequence) and name == "instances":
            merged[name] = [_merged(kind, change) for kind in old]
        else:
            merged[name] = change
    return merged


def _made(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: must be a table, not {table!r:.40}")
    _require_names(table, tuple(spec.name for spec in fields(kind)), where)  # type: ignore[arg-type]
    try:
        return kind(**table)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _require_names(table: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in table:
        require_name(name, names, where)
