"""Mixes of requests: shares of requests with the same class, priority, weight and targets, from a TOML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.gain import ServiceLevels, default_levels
from predictor.request import CLASSES, MAX_PRIORITY, RequestFacts, Slo
from predictor.suggestions import require_choice
from scheduler.objectives import (
    MAX_NAME,
    NO_OBJECTIVE,
    NO_OBJECTIVES,
    SERVE_LATE,
    WHEN_LATE,
    Objective,
    Objectives,
    objective_named,
)
from scheduler.toml_tables import entries_from, entries_in, require_fields, require_positive, require_text
from simulator.codec import read_text
from simulator.workload import Workload

STREAM = 15  # of random numbers: other draws of a run with the same seed are independent of these
KEYS = {"class": "request_class"}  # names in a file that differ from those of `MixEntry`
FIELDS = ("name", "share", "later_share", "class", "priority", "weight", "ttft_slo_s", "ttft_slo_token_s",
          "tpot_slo_s", "when_late", "tenant", "objective")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MixEntry:
    """A share of the requests; what it leaves at None stays as it is in the requests themselves.

    What neither says is that of the `objective`, by its name in a table of objectives.
    `ttft_slo_token_s` is added to the target for the first token for each token of the prompt: where prompts are long,
    one target for all asks what no engine can do. With a `later_share` in any entry of a mix, the second half of the
    requests is drawn by these instead; an entry without one keeps its share.
    """

    name: str
    share: float
    later_share: float | None = None
    request_class: str | None = None
    priority: int | None = None
    weight: float | None = None
    ttft_slo_s: float | None = None
    ttft_slo_token_s: float | None = None
    tpot_slo_s: float | None = None
    when_late: str | None = None  # one of `scheduler.objectives.WHEN_LATE`
    tenant: str | None = None
    objective: str | None = None

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field as a file has it."""
        require_text("name", self.name)
        for field in ("share", "later_share", "weight", "ttft_slo_s", "ttft_slo_token_s", "tpot_slo_s"):
            value = getattr(self, field)
            if value is not None or field == "share":
                require_positive(field, value)
        if self.ttft_slo_token_s is not None and self.ttft_slo_s is None:
            raise ValueError("ttft_slo_token_s: is added to ttft_slo_s, which is missing")
        if self.request_class is not None and self.request_class not in CLASSES:
            raise ValueError(f"class: {self.request_class!r} is neither {' nor '.join(CLASSES)}")
        if self.when_late is not None:
            require_choice("when_late", self.when_late, WHEN_LATE)
        if self.tenant is not None:
            require_text("tenant", self.tenant)
        if self.objective is not None:
            require_name("objective", self.objective)
        if self.priority is not None and (type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY):
            raise ValueError(f"priority: must be a whole number within 32 bits, not {self.priority!r}")

    def ttft_s(self, prompt_tokens: int) -> float:
        """Return the target for the first token of a request with such a prompt, where this entry gives one."""
        assert self.ttft_slo_s is not None
        return self.ttft_slo_s + (self.ttft_slo_token_s or 0.0) * prompt_tokens

    def objective_in(self, objectives: Objectives) -> Objective:
        """Return this entry's objective; one that asks for nothing where it has none, or the table does not have it."""
        return NO_OBJECTIVE if self.objective is None else objectives.get(self.objective, NO_OBJECTIVE)

    def applied(self, request: RequestFacts, objective: Objective = NO_OBJECTIVE) -> RequestFacts:
        """Return a request with this entry's facts, and below those of the request those of an objective."""
        old = request.slo or Slo()
        ttft_s = objective.slo.ttft_s if old.ttft_s is None else old.ttft_s
        tpot_s = objective.slo.tpot_s if old.tpot_s is None else old.tpot_s
        slo = Slo(
            ttft_s=ttft_s if self.ttft_slo_s is None else self.ttft_s(request.prompt_tokens),
            tpot_s=tpot_s if self.tpot_slo_s is None else float(self.tpot_slo_s),
        )

        def fact(name: str) -> Any:
            given, own = getattr(self, name), getattr(request, name)
            if given is not None:
                return given
            return getattr(objective, name) if own == getattr(NO_OBJECTIVE, name) else own

        return replace(
            request,
            request_class=fact("request_class"),
            priority=fact("priority"),
            weight=float(fact("weight")),
            slo=None if slo == Slo() else slo,
            client_id=request.client_id if self.tenant is None else self.tenant,
        )


def require_name(field: str, value: Any) -> None:
    """Refuse what cannot be the name of an objective, which travels in a header."""
    require_text(field, value)
    if len(value) > MAX_NAME or not (value.isascii() and value.isprintable()) or value != value.strip():
        raise ValueError(f"{field}: must be at most {MAX_NAME} printable ASCII characters, without spaces around")


Mix = tuple[MixEntry, ...]


def mix_from_file(path: str) -> Mix:
    """Read a mix: a TOML file with a table [[mix]] for each entry."""
    return entries_in(read_text(path), path, "mix", mix_from)


def mix_from(tables: Any) -> Mix:
    """Read the entries of a mix; the error for an invalid one has its index."""
    return entries_from(tables, "mix", _entry_from)


def _entry_from(table: Mapping[str, Any]) -> MixEntry:
    require_fields(table, FIELDS, ("name", "share"))
    return MixEntry(**{KEYS.get(field, field): table[field] for field in FIELDS if field in table})


def as_tables(mix: Mix) -> list[dict[str, Any]]:
    """Write a mix as tables that `mix_from` can read."""
    tables = []
    for entry in mix:
        values = {field: getattr(entry, KEYS.get(field, field)) for field in FIELDS}
        tables.append({field: value for field, value in values.items() if value is not None})
    return tables


def require_objectives(mix: Mix, objectives: Objectives) -> None:
    """Refuse a mix that names an objective which a table does not have."""
    for index, entry in enumerate(mix):
        field = f"mix[{index}].objective"
        if entry.objective is not None and not objectives:
            raise ValueError(f"{field}: {entry.objective!r} needs a table of objectives (--objectives FILE)")
        if entry.objective is not None:
            objective_named(entry.objective, objectives, field=field)


def drawn_entries(mix: Mix, num: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw the entry of each request, by shares; the same seed gives the same entries."""
    generator = np.random.default_rng([seed, STREAM])
    shares = np.array([entry.share for entry in mix], np.float64)
    if all(entry.later_share is None for entry in mix):
        return generator.choice(len(mix), size=num, p=shares / shares.sum())
    later = np.array([entry.share if entry.later_share is None else entry.later_share for entry in mix], np.float64)
    halves = (((num + 1) // 2, shares), (num // 2, later))
    parts = [generator.choice(len(mix), size=size, p=one / one.sum()) for size, one in halves]
    return np.concatenate(parts)


def mixed_workload(work: Workload, mix: Mix, seed: int, objectives: Objectives = NO_OBJECTIVES) -> Workload:
    """Give each request of a workload the service level of an entry, drawn by shares; no mix changes nothing."""
    require_objectives(mix, objectives)
    if not mix:
        return work
    named = [entry.objective_in(objectives) for entry in mix]
    levels = work.service or default_levels(len(work))
    drawn = drawn_entries(mix, len(work), seed)

    def column(name: str, old: npt.NDArray[Any], below: Sequence[Any], unset: float = math.nan) -> Any:
        """Replace what the entries give, and what neither they nor the requests do by what is below."""
        given = [getattr(entry, name) for entry in mix]
        if name == "request_class":
            given = [None if one is None else CLASSES.index(one) for one in given]
        new = np.array([0 if one is None else one for one in given], old.dtype)
        is_unset = np.isnan(old) if math.isnan(unset) else old == unset
        own = np.where(is_unset, np.array([unset if one is None else one for one in below], old.dtype)[drawn], old)
        return np.where(np.array([one is not None for one in given])[drawn], new[drawn], own)

    def words(given: Sequence[str | None], otherwise: str) -> npt.NDArray[np.str_] | None:
        if not any(given):
            return None
        return np.array([otherwise if one is None else one for one in given])[drawn]

    token_s = np.array([entry.ttft_slo_token_s or 0.0 for entry in mix])[drawn]
    service = ServiceLevels(
        ttft_slo_s=column("ttft_slo_s", levels.ttft_slo_s, [one.slo.ttft_s for one in named])
        + token_s * work.lengths.prompt_tokens,
        tpot_slo_s=column("tpot_slo_s", levels.tpot_slo_s, [one.slo.tpot_s for one in named]),
        weight=column("weight", levels.weight, [one.weight for one in named], 1),
        priority=column("priority", levels.priority, [one.priority for one in named], 0),
        request_class=column(
            "request_class", levels.request_class, [CLASSES.index(one.request_class) for one in named], 0
        ),
        mix_entry=np.array([entry.name for entry in mix])[drawn],
        tenant=words([entry.tenant for entry in mix], ""),
        when_late=words(
            [
                one.when_late if entry.when_late is None and entry.objective is not None else entry.when_late
                for entry, one in zip(mix, named, strict=True)
            ],
            SERVE_LATE,
        ),
    )
    return replace(work, service=service)


def mixed(
    requests: Sequence[RequestFacts], mix: Mix, seed: int, objectives: Objectives = NO_OBJECTIVES
) -> tuple[list[RequestFacts], list[MixEntry]]:
    """Return requests with the facts of an entry, drawn by shares, for each of them; and the entries.

    An objective that the table does not have gives no facts.
    """
    entries = [mix[index] for index in drawn_entries(mix, len(requests), seed).tolist()]
    pairs = zip(requests, entries, strict=True)
    return [entry.applied(request, entry.objective_in(objectives)) for request, entry in pairs], entries
