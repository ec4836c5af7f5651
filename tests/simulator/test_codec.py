"""Reading hostile input: everything is either understood or refused in one line."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.profile import constant_profile
from predictor.request import RequestFacts
from predictor.snapshot import VERSION, LiveRequest
from predictor.snapshot_of_engine import snapshot_of
from simulator.codec import plain, request_from, requests_from_file, snapshot_from, snapshot_json
from tests.predictor.test_request import FACTS, KNOWN_LENGTH

SNAPSHOT = json.loads((Path(__file__).parents[2] / "examples" / "snapshot.json").read_text())

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    inside: list[tuple[Any, ...]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        inside += [(*path, key), *paths(item, (*path, key))]
    return inside


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The document with one place changed."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=300, deadline=None, derandomize=True)
@given(path=st.sampled_from(paths(SNAPSHOT)), new=JSON)
def test_a_snapshot_changed_anywhere_is_forecast_on_or_refused(path: tuple[Any, ...], new: Any) -> None:
    """No change to a snapshot crashes: it is refused in one line, or gives a forecast."""
    try:
        snapshot = snapshot_from(replaced(SNAPSHOT, path, new))
        engine = engine_from(snapshot, constant_profile().step_time)
        candidate = request_from({"prompt_tokens": 9, "tag": 5}, block_size=16, default_id="candidate")
        Forecaster(engine).forecast([candidate], snapshot.taken_s)
    except ValueError as error:
        assert "\n" not in str(error)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.dictionaries(st.sampled_from(["prompt_tokens", "output_tokens", "tag", "slo", "prefix_hashes"]), JSON))
def test_any_request_is_built_or_refused(data: dict[str, Any]) -> None:
    """No request crashes the reader."""
    try:
        request_from(data, block_size=16, default_id="r")
    except ValueError as error:
        assert "\n" not in str(error)


def test_a_snapshot_survives_writing_and_reading() -> None:
    """What is written is what is read."""
    snapshot = snapshot_from(SNAPSHOT)
    assert snapshot_from(json.loads(snapshot_json(snapshot))) == snapshot
    engine = engine_from(snapshot, constant_profile().step_time)
    assert snapshot_of(engine, snapshot.taken_s).running == snapshot.running


@pytest.mark.parametrize("facts", [FACTS, KNOWN_LENGTH])
def test_all_facts_of_a_request_survive_writing_and_reading(facts: RequestFacts, tmp_path: Path) -> None:
    """In a snapshot, as JSON, as a line of a file, and as a row of CSV."""
    snapshot = snapshot_from(SNAPSHOT)
    snapshot = replace(snapshot, running=(), waiting=(LiveRequest(request=facts),), steps=())
    (read,) = snapshot_from(json.loads(snapshot_json(snapshot))).waiting
    assert read.request == facts
    spelled = plain(facts)
    assert request_from(spelled, block_size=16, default_id="x") == facts
    lines = tmp_path / "requests.jsonl"
    lines.write_text(json.dumps(spelled))
    assert requests_from_file(str(lines), block_size=16) == [facts]
    table = tmp_path / "requests.csv"
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in spelled.items()}
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name, text in texts.items() if text != "null"], extrasaction="ignore")
        writer.writeheader()
        writer.writerow(texts)
    assert requests_from_file(str(table), block_size=16) == [facts]


def test_a_snapshot_of_an_older_version_is_read() -> None:
    """Version 1 had no weight, tenant, session or model: they take their defaults, and it is written as the newest."""
    old = {**SNAPSHOT, "version": 1}
    snapshot = snapshot_from(old)
    assert snapshot.version == VERSION
    assert snapshot == snapshot_from(SNAPSHOT)
    assert snapshot.running[0].request.weight == 1.0
    assert json.loads(snapshot_json(snapshot))["version"] == VERSION


@pytest.mark.parametrize("version", [0, -1, True, 1.0])
def test_a_version_that_never_was_is_refused(version: object) -> None:
    """Only whole numbers from 1 up are versions."""
    with pytest.raises(ValueError, match="^version"):
        snapshot_from({**SNAPSHOT, "version": version})


def test_infinite_times_are_null_in_json() -> None:
    """JSON has no infinity."""
    assert plain({"ttft_s": float("inf"), "tokens": [1, (2.5,)]}) == {"ttft_s": None, "tokens": [1, [2.5]]}


@pytest.mark.parametrize("version", [VERSION + 1, 10**9])
def test_a_newer_snapshot_is_refused_by_its_version(version: int) -> None:
    """Whatever else a newer snapshot holds, its version is what is named."""
    with pytest.raises(ValueError, match=rf"^version: {version} is newer"):
        snapshot_from({"version": version, "unheard_of": True})
