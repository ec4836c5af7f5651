"""Mixes of requests: shares of requests with the same class, priority, weight and targets, from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.gain import ServiceLevels, default_levels
from predictor.request import CLASSES, MAX_PRIORITY, RequestFacts, Slo
from predictor.suggestions import require_known
from simulator.codec import read_text
from simulator.workload import Workload

MAX_NUMBER = 1e9
STREAM = 15  # of random numbers: other draws of a run with the same seed are independent of these
KEYS = {"class": "request_class"}  # names in a file that differ from those of `MixEntry`
FIELDS = ("name", "share", "class", "priority", "weight", "ttft_slo_s", "tpot_slo_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixEntry:
    """A share of the requests; what it leaves at None stays as it is in the requests themselves."""

    name: str
    share: float
    request_class: str | None = None
    priority: int | None = None
    weight: float | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field as a file has it."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name: must be a text, not {self.name!r}")
        for field in ("share", "weight", "ttft_slo_s", "tpot_slo_s"):
            value = getattr(self, field)
            if value is None and field != "share":
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value <= MAX_NUMBER):
                raise ValueError(f"{field}: must be a number above 0, at most {MAX_NUMBER:g}, not {value!r:.20}")
        if self.request_class is not None and self.request_class not in CLASSES:
            raise ValueError(f"class: {self.request_class!r} is neither {' nor '.join(CLASSES)}")
        if self.priority is not None and (type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY):
            raise ValueError(f"priority: must be a whole number within 32 bits, not {self.priority!r}")

    def applied(self, request: RequestFacts) -> RequestFacts:
        """Return a request with this entry's facts."""
        old = request.slo or Slo()
        slo = Slo(
            ttft_s=old.ttft_s if self.ttft_slo_s is None else float(self.ttft_slo_s),
            tpot_s=old.tpot_s if self.tpot_slo_s is None else float(self.tpot_slo_s),
        )
        return replace(
            request,
            request_class=request.request_class if self.request_class is None else self.request_class,
            priority=request.priority if self.priority is None else self.priority,
            weight=request.weight if self.weight is None else float(self.weight),
            slo=None if slo == Slo() else slo,
        )


Mix = tuple[MixEntry, ...]


def mix_from_file(path: str) -> Mix:
    """Read a mix: a TOML file with a table [[mix]] for each entry."""
    try:
        data = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    try:
        require_known(data, ("mix",), "table")
        return mix_from(data.get("mix"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def mix_from(tables: Any) -> Mix:
    """Read the entries of a mix; the error for an invalid one has its index."""
    if not isinstance(tables, Sequence) or isinstance(tables, str) or not tables:
        raise ValueError("mix: must be a list of tables, one [[mix]] for each entry")
    entries = []
    for index, table in enumerate(tables):
        try:
            entries.append(_entry_from(table))
        except ValueError as error:
            raise ValueError(f"mix[{index}].{error}") from None
    names = [entry.name for entry in entries]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"mix[{index}].name: {name!r} is there twice")
    return tuple(entries)


def _entry_from(table: Any) -> MixEntry:
    if not isinstance(table, Mapping):
        raise ValueError(f"name: the entry must be a table, not {table!r:.40}")
    require_known(table, FIELDS, "field")
    for field in ("name", "share"):
        if field not in table:
            raise ValueError(f"{field}: is missing")
    return MixEntry(**{KEYS.get(field, field): table[field] for field in FIELDS if field in table})


def as_tables(mix: Mix) -> list[dict[str, Any]]:
    """Write a mix as tables that `mix_from` can read."""
    tables = []
    for entry in mix:
        values = {field: getattr(entry, KEYS.get(field, field)) for field in FIELDS}
        tables.append({field: value for field, value in values.items() if value is not None})
    return tables


def drawn_entries(mix: Mix, num: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw the entry of each request, by shares; the same seed gives the same entries."""
    shares = np.array([entry.share for entry in mix], np.float64)
    generator = np.random.default_rng([seed, STREAM])
    return generator.choice(len(mix), size=num, p=shares / shares.sum())


def mixed_workload(work: Workload, mix: Mix, seed: int) -> Workload:
    """Give each request of a workload the service level of an entry, drawn by shares; no mix changes nothing."""
    if not mix:
        return work
    levels = work.service or default_levels(len(work))
    drawn = drawn_entries(mix, len(work), seed)

    def column(name: str, old: npt.NDArray[Any], value: Callable[[Any], Any] = lambda value: value) -> Any:
        """Replace what the entries give."""
        given = [getattr(entry, name) for entry in mix]
        new = np.array([0 if one is None else value(one) for one in given], old.dtype)
        return np.where(np.array([one is not None for one in given])[drawn], new[drawn], old)

    service = ServiceLevels(
        ttft_slo_s=column("ttft_slo_s", levels.ttft_slo_s),
        tpot_slo_s=column("tpot_slo_s", levels.tpot_slo_s),
        weight=column("weight", levels.weight),
        priority=column("priority", levels.priority),
        request_class=column("request_class", levels.request_class, CLASSES.index),
        mix_entry=np.array([entry.name for entry in mix])[drawn],
    )
    return replace(work, service=service)


def mixed(requests: Sequence[RequestFacts], mix: Mix, seed: int) -> tuple[list[RequestFacts], list[str]]:
    """Return requests with the facts of an entry, drawn by shares, for each of them; and the entries' names."""
    entries = [mix[index] for index in drawn_entries(mix, len(requests), seed).tolist()]
    given = [entry.applied(request) for request, entry in zip(requests, entries, strict=True)]
    return given, [entry.name for entry in entries]
