"""Reading hostile input: everything is either understood or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.forecast import Forecaster
from predictor.profile import constant_profile
from predictor.transfer import engine_from, snapshot_of
from simulator.codec import plain, request_from, snapshot_from, snapshot_json

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


def test_infinite_times_are_null_in_json() -> None:
    """JSON has no infinity."""
    assert plain({"ttft_s": float("inf"), "tokens": [1, (2.5,)]}) == {"ttft_s": None, "tokens": [1, [2.5]]}


@pytest.mark.parametrize("version", [2, 10**9])
def test_a_newer_snapshot_is_refused_by_its_version(version: int) -> None:
    """Whatever else a newer snapshot holds, its version is what is named."""
    with pytest.raises(ValueError, match=rf"^version: {version} is newer"):
        snapshot_from({"version": version, "unheard_of": True})
