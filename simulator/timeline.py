"""A simulated run as a trace for Perfetto or chrome://tracing: instances as processes, requests as slices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from simulator.metrics import request_table
from simulator.result import RunResult
from simulator.run_page import under_way

MICROSECONDS = 1e6
WAITS, RUNS = "waits", "runs"


def trace_events(result: RunResult) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: names of instances, requests in rows that do not overlap, and counters."""
    table = request_table(result)
    names = [str(name) for name in sorted(set(table["instance"].tolist()) - {""})]
    for pid, name in enumerate(names, 1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        rows = np.flatnonzero((table["instance"] == name) & np.isfinite(table["finished_s"]))
        yield from _requests(pid, table, rows)
        start_s, end_s = table["scheduled_s"][rows], table["finished_s"][rows]
        for series, steps in ((RUNS, under_way(start_s, end_s)), (WAITS, under_way(table["arrival_s"][rows], start_s))):
            for at_s, num in steps:
                yield {"ph": "C", "name": series, "pid": pid, "ts": _us(at_s), "args": {"requests": num}}


def _requests(pid: int, table: dict[str, np.ndarray], rows: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield a slice for each request, with its waiting and running inside, in rows of slices that do not overlap."""
    free_s: list[float] = []  # when each row is free again
    for row in rows[np.argsort(table["arrival_s"][rows], kind="stable")]:
        arrival_s, start_s, end_s = (float(table[name][row]) for name in ("arrival_s", "scheduled_s", "finished_s"))
        tid = next((place for place, until_s in enumerate(free_s) if until_s <= arrival_s), len(free_s))
        if tid == len(free_s):
            free_s.append(end_s)
        free_s[tid] = end_s
        facts = {
            name: _plain(table[name][row])
            for name in ("prompt_tokens", "output_tokens", "ttft_s", "e2e_s", "predicted_ttft_s", "predicted_e2e_s",
                         "num_preemptions", "prefix_hit_tokens")
        }  # fmt: skip
        place = {"ph": "X", "pid": pid, "tid": tid}
        yield {**place, "name": f"request {table['number'][row]}", **_span(arrival_s, end_s), "args": facts}
        yield {**place, "name": WAITS, **_span(arrival_s, start_s)}
        yield {**place, "name": RUNS, **_span(start_s, end_s)}


def _span(start_s: float, end_s: float) -> dict[str, float]:
    return {"ts": _us(start_s), "dur": max(0.0, _us(end_s) - _us(start_s))}


def _us(seconds: float) -> float:
    return round(seconds * MICROSECONDS, 1)


def _plain(value: np.generic) -> float | int | None:
    number = value.item()
    return None if isinstance(number, float) and not math.isfinite(number) else number
