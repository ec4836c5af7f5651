"""Gain and attainment: what requests with targets got of what they asked for (ProServe §2).

Token i of a response, from 1 on, is due at arrival + TTFT target + (i - 1) · TPOT target. A request with a TTFT target
alone has a deadline for its first token only. One with a TPOT target alone has no deadline, as there is no time from
which to count: its mean TPOT counts in the SLO attainment, and nothing in the gain. Requests without targets count
nowhere. A request that does not end (refused, lost, failed, never finished) gains nothing of what was possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.request import CLASSES, REAL_TIME, RequestFacts, Slo

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Rows = npt.NDArray[np.bool_] | npt.NDArray[np.intp]

PROMPT_QUARTERS = 4
NO_TIER = "none"  # of requests without a TPOT target


@dataclass(frozen=True, slots=True, kw_only=True)
class GainWeights:
    """What a token that comes by its deadline is worth, as a multiple of its request's own weight.

    `first_token` and `later_token` are w_p and w_d of ProServe §2; priorities that are not in `by_priority` count 1.
    """

    first_token: float = 1.0
    later_token: float = 1.0
    by_priority: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject weights that are not positive."""
        values = {
            "first_token": self.first_token,
            "later_token": self.later_token,
            **{f"priority_weight {priority}": weight for priority, weight in self.by_priority.items()},
        }
        for name, value in values.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be above 0, not {value}")

    def of(self, priorities: Counts) -> Floats:
        """Return the weights of priorities."""
        return np.array([self.by_priority.get(int(priority), 1.0) for priority in priorities])


EQUAL_WEIGHTS = GainWeights()


def priority_weights(texts: Iterable[str]) -> dict[int, float]:
    """Read PRIORITY=WEIGHT pairs."""
    weights = {}
    for text in texts:
        priority, equals, weight = text.partition("=")
        try:
            weights[int(priority)] = float(weight) if equals else math.nan
        except ValueError:
            raise ValueError(f"priority_weight: {text!r} is not PRIORITY=WEIGHT, for example 0=2") from None
        if not (math.isfinite(weights[int(priority)]) and weights[int(priority)] > 0):
            raise ValueError(f"priority_weight: {text!r} is not PRIORITY=WEIGHT with a weight above 0")
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """Targets, weights, priorities and classes of requests, in columns; NaN: no target."""

    ttft_slo_s: Floats
    tpot_slo_s: Floats
    weight: Floats
    priority: Counts
    request_class: Counts  # index in `request.CLASSES`
    mix_entry: npt.NDArray[np.str_] | None = None  # names of entries of a mix
    tenant: npt.NDArray[np.str_] | None = None
    when_late: npt.NDArray[np.str_] | None = None  # words of `scheduler.objectives`

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.weight)

    def chosen(self, rows: Rows) -> ServiceLevels:
        """Select requests."""
        return ServiceLevels(
            ttft_slo_s=self.ttft_slo_s[rows],
            tpot_slo_s=self.tpot_slo_s[rows],
            weight=self.weight[rows],
            priority=self.priority[rows],
            request_class=self.request_class[rows],
            mix_entry=None if self.mix_entry is None else self.mix_entry[rows],
            tenant=None if self.tenant is None else self.tenant[rows],
            when_late=None if self.when_late is None else self.when_late[rows],
        )


def service_levels_of(requests: Sequence[RequestFacts]) -> ServiceLevels | None:
    """Collect the service levels of requests; None where all are as by default."""
    defaults = (None, 1.0, 0, REAL_TIME)
    if all((one.slo, one.weight, one.priority, one.request_class) == defaults for one in requests):
        return None
    slos = [request.slo or Slo() for request in requests]
    return ServiceLevels(
        ttft_slo_s=np.array([slo.ttft_s for slo in slos], np.float64),  # None becomes NaN
        tpot_slo_s=np.array([slo.tpot_s for slo in slos], np.float64),
        weight=np.array([request.weight for request in requests]),
        priority=np.array([request.priority for request in requests], np.int64),
        request_class=np.array([CLASSES.index(request.request_class) for request in requests], np.int64),
    )


def default_levels(num: int) -> ServiceLevels:
    """Return the service levels of requests that ask for none."""
    zeros, none = np.zeros(num, np.int64), np.full(num, np.nan)
    return ServiceLevels(ttft_slo_s=none, tpot_slo_s=none, weight=np.ones(num), priority=zeros, request_class=zeros)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequests:
    """What requests asked for and what they got, in columns; NaN: a time that never came."""

    levels: ServiceLevels
    prompt_tokens: Counts
    output_tokens: Counts  # of the whole response
    ttft_s: Floats
    tpot_s: Floats  # mean; NaN also where there is one token
    tokens_on_time: Counts  # negative where no token has a deadline
    finished: npt.NDArray[np.bool_]
    shed: npt.NDArray[np.bool_] | None = None  # None: not known
    demoted: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.levels)

    def chosen(self, rows: Rows) -> ServedRequests:
        """Select requests."""
        return ServedRequests(
            levels=self.levels.chosen(rows),
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            ttft_s=self.ttft_s[rows],
            tpot_s=self.tpot_s[rows],
            tokens_on_time=self.tokens_on_time[rows],
            finished=self.finished[rows],
            shed=None if self.shed is None else self.shed[rows],
            demoted=None if self.demoted is None else self.demoted[rows],
        )


def attainment_report(served: ServedRequests, weights: GainWeights = EQUAL_WEIGHTS) -> dict[str, Any]:
    """Report the requests with targets: all, and by priority, class, tier, mix entry, tenant and length of the prompt.

    A tier is a TPOT target. The report is empty where no request has a target.
    """
    served = served.chosen(~(np.isnan(served.levels.ttft_slo_s) & np.isnan(served.levels.tpot_slo_s)))
    if len(served) == 0:
        return {}
    by_length = np.argsort(served.prompt_tokens, kind="stable")
    levels = served.levels
    report = {
        **attained(served, weights),
        "by_priority": _by(levels.priority, served, weights),
        "by_class": _by(np.array(CLASSES)[levels.request_class], served, weights),
        "by_tier": _by(_tier_names(levels.tpot_slo_s), served, weights),
        "by_prompt_quarter": [
            {"longest_prompt_tokens": int(served.prompt_tokens[rows].max()), **attained(served.chosen(rows), weights)}
            for rows in np.array_split(by_length, PROMPT_QUARTERS)
            if len(rows)
        ],
    }
    if levels.mix_entry is not None:
        report["by_mix"] = _by(levels.mix_entry, served, weights)
    if levels.tenant is not None:
        report["by_tenant"] = _by(levels.tenant, served, weights)
    return report


def _tier_names(tpot_slo_s: Floats) -> npt.NDArray[np.str_]:
    return np.array([NO_TIER if math.isnan(value) else f"{value:g}" for value in tpot_slo_s.tolist()])


def _by(column: npt.NDArray[Any], served: ServedRequests, weights: GainWeights) -> dict[str, Any]:
    return {str(value): attained(served.chosen(column == value), weights) for value in np.unique(column).tolist()}


def attained(served: ServedRequests, weights: GainWeights = EQUAL_WEIGHTS) -> dict[str, Any]:
    """Sum up requests with targets; a ratio is None where no request has the target that it counts.

    `slo_attained` is the share whose TTFT and mean TPOT are within their targets, `deadline_attained` the share of
    those with deadlines all of whose tokens came in time, `deadline_attained_tokens` the share of the tokens of prompts
    and responses that these have, and `tdg_ratio` the gained share of the possible gain. `missed_prompt_ratio` is the
    mean length of the prompts of those with deadlines that missed one, over the mean of all. Percentiles of TTFT and
    TPOT are those of the requests that got so far.
    """
    levels = served.levels
    has_deadline = ~np.isnan(levels.ttft_slo_s)
    # a response that never began may have an unknown length
    num_due = np.where(np.isnan(levels.tpot_slo_s), 1, np.maximum(1, served.output_tokens))
    num_on_time = np.where(served.finished, np.clip(served.tokens_on_time, 0, num_due), 0)
    kept = (num_on_time == num_due)[has_deadline]
    prompts = served.prompt_tokens[has_deadline]
    tokens = prompts + np.maximum(1, served.output_tokens[has_deadline])
    missed_prompt = float(prompts[~kept].mean()) if not kept.all() else None
    first_on_time = served.finished & (served.ttft_s <= levels.ttft_slo_s) & (num_on_time > 0)
    value = levels.weight * weights.of(levels.priority)
    possible = value * (weights.first_token + weights.later_token * (num_due - 1))
    later_on_time = np.minimum(num_on_time - first_on_time, num_due - 1)
    gained = value * (weights.first_token * first_on_time + weights.later_token * later_on_time)
    # an undefined mean TPOT, of a single token, is within any target
    within = served.finished & ~(served.ttft_s > levels.ttft_slo_s) & ~(served.tpot_s > levels.tpot_slo_s)
    waits = (served.ttft_s / levels.ttft_slo_s)[has_deadline & ~np.isnan(served.ttft_s)]
    latencies = {"ttft_p50_s": (served.ttft_s, 50), "ttft_p99_s": (served.ttft_s, 99),
                 "tpot_p50_s": (served.tpot_s, 50), "tpot_p99_s": (served.tpot_s, 99)}  # fmt: skip
    total = float(possible[has_deadline].sum())
    return {
        "num_with_targets": len(served),
        "tdg_ratio": float(gained[has_deadline].sum()) / total if total else None,
        "slo_attained": float(within.mean()),
        "deadline_attained": float(kept.mean()) if len(kept) else None,
        "deadline_attained_tokens": float(tokens[kept].sum() / tokens.sum()) if len(kept) else None,
        "missed_prompt_tokens": missed_prompt,
        "missed_prompt_ratio": None if missed_prompt is None else missed_prompt / float(prompts.mean()),
        "worst_ttft_over_target": float(waits.max()) if len(waits) else None,
        **{name: _percentile(values, share) for name, (values, share) in latencies.items()},
        **{
            f"num_{name}_with_targets": int(rows.sum())
            for name, rows in (("shed", served.shed), ("demoted", served.demoted))
            if rows is not None
        },
    }


def _percentile(values: npt.NDArray[np.float64], share: int) -> float | None:
    """Return a percentile of the values that are not NaN; None without any."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, share)) if len(known) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAttainment:
    """What one request with targets attained; None where it has no such target."""

    tokens_due: int
    tokens_on_time: int
    ttft: bool | None
    tpot: bool | None

    @property
    def slo(self) -> bool:
        """Whether TTFT and mean TPOT are within their targets."""
        return self.ttft is not False and self.tpot is not False

    @property
    def deadlines(self) -> bool | None:
        """Whether all tokens came by their deadlines."""
        return None if self.ttft is None else self.tokens_on_time == self.tokens_due


def response_attainment(
    slo: Slo, *, num_tokens: int, tokens_on_time: int, ttft_s: float | None, tpot_s: float | None
) -> ResponseAttainment:
    """Return what a whole response of `num_tokens` tokens attained; a mean TPOT of one token is within any target."""
    due = 0 if slo.ttft_s is None else 1 if slo.tpot_s is None else num_tokens
    return ResponseAttainment(
        tokens_due=due,
        tokens_on_time=min(tokens_on_time, due),
        ttft=None if slo.ttft_s is None else ttft_s is not None and ttft_s <= slo.ttft_s,
        tpot=None if slo.tpot_s is None else tpot_s is None or tpot_s <= slo.tpot_s,
    )


def missed(slo: Slo, num_tokens: int) -> ResponseAttainment:
    """Return what a request attained that did not end: nothing, of at least one and `num_tokens` tokens."""
    whole = response_attainment(slo, num_tokens=max(1, num_tokens), tokens_on_time=0, ttft_s=None, tpot_s=None)
    return replace(whole, tpot=None if slo.tpot_s is None else False)


def count_on_time(slo: Slo, marks: Iterable[tuple[int, float]], num_tokens: int) -> int:
    """Count the tokens on time of a response of `num_tokens`.

    A mark is the number of tokens that had come, and the seconds since the request's arrival until then.
    """
    ttft_s, tpot_s = slo.ttft_s, slo.tpot_s
    if ttft_s is None:
        return 0
    if tpot_s is None:
        num_tokens, tpot_s = min(num_tokens, 1), 0.0
    seen = on_time = 0
    for so_far, time_s in marks:
        last = min(so_far, num_tokens)
        while seen < last:
            on_time += time_s <= ttft_s + seen * tpot_s
            seen += 1
    return on_time


def attainment_table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a report for people; none where no request has a target."""
    if "num_with_targets" not in report:
        return
    rows = {"all with targets": report}
    for group in ("priority", "class", "tier", "mix", "tenant"):
        parts = report.get(f"by_{group}", {})
        if len(parts) > 1:
            rows |= {_label(group, name): part for name, part in parts.items()}
    rows |= {f"prompts up to {part['longest_prompt_tokens']}": part for part in report["by_prompt_quarter"]}
    width = max(map(len, rows))
    counts = [name for name in ("shed", "demoted") if report.get(f"num_{name}_with_targets")]
    titles = ("requests", "TDG ratio", "SLO", "deadlines", "by tokens", "worst TTFT", *counts)
    yield ""
    yield " " * width + "".join(f"{title:>12}" for title in titles)
    for name, part in rows.items():
        shares = ("tdg_ratio", "slo_attained", "deadline_attained", "deadline_attained_tokens")
        cells = [f"{'-' if part[share] is None else f'{part[share]:.3f}':>12}" for share in shares]
        worst = part["worst_ttft_over_target"]
        cells.append(f"{'-' if worst is None else f'{worst:.2f} x':>12}")
        cells += [f"{part[f'num_{count}_with_targets']:>12}" for count in counts]
        yield f"{name:{width}}{part['num_with_targets']:>12}{''.join(cells)}"
    if report["missed_prompt_tokens"] is not None:
        yield (
            f"requests that missed deadlines have prompts of {report['missed_prompt_tokens']:.0f} tokens on average, "
            f"{report['missed_prompt_ratio']:.2f} times that of all with deadlines"
        )


def _label(group: str, name: str) -> str:
    return f"tier {1000 * float(name):g} ms" if group == "tier" and name != NO_TIER else f"{group} {name}"
