"""Files of simulations: rows of requests, and a cache of results."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from services.result_files import ResultCache, write_csv, write_rows
from simulator.assembly import simulate
from simulator.metrics import request_table
from simulator.parallel import one_by_one
from simulator.result import RunResult
from simulator.workload import RequestLengths, workload
from tests.simulator.small_clusters import specs


def one_refused() -> RunResult:
    """A run of two requests, of which the second is too long."""
    work = workload(
        RequestLengths(prompt_tokens=np.array([5, 600]), output_tokens=np.array([1, 1])), np.array([0.0, 0.5])
    )
    return simulate(specs(1), work, "random")


def test_rows_are_written_as_csv() -> None:
    """There is a header and a row per request; missing values are empty."""
    out = io.StringIO()
    write_csv(request_table(one_refused()), out)
    head, first, second = out.getvalue().splitlines()
    assert head.startswith("number,arrival_s,prompt_tokens")
    assert "finished,instance-0" in first
    assert "refused,," in second


def test_the_ending_of_a_file_is_its_format(tmp_path: Path) -> None:
    """CSV and Parquet files hold the same rows; other endings and missing folders are refused."""
    from pyarrow import parquet

    result = one_refused()
    write_rows(result, tmp_path / "rows.csv")
    write_rows(result, tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet")["fate"].to_pylist() == ["finished", "refused"]
    assert (tmp_path / "rows.csv").read_text().count("\n") == 3
    with pytest.raises(ValueError, match="must end in"):
        write_rows(result, tmp_path / "rows.txt")
    with pytest.raises(ValueError, match="cannot be written"):
        write_rows(result, tmp_path / "missing" / "rows.csv")


def test_cached_results_are_not_computed_again(tmp_path: Path) -> None:
    """A result is found by function and task, also by a new cache of the same file; an incomplete line is ignored."""
    path = tmp_path / "results.jsonl"
    calls: list[int] = []

    def squared(task: int) -> int:
        calls.append(task)
        return task * task

    def cubed(task: int) -> int:
        return task**3

    assert dict(ResultCache(path).cached(one_by_one)(squared, [1, 2])) == {0: 1, 1: 4}
    with path.open("a") as out:
        out.write('{"key": "incompl')
    cache = ResultCache(path)
    assert len(cache) == 2
    assert dict(cache.cached(one_by_one)(squared, [2, 3])) == {0: 4, 1: 9}
    assert calls == [1, 2, 3]
    assert dict(cache.cached(one_by_one)(cubed, [2])) == {0: 8}
    assert len(ResultCache(path)) == 4
