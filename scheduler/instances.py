"""The instances that a scheduler chooses from: what each serves, what is known of it, and whether it is healthy."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predictor.suggestions import unknown_choice
from scheduler.candidate import Candidate, CandidateStatus
from scheduler.candidates import Candidates, Rows
from scheduler.circuit import CircuitState
from scheduler.instance_table import InstanceTable
from scheduler.reservation_versions import ReservationVersions

if TYPE_CHECKING:
    from scheduler.intentions import Answer

HEAD_OF, VERSION_OF = attrgetter("head"), itemgetter(2)
NO_VERSIONS = ReservationVersions()  # of an instance that is gone; never written to
MAX_SHOWN = 20  # models in an error
MAX_MODELS = 1024  # whose rows are remembered
NO_ROLES: Mapping[str, str] = MappingProxyType({})
NO_ROWS = np.zeros(0, np.intp)
BOTH, PREFILL_ROLE, DECODE_ROLE = ROLES = ("both", "prefill", "decode")
OTHER_ROLE_WORDS = {"prefill-decode": BOTH}  # llm-d's label has this one

NOT_READY: Mapping[str, tuple[CandidateStatus, str]] = {
    "starting": (CandidateStatus.DRAINING, "is starting"),
    "draining": (CandidateStatus.DRAINING, "is draining"),
    "down": (CandidateStatus.STOPPED, "its engine is down"),
}


class RolePool(Enum):
    """The instances that may serve a leg, by their roles."""

    PREFILL = "prefill"  # these and no others serve prefill legs
    DECODE = "decode"  # role decode or both: decode legs, and whole requests


class UnknownModelError(ValueError):
    """No instance serves the model."""


class NoInstanceError(ConnectionError):
    """No instance can take the request now."""


# Why a request is shed: its targets cannot be kept, the admission queue is full, it waited there as long as it may, or
# its tenant or its class has as many waiting requests as it may have.
LATE, QUEUE_FULL, TIMEOUT = "late", "queue_full", "timeout"
TENANT_LIMIT, CLASS_LIMIT = "tenant_limit", "class_limit"
SHED_REASONS = {
    LATE: "no instance can keep the request's targets (ttft_slo_s, tpot_slo_s) now",
    QUEUE_FULL: "the admission queue is full",
    TIMEOUT: "no instance admitted the request for as long as it may wait",
    TENANT_LIMIT: "the client has as many waiting requests as it may have",
    CLASS_LIMIT: "the class of the request has as many waiting requests as it may have",
}


class OverloadedError(ConnectionError):
    """The request is shed, because its targets or a limit cannot be kept now; it may succeed after `retry_after_s`."""

    def __init__(self, reason: str, message: str = "", *, retry_after_s: float | None = None) -> None:
        """Note why; by default the message is that of the reason."""
        super().__init__(message or SHED_REASONS[reason])
        self.reason = reason
        self.retry_after_s = retry_after_s

    def advised(self, retry_after_s: float | None) -> OverloadedError:
        """Return the error with the time after which to retry, and a message that says what to do."""
        is_known = retry_after_s is not None and math.isfinite(retry_after_s)
        when = f"after {retry_after_s:.3g} s" if is_known else "later"
        instead = ", or ask to be served late (when_late: serve)" if self.reason == LATE else ""
        return OverloadedError(self.reason, f"{self}; retry {when}{instead}", retry_after_s=retry_after_s)


@dataclass(slots=True, kw_only=True, eq=False)
class InstanceStatus:
    """What is known of one instance; all of it may be lost without harm.

    `connection` is shared by the instances behind one sidecar address. `reported_state` is the last state that the
    sidecar reported. `num_unseen` counts requests sent there without a reservation since the last report.
    """

    instance_id: str
    models: tuple[str, ...] = ()
    listed: frozenset[str] = frozenset()  # models that its engine lists, adapters included; empty: unknown
    adapters: frozenset[str] = frozenset()  # of them, LoRA adapters
    role: str = "both"
    tier_tpot_s: float = math.inf  # by the list of instances: the bound of its tier
    tier_closed: bool = False  # by the list of instances: it takes only requests of its tier
    is_draining: bool = False  # by the list of instances
    connection: CircuitState = field(default_factory=CircuitState)
    sidecar: CircuitState = field(default_factory=CircuitState)
    engine: CircuitState = field(default_factory=CircuitState)  # fed by the callers that send requests there
    versions: ReservationVersions = field(default_factory=ReservationVersions)
    reported_state: str = "ready"
    indicators: Mapping[str, float] = field(default_factory=dict)
    reported_s: float = 0.0
    age_s: float = 0.0
    num_unseen: int = 0

    @property
    def is_healthy(self) -> bool:
        """Whether it accepts requests and none of its circuits is open."""
        return not (
            self.connection.is_open()
            or self.sidecar.is_open()
            or self.engine.is_open()
            or self.is_draining
            or self.reported_state in NOT_READY
        )

    @property
    def pace(self) -> float:
        """The last reported ratio of real to predicted step time."""
        return self.indicators.get("pace") or 1.0

    def age_at(self, now_s: float) -> float:
        """Return how old the last known indicators are at a time; those reported since are new."""
        return age_of(self.indicators, self.age_s, self.reported_s, now_s)

    def candidate(self, status: CandidateStatus, note: str = "", now_s: float = 0.0) -> Candidate:
        """Return the instance as a candidate with its last known indicators."""
        return Candidate(
            instance_id=self.instance_id,
            status=status,
            note=note,
            indicators=self.indicators,
            age_s=self.age_at(now_s),
            num_unseen=self.num_unseen,
        )

    def unhealthy_candidate(self, now_s: float) -> Candidate | None:
        """Return the instance with the reason why no policy compares it; None where it is to be compared."""
        if self.is_draining:
            candidate = self.candidate(CandidateStatus.DRAINING, "is draining", now_s)
        elif self.reported_state in NOT_READY:
            candidate = self.candidate(*NOT_READY[self.reported_state], now_s)
        elif self.connection.is_open() or self.sidecar.is_open():
            candidate = self.candidate(CandidateStatus.DOWN, "its sidecar failed recently, circuit open", now_s)
        else:
            candidate = self.candidate(CandidateStatus.NOT_QUERIED, "", now_s)
        if not self.engine.may_try(now_s):
            candidate.engine_failed = True
            candidate.note = candidate.note or "its engine failed recently, circuit open"
        return None if candidate.is_compared else candidate


def age_of(indicators: Mapping[str, float], age_s: float, reported_s: float, now_s: float) -> float:
    """Return how old indicators are at a time, which were as old as `age_s` when they were reported."""
    return age_s + max(0.0, now_s - reported_s) if indicators else 0.0


def role_named(text: str) -> str:
    """Return the role that a word means; ValueError for an unknown word."""
    role = OTHER_ROLE_WORDS.get(text, text)
    if role not in ROLES:
        raise unknown_choice("role", text, (*ROLES, *OTHER_ROLE_WORDS))
    return role


class InstanceDirectory:
    """Follows the list of instances, and finds those that may serve a request.

    `suspects` names all instances that may be unhealthy; an instance that is not among them is healthy.
    """

    def __init__(self, table: InstanceTable | None = None, roles: Mapping[str, str] = NO_ROLES) -> None:
        """Start without an instance, or with those of a table, all of them healthy; each does both unless said."""
        self.table = InstanceTable() if table is None else table
        self.by_id: dict[str, InstanceStatus] = {
            name: InstanceStatus(instance_id=name, role=roles.get(name, BOTH)) for name in self.table.known.instance_ids
        }
        self.suspects: set[str] = set()
        self._rows_of_model: dict[str, Rows | None] = {}
        self.adapters: frozenset[str] = frozenset()  # LoRA adapters that any instance lists
        self.has_roles = False  # whether any instance serves only one leg
        self._is_prefill: npt.NDArray[np.bool_] | None = None  # by row; None where no instance has a role
        self._rows_in_pool: dict[tuple[int, RolePool], tuple[Rows | None, Rows]] = {}
        self._versions = [one.versions for one in self.by_id.values()]  # by row
        self._take_roles()

    def update(self, statuses: Iterable[InstanceStatus]) -> None:
        """Take a new list of instances; one whose status is another object than before is unknown again."""
        before = self.by_id
        self.by_id = {one.instance_id: one for one in sorted(statuses, key=lambda one: one.instance_id)}
        self._rows_of_model.clear()
        self._take_adapters()
        self._take_roles()
        self._versions = [one.versions for one in self.by_id.values()]
        self.table.follow(name for name, one in self.by_id.items() if before.get(name) is one)
        self.table.follow(self.by_id)
        for name, one in self.by_id.items():
            self.table.set_tier(name, one.tier_tpot_s, closed=one.tier_closed)
        self.suspects.intersection_update(self.by_id)
        self.suspects.update(name for name, one in self.by_id.items() if not one.is_healthy)

    def _take_roles(self) -> None:
        roles = [one.role for one in self.by_id.values()]
        is_prefill = np.array([role == PREFILL_ROLE for role in roles], np.bool_)
        self.has_roles = any(role != BOTH for role in roles)
        self._is_prefill = is_prefill if self.has_roles else None
        self._rows_in_pool.clear()

    def rows_in_pool(self, rows: Rows | None, pool: RolePool) -> Rows | None:
        """Return those of some rows whose roles serve the legs of a pool."""
        is_prefill = self._is_prefill
        if is_prefill is None:
            return rows if pool is not RolePool.PREFILL else NO_ROWS
        known = self._rows_in_pool.get((id(rows), pool))
        if known is not None and known[0] is rows:
            return known[1]
        all_rows = np.arange(len(is_prefill)) if rows is None else rows
        found: Rows = all_rows[is_prefill[all_rows] == (pool is RolePool.PREFILL)]
        if len(self._rows_in_pool) >= MAX_MODELS:
            self._rows_in_pool.clear()
        self._rows_in_pool[id(rows), pool] = rows, found
        return found

    def models(self) -> list[str]:
        """Return the models that instances name."""
        return sorted({name for one in self.by_id.values() for name in one.models})

    def set_listed(self, instance_id: str, names: frozenset[str], adapters: frozenset[str]) -> None:
        """Take the models that an instance's engine lists, and which of them are LoRA adapters."""
        one = self.by_id[instance_id]
        if (one.listed, one.adapters) != (names, adapters):
            one.listed, one.adapters = names, adapters
            self._rows_of_model.clear()
            self._take_adapters()

    def _take_adapters(self) -> None:
        self.adapters = frozenset(name for one in self.by_id.values() for name in one.adapters)

    def rows_of_model(self, model: str) -> Rows | None:
        """Return the rows of the instances that may serve a model; None for all, no model for the only one there is."""
        if not self.by_id:
            raise NoInstanceError("no instance is known")
        if model not in self._rows_of_model:
            rows = self._look_up(model)
            if len(self._rows_of_model) >= MAX_MODELS:
                return rows
            self._rows_of_model[model] = rows
        return self._rows_of_model[model]

    def _look_up(self, model: str) -> Rows | None:
        models = self.models()
        if not model:
            if len(models) > 1:
                raise ValueError(f"request.model: is missing; there are {', '.join(models)}")
            return None
        is_listed = any(model in one.listed for one in self.by_id.values())
        found = [name for name, one in self.by_id.items() if _may_serve(one, model, is_listed=is_listed)]
        if not found:
            known = sorted({*models, *self.adapters})
            raise UnknownModelError(
                f"request.model: The model `{model}` does not exist. There are {', '.join(known[:MAX_SHOWN])}"
                f"{', …' if len(known) > MAX_SHOWN else ''}."
            )
        if len(found) == len(self.by_id):
            return None
        return np.array([self.table.row_of[name] for name in found], np.intp)

    def unhealthy(self, rows: Rows | None, excluded: Collection[str], now_s: float) -> list[Candidate]:
        """Return those in some rows that no policy compares, each with the reason."""
        if not self.suspects and not excluded:
            return []
        row_of, candidates = self.table.row_of, []
        serving = None if rows is None else set(rows.tolist())
        for name in sorted(self.suspects.union(excluded)):
            status = self.by_id.get(name)
            if status is None or (serving is not None and row_of[name] not in serving):
                continue
            if status.is_healthy:
                self.suspects.discard(name)
            candidate: Candidate | None = None
            if name in excluded:
                candidate = status.candidate(CandidateStatus.EXCLUDED, "excluded by the caller", now_s)
            else:
                candidate = status.unhealthy_candidate(now_s)
            if candidate is not None:
                candidates.append(candidate)
        return candidates

    def rows_without(self, rows: Rows | None, candidates: Collection[Candidate]) -> Rows | None:
        """Return rows without those of some candidates."""
        if not candidates:
            return rows
        out = [self.table.row_of[candidate.instance_id] for candidate in candidates]
        all_rows = np.arange(len(self.by_id)) if rows is None else rows
        return all_rows[~np.isin(all_rows, out)]

    def reserved_since(self, candidates: Candidates, answers: Sequence[Answer]) -> list[int]:
        """Count, for each candidate, the reservations made after its answer."""
        if candidates.known is not self.table.known:  # the list changed: some may be gone
            known = [self.by_id.get(name) for name in candidates.instance_ids]
            versions = [NO_VERSIONS if one is None else one.versions for one in known]
        elif candidates.rows is None:
            versions = self._versions
        else:
            versions = [self._versions[row] for row in candidates.rows.tolist()]
        if list(map(HEAD_OF, versions)) == list(map(VERSION_OF, answers)):
            return [0] * len(answers)
        return [one.since(answer.version, answer.epoch) for one, answer in zip(versions, answers, strict=True)]

    def suspect(self, instance_id: str) -> None:
        """Have an instance's health checked at the next decision."""
        self.suspects.add(instance_id)

    def engine_failed(self, instance_id: str, now_s: float) -> None:
        """Record that a request that was sent to an instance failed there."""
        status = self.by_id.get(instance_id)
        if status is not None:
            status.engine.failed(now_s)
            self.suspects.add(instance_id)

    def engine_succeeded(self, instance_id: str) -> None:
        """Record that a request that was sent to an instance completed."""
        status = self.by_id.get(instance_id)
        if status is not None:
            status.engine.succeeded()


def _may_serve(one: InstanceStatus, model: str, *, is_listed: bool) -> bool:
    """Return whether an instance may serve a model: it has it, or nothing says which ones it has.

    Where any engine lists the model, an instance whose engine lists others does not serve it.
    """
    if model in one.models or model in one.listed:
        return True
    return not one.models and not (is_listed and one.listed)
