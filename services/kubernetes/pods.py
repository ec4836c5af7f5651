"""Instances from pods and an InferencePool, and objectives from InferenceObjectives; values only, no calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from predictor.request import BEST_EFFORT
from scheduler.instances import BOTH, DECODE_ROLE, PREFILL_ROLE
from scheduler.objectives import SERVE_LATE, SHED, Objective, objectives_from
from services.instances.drains import Drain
from services.instances.instance import DRAINING, READY, Instance
from services.kubernetes.api import Object
from services.security.certificates import engine_access

ROLE_LABEL = "llm-d.ai/role"
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
OWN = "block-serving/"  # prefix of our labels and annotations
TIER_LABEL = f"{OWN}tier"
SIDECAR, MODELS = f"{OWN}sidecar", f"{OWN}models"
DRAIN_S = f"{OWN}drain-s"
DATA_PARALLEL, MAX_RANKS = f"{OWN}data-parallel-size", 256  # ranks behind one port
BEFORE_END_S = 20.0  # of a pod that is being deleted, at which requests leave it
TIER_TPOT_MS, TIER_CLOSED = f"{OWN}tier-tpot-ms", f"{OWN}tier-closed"
OBJECTIVE_NUMBERS = ("ttft-slo-s", "tpot-slo-s", "weight")
OBJECTIVE_WORDS = ("class", "when-late")
LOWEST_PRIORITY = 1 - 2**31  # whose opposite has 32 bits, too


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePool:
    """Which pods are endpoints, and on which ports; each port of a pod is an instance."""

    name: str
    labels: Mapping[str, str]
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What makes instances of a pod. `declared_ports` are those that its containers name; none if one names none."""

    name: str
    address: str
    is_ready: bool
    is_deleted: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    declared_ports: frozenset[int]
    ends_unix_s: float = math.inf  # of a pod that is being deleted: when it is killed
    grace_s: float = 0.0  # from the request to delete it until then


def pool_from(item: Object) -> InferencePool:
    """Read an InferencePool v1; ValueError names the field."""
    spec = item.get("spec") or {}
    labels = (spec.get("selector") or {}).get("matchLabels") or {}
    ports = tuple(port["number"] for port in spec.get("targetPorts") or ())
    if not labels:
        raise ValueError("spec.selector.matchLabels: is empty")
    if not ports or not all(type(port) is int and 0 < port < 65536 for port in ports):
        raise ValueError("spec.targetPorts: must be a list of ports")
    return InferencePool(name=item["metadata"]["name"], labels=dict(labels), ports=ports)


def pod_from(item: Object) -> Pod:
    """Read a pod."""
    metadata, status, spec = item["metadata"], item.get("status") or {}, item.get("spec") or {}
    conditions = {one.get("type"): one.get("status") for one in status.get("conditions") or ()}
    containers = spec.get("containers") or ()
    is_declared = all(container.get("ports") for container in containers)  # else the engine may be one without any
    containers = [*containers, *(spec.get("initContainers") or ())] if is_declared else ()
    return Pod(
        name=metadata["name"],
        address=status.get("podIP") or "",
        is_ready=conditions.get("Ready") == "True",
        is_deleted=bool(metadata.get("deletionTimestamp")),
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        declared_ports=frozenset(
            port["containerPort"] for container in containers for port in container.get("ports") or ()
        ),
        ends_unix_s=_unix_s(metadata.get("deletionTimestamp")),
        grace_s=float(metadata.get("deletionGracePeriodSeconds") or 0),
    )


def _unix_s(text: Any) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return math.inf


def selector_text(labels: Mapping[str, str]) -> str:
    """Write a label selector as the API server takes it."""
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def instances_of(pod: Pod, ports: Sequence[int], sidecar_port: int) -> tuple[Instance, ...]:
    """Return the instances of a ready pod; ValueError says why a pod that should have some has none.

    Those of a pod that is being deleted drain until it is gone.
    """
    if not (pod.is_ready or pod.is_deleted) or not pod.address:
        return ()
    role = role_from_label(pod.labels.get(ROLE_LABEL, BOTH))
    if role is None:
        return ()
    if pod.declared_ports and not pod.declared_ports.intersection(ports):
        declared = ",".join(map(str, sorted(pod.declared_ports)))
        raise ValueError(f"targetPorts {','.join(map(str, ports))}: the pod has none of them, but {declared}")
    active = _active_ports(pod.annotations, ports)
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    tpot_ms = pod.annotations.get(TIER_TPOT_MS, "")
    num_ranks = _num_ranks(pod.annotations, ports)
    places = [(port, rank) for port in ports for rank in range(num_ranks)]
    return tuple(
        Instance(
            instance_id=pod.name if len(places) == 1 else f"{pod.name}-rank-{place}",
            engine_url=f"{engine_access().engine_scheme}://{host}:{port}",
            sidecar_address=_sidecar_address(pod.annotations.get(SIDECAR, ""), host, sidecar_port),
            models=tuple(name.strip() for name in pod.annotations.get(MODELS, "").split(",") if name.strip()),
            role=role,
            tier=pod.labels.get(TIER_LABEL, ""),
            tier_tpot_s=_number(TIER_TPOT_MS, tpot_ms) / 1e3 if tpot_ms else math.inf,
            tier_closed=pod.annotations.get(TIER_CLOSED, "") == "true",
            state=DRAINING if pod.is_deleted else READY,
            drain=_drain_of(pod) if pod.is_deleted else None,
            data_parallel_rank=rank if num_ranks > 1 else None,
        )
        for place, (port, rank) in enumerate(places)
        if port in active
    )


def _num_ranks(annotations: Mapping[str, str], ports: Sequence[int]) -> int:
    """Return how many data-parallel ranks each port serves; where each rank has a port of its own, that is one."""
    text = annotations.get(DATA_PARALLEL, "1")
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_RANKS):
        raise ValueError(f"annotation {DATA_PARALLEL}: must be a whole number from 1 to {MAX_RANKS}, not {text!r}")
    if int(text) > 1 and len(ports) > 1:
        raise ValueError(f"annotation {DATA_PARALLEL}: goes with one port, and the pool has {len(ports)}")
    return int(text)


def _drain_of(pod: Pod) -> Drain:
    """Return when the requests of a pod that is being deleted leave: before its grace period ends."""
    given = pod.annotations.get(DRAIN_S, "")
    deadline_s = pod.ends_unix_s - min(BEFORE_END_S, pod.grace_s / 2)
    if given:
        deadline_s = min(deadline_s, pod.ends_unix_s - pod.grace_s + max(0.0, _number(DRAIN_S, given)))
    return Drain(deadline_unix_s=deadline_s)


def role_from_label(label: str) -> str | None:
    """Return the role that a label means; None for a pod that only encodes, which serves no request by itself."""
    parts = set(label.split("-"))
    if label == BOTH or {PREFILL_ROLE, DECODE_ROLE} <= parts:
        return BOTH
    for role in (PREFILL_ROLE, DECODE_ROLE):
        if role in parts:
            return role
    if label == "encode":
        return None
    raise ValueError(f"label {ROLE_LABEL}: {label!r} is no role")


def _active_ports(annotations: Mapping[str, str], ports: Sequence[int]) -> frozenset[int]:
    for name in ACTIVE_PORTS:
        if name in annotations:
            given = [text.strip() for text in annotations[name].split(",")]
            unknown = [text for text in given if text not in map(str, ports)]
            if unknown:
                raise ValueError(f"annotation {name}: {unknown[0]!r} is no port of the pool")
            return frozenset(map(int, given))
    return frozenset(ports)


def _sidecar_address(given: str, host: str, port: int) -> str:
    """Return the convention, or what the annotation says: a port of the pod, or host:port."""
    if not given:
        return f"{host}:{port}"
    return f"{host}:{given}" if given.isdigit() else given


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"annotation {name}: {text!r} is no number") from None


def objective_from_resource(item: Object, pool: str) -> Objective | None:
    """Read an InferenceObjective of a pool; None where it belongs to another one.

    Its higher priority comes first, ours is the lower; a negative one means that requests may be shed. Annotations add
    what it has no fields for.
    """
    spec, metadata = item.get("spec") or {}, item["metadata"]
    if ((spec.get("poolRef") or {}).get("name")) != pool:
        return None
    priority = spec.get("priority") or 0
    table: dict[str, Any] = {"name": metadata["name"], "priority": -max(priority, LOWEST_PRIORITY)}
    table |= {"when_late": SHED, "class": BEST_EFFORT} if priority < 0 else {"when_late": SERVE_LATE}
    annotations = metadata.get("annotations") or {}
    for name in (*OBJECTIVE_NUMBERS, *OBJECTIVE_WORDS):
        text = annotations.get(OWN + name)
        if text is not None:
            table[name.replace("-", "_")] = _number(OWN + name, text) if name in OBJECTIVE_NUMBERS else text
    (objective,) = objectives_from([table])
    return objective


def reason_for_none(pods: Iterable[Pod], selector: str, namespace: str) -> str:
    """Say why pods give no instance; an example is enough."""
    matched = sorted(pods, key=lambda pod: pod.name)
    if not matched:
        return f"no pod in namespace {namespace} matches {selector}"
    waiting = [pod for pod in matched if not pod.is_ready or pod.is_deleted]
    if waiting:
        state = "is being deleted" if waiting[0].is_deleted else "is not ready"
        return f"{len(waiting)} of {len(matched)} pods that match {selector} are not ready: {waiting[0].name} {state}"
    return f"none of the {len(matched)} pods that match {selector} can be used"
