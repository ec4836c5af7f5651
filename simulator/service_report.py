"""What each class, mix entry and tenant got: requests served, shed and demoted, their latencies, what they attained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.gain import EQUAL_WEIGHTS, GainWeights, ServedRequests, attainment_report, attainment_table
from predictor.request import CLASSES

Floats = npt.NDArray[np.float64]

GROUPS = ("class", "mix", "tenant")
PERCENTILES = (50, 99)
WITHOUT_TARGETS = {"num_with_targets": 0, "slo_attained": None, "deadline_attained": None}


def service_report(served: ServedRequests, e2e_s: Floats, weights: GainWeights = EQUAL_WEIGHTS) -> dict[str, Any]:
    """Report what was attained, and what each class, mix entry and tenant got, also those without any target.

    TTFT and end-to-end latency are those of the requests that got so far.
    """
    report = attainment_report(served, weights)
    levels = served.levels
    columns = {
        "class": np.array(CLASSES)[levels.request_class],
        "mix": levels.mix_entry,
        "tenant": levels.tenant,
    }
    for group, column in columns.items():
        if column is not None:
            known = report.get(f"by_{group}", {})
            report[f"by_{group}"] = {
                str(value): {**_service_of(served, e2e_s, column == value), **known.get(str(value), WITHOUT_TARGETS)}
                for value in np.unique(column).tolist()
            }
    return report


def _service_of(served: ServedRequests, e2e_s: Floats, rows: npt.NDArray[np.bool_]) -> dict[str, Any]:
    counts = {"requests": rows, "served": rows & served.finished}
    counts |= {name: rows & mine for name, mine in (("shed", served.shed), ("demoted", served.demoted))
               if mine is not None}  # fmt: skip
    return {
        **{f"num_{name}": int(counted.sum()) for name, counted in counts.items()},
        "ttft_s": _percentiles(served.ttft_s[rows]),
        "e2e_s": _percentiles(e2e_s[rows]),
    }


def _percentiles(values: Floats) -> dict[str, float | None]:
    """Return percentiles of the values that are not NaN; None without any."""
    known = values[~np.isnan(values)]
    points = np.percentile(known, PERCENTILES).tolist() if len(known) else [None] * len(PERCENTILES)
    return {f"p{percentile}": value for percentile, value in zip(PERCENTILES, points, strict=True)}


def service_table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the report for people: a row for each part of a group that has several."""
    rows = {f"{group} {name}": part for group in GROUPS if len(parts := report.get(f"by_{group}", {})) > 1
            for name, part in parts.items()}  # fmt: skip
    if not rows:
        return
    width = max(map(len, rows))
    counts = [name for name in ("requests", "served", "shed", "demoted")
              if name in ("requests", "served") or any(part.get(f"num_{name}") for part in rows.values())]  # fmt: skip
    times = {"ttft p50 s": ("ttft_s", "p50"), "p99 s": ("ttft_s", "p99"), "e2e p50 s": ("e2e_s", "p50"),
             " p99 s": ("e2e_s", "p99")}  # fmt: skip
    yield ""
    yield " " * width + "".join(f"{title:>11}" for title in (*counts, *times, "SLO", "deadlines"))
    for name, part in rows.items():
        numbers = "".join(f"{part[f'num_{count}']:>11}" for count in counts)
        values = [part[metric][share] for metric, share in times.values()]
        values += [part["slo_attained"], part["deadline_attained"]]
        yield f"{name:{width}}{numbers}" + "".join(f"{'-' if one is None else f'{one:.3f}':>11}" for one in values)


def attained_table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of what was attained, without the parts that have no target."""
    parts = {f"by_{group}": report[f"by_{group}"] for group in GROUPS if f"by_{group}" in report}
    with_targets = {by: {name: part for name, part in rows.items() if part["num_with_targets"]}
                    for by, rows in parts.items()}  # fmt: skip
    yield from attainment_table({**report, **with_targets})
