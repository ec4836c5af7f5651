"""Scenarios: a cluster, its traffic and the conditions of a run, as values that a file describes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from predictor.batching import batcher_named, settled
from predictor.config import CONSUMER, FIELD_NAMES, PRODUCER, EngineConfig, require_count
from predictor.profile import Profile, load_profile, profile_from_json
from predictor.step_time import StepTime
from scheduler.instances import BOTH, PREFILL_ROLE, ROLES
from scheduler.objectives import Objective, objectives_from
from simulator.conditions import CONDITION_NAMES, Conditions, Outage, with_new_names
from simulator.field_checks import require_flag, require_number, require_string
from simulator.fleet import InstanceSpec, has_roles
from simulator.hybrid_load import BestEffort
from simulator.metrics import SloTarget
from simulator.mix import Mix, as_tables, mix_from, mixed_workload
from simulator.pooled_bound import pooled_config, pooled_step_time
from simulator.traffic import EXPERIMENTS, Tags, Traffic, draw_workload, require_name
from simulator.workload import Workload

T = TypeVar("T")

ENGINE_TYPES = get_type_hints(EngineConfig)
TABLES = ("instances", "traffic", "tags", "conditions", "slo", "mix", "objective", "best_effort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """`count` equal instances; `predicted_profile` is the profile that their predictors use, if it is another one.

    With `pooled`, each instance is one engine as large and as fast as that many: a bound for every placement. All have
    the same `role`, except that the first `num_prefill` have the role prefill; `prefill_engine` has the settings in
    which these differ. `added_step_s` makes every step longer than in the profile.
    """

    profile: str = "llama-3.1-8b-h100"
    count: int = 1
    engine: tuple[tuple[str, Any], ...] = ()
    pace: float = 1.0
    predicted_profile: str = ""
    foreseen_pace: float = 1.0
    pooled: int = 1
    role: str = BOTH
    num_prefill: int = 0
    prefill_engine: tuple[tuple[str, Any], ...] = ()
    added_step_s: float = 0.0

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        for name in ("profile", "predicted_profile", "role"):
            require_string(f"instances.{name}", getattr(self, name))
        require_count("instances.count", self.count)
        require_count("instances.pooled", self.pooled)
        require_name(self.role, ROLES, "instances.role")
        require_count("instances.num_prefill", self.num_prefill, at_least=0)
        if self.num_prefill > self.count:
            raise ValueError(f"instances.num_prefill: {self.num_prefill} are more than the {self.count} instances")
        require_number("instances.added_step_s", self.added_step_s)
        for name in ("pace", "foreseen_pace"):
            require_number(f"instances.{name}", getattr(self, name), above=0)
        for where in ("engine", "prefill_engine"):
            for name, value in getattr(self, where):
                _require_setting(f"instances.{where}", name, value)

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
        predicted = self._slowed(_profile(self.predicted_profile).step_time) if self.predicted_profile else None
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


def _require_setting(where: str, name: str, value: object) -> None:
    """Reject an engine setting that is unknown, or of another type; `EngineConfig` knows its range."""
    require_name(name, FIELD_NAMES, where)
    kind = ENGINE_TYPES[name]
    if kind is str:
        require_string(f"{where}.{name}", value)
    elif kind is bool or (kind == bool | None and value is not None):
        require_flag(f"{where}.{name}", value)
    elif kind is float or (kind == float | None and value is not None):
        require_number(f"{where}.{name}", value, at_least=-math.inf, infinite=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster, its traffic and tags, the conditions of the run, its SLO, and the mix of its requests.

    `objectives` are those that entries of the mix name.
    `best_effort` comes beside the traffic in experiments of kind hybrid.
    """

    instances: tuple[Instances, ...] = (Instances(),)
    traffic: Traffic = field(default_factory=Traffic)
    tags: Tags = field(default_factory=Tags)
    conditions: Conditions = field(default_factory=Conditions)
    slo: SloTarget = field(default_factory=SloTarget)
    mix: Mix = ()
    objectives: tuple[Objective, ...] = ()
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
        return self.mixed(drawn, seed)

    def mixed(self, work: Workload, seed: int) -> Workload:
        """Give each request of a workload what an entry of the mix asks for."""
        return mixed_workload(work, self.mix, seed, {one.name: one for one in self.objectives})

    def max_request_tokens(self) -> int:
        """The maximum length of a request, prompt and response, on any instance."""
        return max(kind.instance_spec().config.max_model_len for kind in self.instances)

    def changed(self, **changes: Any) -> Scenario:
        """Return a copy with the changes of a nested table."""
        if isinstance(conditions := changes.get("conditions"), Mapping):
            changes = {**changes, "conditions": with_new_names(conditions)}
        return scenario_from(_merged(as_table(self), changes))


def _connected(spec: InstanceSpec) -> InstanceSpec:
    """Give an engine among others with roles the part of the KV connector that its role needs."""
    if spec.config.kv_role:
        return spec
    kv_role = PRODUCER if spec.role == PREFILL_ROLE else CONSUMER
    batcher = spec.config.batcher
    if kv_role == CONSUMER and not batcher_named(batcher).fetches:
        raise ValueError(
            f"batcher: {batcher} serves no decode legs, so only prefill instances can run it; leave batcher out, and "
            f'set it for them in the scenario: prefill_engine = {{ batcher = "{batcher}" }}'
        )
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
    require_tables(table)
    kinds = table.get("instances", [{}])
    kinds = [kinds] if isinstance(kinds, Mapping) else kinds
    traffic = dict(table.get("traffic", {}))
    if "schedule" in traffic:
        traffic["schedule"] = _pairs(traffic["schedule"])
    return Scenario(
        instances=tuple(_instances(kind) for kind in kinds),
        traffic=_made(Traffic, traffic, "traffic"),
        tags=_made(Tags, table.get("tags", {}), "tags"),
        conditions=_conditions(table.get("conditions", {})),
        slo=_made(SloTarget, table.get("slo", {}), "slo"),
        mix=() if table.get("mix", []) == [] else mix_from(table["mix"]),
        objectives=() if table.get("objective", []) == [] else objectives_from(table["objective"]),
        best_effort=_made(BestEffort, table.get("best_effort", {}), "best_effort"),
    )


def require_tables(table: Any) -> None:
    """Refuse unknown tables of a scenario, and what is no table, before anything is read from them."""
    _require_table("scenario", table)
    _require_names(table, TABLES, "scenario")
    kinds = table.get("instances", {})
    if not isinstance(kinds, Mapping | list | tuple) or (not isinstance(kinds, Mapping) and not kinds):
        raise ValueError(f"instances: must be a table, or a list of tables, not {kinds!r:.40}")
    for kind in [kinds] if isinstance(kinds, Mapping) else kinds:
        _require_table("instances", kind)
        for name in ("engine", "prefill_engine"):
            _require_table(f"instances.{name}", kind.get(name, {}))
    for name in ("traffic", "tags", "conditions", "slo", "best_effort"):
        _require_table(name, table.get(name, {}))


def _require_table(where: str, table: Any) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: must be a table, not {table!r:.40}")


def _conditions(table: Mapping[str, Any]) -> Conditions:
    conditions = with_new_names(table)
    _require_names(conditions, CONDITION_NAMES, "conditions")
    if "outages" in conditions:
        outages = conditions["outages"]
        if not isinstance(outages, list | tuple):
            raise ValueError(f"conditions.outages: must be a list of tables, not {outages!r:.40}")
        conditions["outages"] = tuple(_made(Outage, outage, "conditions.outages") for outage in outages)
    if "tenant_weights" in conditions:
        _require_table("conditions.tenant_weights", conditions["tenant_weights"])
        conditions["tenant_weights"] = tuple(sorted(conditions["tenant_weights"].items()))
    return _made(Conditions, conditions, "conditions")


def _pairs(value: Any) -> Any:
    """Return lists of lists as tuples; `Traffic` refuses whatever else there is."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(tuple(pair) if isinstance(pair, list | tuple) else pair for pair in value)


def _instances(table: Mapping[str, Any]) -> Instances:
    settings = {name: tuple(sorted(table.get(name, {}).items())) for name in ("engine", "prefill_engine")}
    return _made(Instances, {**table, **settings}, "instances")


def as_table(scenario: Scenario) -> dict[str, Any]:
    """Write a scenario as a table that `scenario_from` can read."""
    plain: dict[str, Any] = {}
    for part in fields(scenario):
        value = getattr(scenario, part.name)
        if part.name in ("mix", "objectives"):
            continue
        plain[part.name] = [_plain(kind) for kind in value] if part.name == "instances" else _plain(value)
    if scenario.mix:
        plain["mix"] = as_tables(scenario.mix)
    if scenario.objectives:
        plain["objective"] = [_objective_table(one) for one in scenario.objectives]
    return plain


def _objective_table(objective: Objective) -> dict[str, Any]:
    values = {
        "name": objective.name,
        "class": objective.request_class,
        "ttft_slo_s": objective.slo.ttft_s,
        "tpot_slo_s": objective.slo.tpot_s,
        "priority": objective.priority,
        "weight": objective.weight,
        "when_late": objective.when_late,
    }
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> dict[str, Any]:
    plain = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    for name in ("engine", "prefill_engine", "tenant_weights"):
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
    _require_table(where, table)
    _require_names(table, tuple(spec.name for spec in fields(kind)), where)  # type: ignore[arg-type]
    try:
        return kind(**table)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _require_names(table: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in table:
        require_name(name, names, where)
