"""What a run comes to in numbers, and its requests one by one."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from predictor.step_time import Costs, step_seconds, tabulate
from simulator.result import FATES, RunResult

Floats = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 99)
WINDOW_S = 10.0  # of the imbalance of prefill (LMetric §4.4, figure 10)
CDF_POINTS = 101


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """How late a request may be; None where anything goes."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of all requests, in the order of arrival; NaN where it never came, or where there is none."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


def latencies(result: RunResult) -> Latencies:
    """Count from when requests came to the cluster, decisions and network included."""
    outcomes, arrival_s = result.outcomes, result.work.arrival_s
    finished = result.decisions.fate == FATES.index("finished")
    first = np.where(outcomes.first_token_s >= 0, outcomes.first_token_s, np.nan)
    last = np.where(finished, outcomes.finished_s, np.nan)
    rest = np.maximum(outcomes.produced_tokens - 1, 1)
    return Latencies(
        ttft_s=first - arrival_s,
        tpot_s=np.where(outcomes.produced_tokens > 1, (last - first) / rest, np.nan),
        e2e_s=last - arrival_s,
    )


def p99_ttft_s(result: RunResult) -> float:
    """The paper's measure of capacity; infinite where one in a hundred never got a token."""
    return percentile_of_all(latencies(result).ttft_s, 99)


def percentile_of_all(values: Floats, percentile: float) -> float:
    """Take what never came for infinitely late."""
    return float(np.percentile(np.where(np.isnan(values), np.inf, values), percentile, method="higher"))


def summary(result: RunResult, slo: SloTarget | None = None, skip_s: float = 0.0) -> dict[str, Any]:
    """Sum a run up; requests that came in its first `skip_s` are left out of the latencies."""
    took = latencies(result)
    counted = result.work.arrival_s >= result.work.arrival_s[0] + skip_s
    fates = result.decisions.fate
    first_s = float(result.work.arrival_s[0])
    span_s = max(result.end_s - first_s, 1e-9)
    finished = fates == FATES.index("finished")
    lengths = result.work.lengths
    computed = result.decisions.instance >= 0
    summed: dict[str, Any] = {
        "policy": result.policy,
        "num_requests": len(fates),
        **{f"num_{name}": int((fates == place).sum()) for place, name in enumerate(FATES)},
        "span_s": span_s,
        "requests_per_s": float(finished.sum() / span_s),
        "output_tokens_per_s": float(result.outcomes.produced_tokens.sum() / span_s),
        "instance_s": result.up_s,
        "num_preemptions": int(result.outcomes.num_preemptions.sum()),
        "hit_ratio": float(result.outcomes.hit_tokens.sum() / max(1, lengths.prompt_tokens[computed].sum())),
        "prefill_imbalance": prefill_imbalance(result),
    }
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        summed[name] = spread_of(getattr(took, name)[counted])
    if result.samples:
        free = np.stack([sample.free_blocks for sample in result.samples])
        summed["free_blocks"] = {"mean": float(free.mean()), "variance": float(free.var(axis=1).mean())}
    predicted = result.decisions.predicted_e2e_s
    if np.isfinite(predicted).any():
        errors = np.abs(predicted / took.e2e_s - 1)[np.isfinite(predicted) & finished]
        summed["e2e_error"] = spread_of(errors)
    if slo is not None:
        summed["slo_attainment"] = attainment(took, slo)
    return summed


def spread_of(values: Floats) -> dict[str, float | None]:
    """Give mean and percentiles of what there is."""
    there = values[~np.isnan(values)]
    if len(there) == 0:
        return dict.fromkeys(("mean", *(f"p{percentile}" for percentile in PERCENTILES)))
    points = np.percentile(there, PERCENTILES)
    return {"mean": float(there.mean()), **{f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}}


def attainment(took: Latencies, slo: SloTarget) -> float:
    """Share of requests that were in time in every respect asked for."""
    good = ~np.isnan(took.e2e_s)
    for values, most in ((took.ttft_s, slo.ttft_s), (took.tpot_s, slo.tpot_s), (took.e2e_s, slo.e2e_s)):
        if most is not None:
            good &= np.isnan(values) | (values <= most)
    return float(good.mean())


def cdf(values: Floats) -> dict[str, list[float]]:
    """Give the distribution at evenly spaced shares."""
    there = values[~np.isnan(values)]
    shares = np.linspace(0, 1, CDF_POINTS)
    points = np.quantile(there, shares) if len(there) else np.zeros(0)
    return {"share": shares.tolist(), "value": points.tolist()}


def prefill_imbalance(result: RunResult) -> float | None:
    """Mean over windows of ten seconds: how far the busiest instance's prefill time is above the mean, in its terms.

    A request's prefill counts as what its prompt, less what was cached, takes alone on its engine, at its first token.
    """
    outcomes, instance = result.outcomes, result.decisions.instance
    there = (outcomes.first_token_s >= 0) & (instance >= 0)
    if not there.any() or len(result.units) < 2:
        return None
    tokens = np.maximum(1, result.work.lengths.prompt_tokens - outcomes.hit_tokens)[there]
    seconds = np.zeros(len(tokens))
    for index, unit in enumerate(result.units):
        mine = instance[there] == index
        if mine.any():
            known = tabulate(unit.step_time, int(tokens.max()), 1)
            cost = {int(count): _prefill_s(known, int(count)) for count in np.unique(tokens[mine])}
            seconds[mine] = [cost[int(count)] for count in tokens[mine]]
    window = ((outcomes.first_token_s[there] - result.work.arrival_s[0]) // WINDOW_S).astype(np.int64)
    work = np.zeros((int(window.max()) + 1, len(result.units)))
    np.add.at(work, (window, instance[there]), seconds)
    work = work[work.sum(axis=1) > 0]
    return float((work.max(axis=1) / work.mean(axis=1) - 1).mean())


def _prefill_s(costs: Costs, tokens: int) -> float:
    return step_seconds(costs, tokens, 1, 0, 0.0, 1, float(tokens) ** 2, 0.0)


# One row a request.


def table(result: RunResult) -> dict[str, np.ndarray]:
    """Give all there is to know of each request, as columns."""
    took = latencies(result)
    never = {name: np.where(result.outcomes[name] >= 0, result.outcomes[name], np.nan)
             for name in ("scheduled_s", "first_token_s", "finished_s")}  # fmt: skip
    width = len(str(len(result.units) - 1))
    names = np.array([*(f"instance-{index:0{width}d}" for index in range(len(result.units))), ""])
    return {
        "number": np.arange(len(result.work)),
        "arrival_s": result.work.arrival_s,
        "prompt_tokens": result.work.lengths.prompt_tokens,
        "output_tokens": result.work.lengths.output_tokens,
        "tag_median_tokens": result.work.tag_median,
        "fate": np.array(FATES)[result.decisions.fate],
        "instance": names[result.decisions.instance],
        "scheduler": np.asarray(result.decisions.scheduler),
        "num_sends": np.asarray(result.decisions.num_sends),
        **never,
        "ttft_s": took.ttft_s,
        "tpot_s": took.tpot_s,
        "e2e_s": took.e2e_s,
        "predicted_ttft_s": np.asarray(result.decisions.predicted_ttft_s),
        "predicted_e2e_s": np.asarray(result.decisions.predicted_e2e_s),
        "num_preemptions": np.asarray(result.outcomes.num_preemptions),
        "prefix_hit_tokens": np.asarray(result.outcomes.hit_tokens),
    }


def write_csv(columns: Mapping[str, np.ndarray], out: TextIO) -> None:
    """Write rows; what never came is left empty."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(_cells(column) for column in columns.values()), strict=True))


def _cells(column: np.ndarray) -> list[Any]:
    if column.dtype.kind != "f":
        return list(column.tolist())
    return ["" if math.isnan(value) else repr(value) for value in column.tolist()]


def write_parquet(columns: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a Parquet file, for which pyarrow must be there."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow (pip install pyarrow); .csv does not") from None
    parquet.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path)


def write_rows(result: RunResult, path: Path) -> None:
    """Write one row a request, as the file's ending says: .csv or .parquet."""
    columns = table(result)
    writers: Mapping[str, Callable[[], None]] = {
        ".csv": lambda: _write_text(columns, path),
        ".parquet": lambda: write_parquet(columns, path),
    }
    if path.suffix not in writers:
        raise ValueError(f"{path}: must end in .csv or .parquet")
    try:
        writers[path.suffix]()
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None


def _write_text(columns: Mapping[str, np.ndarray], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as out:
        write_csv(columns, out)
