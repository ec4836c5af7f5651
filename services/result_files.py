"""Files that simulations write: requests as CSV or Parquet, reports of experiments, and results of earlier runs."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np

from simulator.experiments.experiment import Experiment
from simulator.experiments.findings import Findings
from simulator.experiments.report import as_html, as_json, as_markdown
from simulator.experiments.source_digest import source_digest
from simulator.metrics import request_table
from simulator.parallel import Runner
from simulator.progress import followed
from simulator.result import RunResult
from simulator.run_page import ServedRun, run_page
from simulator.timeline import trace_events

T = TypeVar("T")

MAX_TASK_CHARACTERS = 200


def write_csv(columns: Mapping[str, np.ndarray], out: TextIO) -> None:
    """Write columns as CSV; NaN becomes an empty cell."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    rows = zip(*(_cells(column) for column in columns.values()), strict=True)
    num_rows = len(next(iter(columns.values()), ()))
    writer.writerows(followed(rows, "writing rows", num_rows))


def _cells(column: np.ndarray) -> list[Any]:
    if column.dtype.kind != "f":
        return list(column.tolist())
    return ["" if math.isnan(value) else repr(value) for value in column.tolist()]


def write_parquet(columns: Mapping[str, np.ndarray], path: Path) -> None:
    """Write columns as Parquet, which needs pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow (pip install pyarrow); .csv does not") from None
    parquet.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path)


def require_writable(flag: str, path: str) -> None:
    """Refuse a file that cannot be written, before a run; it is made, or left as it is."""
    try:
        with Path(path).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ValueError(f"{flag}: {path} cannot be written: {error.strerror}") from None


def write_page(path: str, title: str, runs: Sequence[ServedRun]) -> None:
    """Write a page about runs."""
    Path(path).write_text(run_page(title, runs), encoding="utf-8")


def write_timeline(result: RunResult, path: Path) -> None:
    """Write a run as a trace for Perfetto or chrome://tracing."""
    with path.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(followed(trace_events(result), "writing the timeline")):
            out.write((",\n" if number else "\n") + json.dumps(event, allow_nan=False))
        out.write("\n]}\n")


def write_rows(result: RunResult, path: Path) -> None:
    """Write one row per request, in the format of the file's ending: .csv or .parquet."""
    columns = request_table(result)
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


def write_report(experiment: Experiment, findings: Findings, folder: Path) -> None:
    """Write results.json, report.md and report.html into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(as_json(experiment, findings), indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(as_markdown(experiment, findings), encoding="utf-8")
    (folder / "report.html").write_text(as_html(experiment, findings), encoding="utf-8")


class ResultCache:
    """Results in a file of JSON lines, keyed by source code, function and task: an interrupted run continues."""

    def __init__(self, path: Path) -> None:
        """Read the results that the file has; an incomplete line is ignored."""
        self._path = path
        self._code = source_digest()
        self._results: dict[str, Any] = {}
        self._ends_in_line = False
        if path.exists():
            text = path.read_text(encoding="utf-8")
            self._ends_in_line = bool(text) and not text.endswith("\n")
            for line in text.splitlines():
                try:
                    entry = json.loads(line)
                    self._results[entry["key"]] = entry["value"]
                except (ValueError, KeyError, TypeError):
                    continue

    def __len__(self) -> int:
        """The number of results."""
        return len(self._results)

    def cached(self, runner: Runner) -> Runner:
        """Return a runner that runs only tasks without a result, and writes their results, which must be JSON."""

        def run(measure: Callable[[T], Any], tasks: Sequence[T], /) -> Iterator[tuple[int, Any]]:
            keys = [self._key(measure, task) for task in tasks]
            known = [index for index, key in enumerate(keys) if key in self._results]
            for index in known:
                yield index, self._results[keys[index]]
            missing = [index for index, key in enumerate(keys) if key not in self._results]
            if not missing:
                return
            with self._path.open("a", encoding="utf-8") as out:
                if self._ends_in_line:
                    out.write("\n")
                    self._ends_in_line = False
                for position, value in runner(measure, [tasks[index] for index in missing]):
                    index = missing[position]
                    self._results[keys[index]] = value
                    what = repr(tasks[index])[-MAX_TASK_CHARACTERS:]  # for people who read the file
                    out.write(json.dumps({"key": keys[index], "value": value, "what": what}) + "\n")
                    out.flush()
                    yield index, value

        return run

    def _key(self, measure: Callable[[Any], Any], task: object) -> str:
        text = f"{self._code} {measure.__qualname__} {task!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]
