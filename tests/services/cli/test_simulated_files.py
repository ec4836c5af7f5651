"""Files of `block simulate`: traces for Perfetto, and pages."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.services.cli.running import block, refusal

FLAGS = ("simulate", "--instances", "2", "--rate", "20", "--num-requests", "60", "--arrivals", "poisson")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files of one simulation."""
    folder = tmp_path_factory.mktemp("files")
    done = block(
        *FLAGS, "--policy", "round_robin", "--timeline", str(folder / "{policy}.json"), "--html",
        str(folder / "page.html"), "--csv", str(folder / "{policy}.csv"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_slices_are_the_requests(written: Path) -> None:
    """Every request is a slice on its instance; slices of one row do not overlap; counters go down to 0."""
    events = json.loads((written / "round_robin.json").read_text(encoding="utf-8"))["traceEvents"]
    requests = [one for one in events if one["ph"] == "X" and one["name"].startswith("request")]
    assert len(requests) == 60
    assert {one["pid"] for one in requests} == {1, 2}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in requests:
        rows.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(end <= start + 0.2 for (_, end), (start, _) in pairwise(spans))
    names = {one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert len(names) == 2
    last = {(one["pid"], one["name"]): one["args"]["requests"] for one in events if one["ph"] == "C"}
    assert set(last.values()) == {0}


def test_the_page_has_the_run(written: Path) -> None:
    """The page names the policy, and has its curves."""
    page = (written / "page.html").read_text(encoding="utf-8")
    assert "round_robin" in page
    assert page.count("<svg") >= 4


def test_files_are_refused_before_the_run(tmp_path: Path) -> None:
    """A name without {policy} for several policies, and a folder that does not exist."""
    two = ("--policy", "random", "--policy", "round_robin")
    assert "--timeline: name a file with {policy}" in refusal(*FLAGS, *two, "--timeline", str(tmp_path / "one.json"))
    assert "html: " in refusal(*FLAGS, "--html", str(tmp_path / "none" / "page.html"))
