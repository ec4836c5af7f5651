"""The instances that a request could go to, as the columns of numbers that a policy reads."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from predictor.request import NO_ADAPTER
from scheduler.adapters import AdapterIndex
from scheduler.columns import Column
from scheduler.indicators import INDEX_OF, INDICATORS, IndicatorSource, require_indicator

Rows = npt.NDArray[np.intp]
SECONDS_PER_MINUTE = 60.0


@dataclass(slots=True, kw_only=True, eq=False)
class RequestIndicators:
    """Numbers about a request that policies read; `prefix_class` is equal for requests that share a cached prefix.

    `due_s` is when its first token is due, on the scheduler's clock.
    """

    prompt_tokens: int = 1
    tag_tokens: float = math.nan
    due_s: float = math.inf
    tpot_slo_s: float = math.inf
    late: int = 0  # 1: it dropped its deadlines, as they cannot be kept or it takes long under overload
    prefix_class: Hashable = None
    adapter: int = NO_ADAPTER  # `predictor.request.adapter_number`


ANY_REQUEST = RequestIndicators()


@dataclass(slots=True, kw_only=True)
class InstanceColumns:
    """The last known state of all instances: one row per instance in every array, in the order of their ids.

    `numbers` are small integers that identify instances for the lifetime of the process. `reported` has one line per
    indicator of `REPORTED` and one column per instance; `reported_s` is the time at which these values held.
    `sent_last_minute` counts the requests that this scheduler sent within a minute. `tier_tpot_s` and `tier_closed` are
    the tiers that the list of instances gives.
    """

    instance_ids: tuple[str, ...]
    numbers: Rows
    reported: npt.NDArray[np.float64]
    reported_s: Column
    sent_last_minute: Column
    tier_tpot_s: Column
    tier_closed: Column
    adapters: AdapterIndex = field(default_factory=AdapterIndex)


@dataclass(slots=True, kw_only=True)
class Candidates:
    """All instances, or those in some rows; in the order of their ids, so that the first id wins a tie.

    `columns` caches the indicators that were added for this request, looked up or derived. `excluded_by` lists the
    reason of every reduction so far and the rows before it.
    """

    known: InstanceColumns
    now_s: float = 0.0
    request: RequestIndicators = ANY_REQUEST
    rows: Rows | None = None
    columns: dict[str, Column] = field(default_factory=dict)
    excluded_by: tuple[tuple[str, Rows | None], ...] = ()

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.known.instance_ids) if self.rows is None else len(self.rows)

    def __getitem__(self, name: str) -> Column:
        """Return an indicator with one value per candidate; NaN where it is unknown."""
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = self._look_up(name)
        return column

    def add(self, columns: Mapping[str, Column]) -> None:
        """Add indicators of this request."""
        self.columns.update(columns)

    def only(self, positions: Rows, reason: str = "") -> Candidates:
        """Keep the candidates at these positions, given in ascending order; a reason is recorded for the others."""
        return Candidates(
            known=self.known,
            now_s=self.now_s,
            request=self.request,
            rows=positions if self.rows is None else self.rows[positions],
            columns={name: column[positions] for name, column in self.columns.items()},
            excluded_by=(*self.excluded_by, (reason, self.rows)) if reason else self.excluded_by,
        )

    def left_out(self) -> Iterator[tuple[str, str]]:
        """Yield the instances that were left out, each with the reason."""
        after = self._all_rows(self.rows)
        for reason, rows in reversed(self.excluded_by):
            before = self._all_rows(rows)
            for row in np.setdiff1d(before, after, assume_unique=True).tolist():
                yield self.known.instance_ids[row], reason
            after = before

    def row(self, position: int) -> int:
        """Return the row, among all instances, of the candidate at a position."""
        return position if self.rows is None else int(self.rows[position])

    def instance_id(self, position: int) -> str:
        """Return the id of the candidate at a position."""
        return self.known.instance_ids[self.row(position)]

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """The ids of all candidates."""
        ids = self.known.instance_ids
        return ids if self.rows is None else tuple([ids[row] for row in self.rows.tolist()])

    @property
    def numbers(self) -> Rows:
        """Numbers that identify the candidates from one request to the next."""
        return self.known.numbers if self.rows is None else self.known.numbers[self.rows]

    @property
    def prompt_tokens(self) -> int:
        """The length of the request's prompt."""
        return self.request.prompt_tokens

    @property
    def tpot_slo_s(self) -> float:
        """The request's target for the time per token; infinite without one."""
        return self.request.tpot_slo_s

    def _look_up(self, name: str) -> Column:  # noqa: PLR0911 - one for each source
        index = INDEX_OF.get(name)
        if index is not None:
            reported = self.known.reported[index]
            if self.rows is not None:
                reported = reported[self.rows]
            return reported if name != "requests_per_minute" else self._requests_per_minute(reported)
        indicator = INDICATORS.get(name) or require_indicator(name)
        if indicator.formula is not None:
            return indicator.formula(self)
        if name == "age_s":
            return self.now_s - self._of_candidates(self.known.reported_s)
        if name == "ttft_left_s":
            return np.full(len(self), self.request.due_s - self.now_s)
        if indicator.source is IndicatorSource.ADAPTERS:
            of = self.known.adapters.active if name == "adapter_active" else self.known.adapters.loaded
            return self._of_candidates(of(self.request.adapter, self.known.instance_ids))
        if indicator.source is IndicatorSource.LISTED:
            return self._listed(name)
        if name in ("prompt_tokens", "tag_tokens", "tpot_slo_s", "late"):
            return np.full(len(self), getattr(self.request, name), np.float64)
        return np.full(len(self), indicator.otherwise)

    def _requests_per_minute(self, reported: Column) -> Column:
        """Return what this scheduler sent, or what was reported if that is more; a report decays within the minute."""
        left = np.clip(1.0 - self["age_s"] / SECONDS_PER_MINUTE, 0.0, 1.0)
        return np.fmax(self._of_candidates(self.known.sent_last_minute), reported * left)

    def _listed(self, name: str) -> Column:
        column = self._of_candidates(getattr(self.known, name))
        if name == "tier_closed" and self.request.tpot_slo_s == math.inf:
            return np.where(self["tier_tpot_s"] < math.inf, column, 0.0)  # a closed pool takes such requests
        return column

    def _of_candidates(self, column: Column) -> Column:
        return column if self.rows is None else column[self.rows]

    def _all_rows(self, rows: Rows | None) -> Rows:
        return np.arange(len(self.known.instance_ids)) if rows is None else rows
