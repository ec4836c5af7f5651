"""Shipped profiles are valid, written profiles are read back, and errors name the field."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from predictor.config import EngineConfig
from predictor.profile import (
    CONSTANT,
    FITTED,
    KvTransferTime,
    Profile,
    Transit,
    constant_profile,
    load_profile,
    profile_from_dict,
    profile_from_json,
    profile_names,
    profile_to_dict,
    profile_to_json,
)
from predictor.tabulated_costs import step_seconds, tabulate

SHIPPED = {
    "llama-2-7b-a30",
    "qwen2-7b-a30",
    "llama-3.1-8b-a100",
    "llama-3.1-8b-h100",
    "llama-3.1-8b-h200",
    "llama-3.1-8b-rtxpro6000",
    "qwen3-32b-rtxpro6000-tp2",
}


def seconds(profile: Profile, *, decodes: int = 0, context: int = 0, prefill: int = 0, before: int = 0) -> float:
    """Return the seconds of a step of equal decodes and at most one prefill chunk."""
    costs = tabulate(profile.step_time, 16384, 1024)
    prefills = 1 if prefill else 0
    return float(
        step_seconds(
            costs,
            decodes + prefill,
            decodes + prefills,
            decodes,
            float(decodes * context),
            prefills,
            float(prefill**2),
            float(prefill * before),
            float(context),
        )
    )


def test_every_documented_profile_is_shipped() -> None:
    """The names include the constant profile and one for every documented model and GPU."""
    assert set(profile_names()) == {CONSTANT, *SHIPPED}


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_profiles_describe_themselves(name: str) -> None:
    """Each has its name, a held-out error of a few percent, and a source."""
    profile = load_profile(name)
    assert profile.name == name
    assert profile.kind == FITTED
    assert profile.error is not None
    assert profile.error.n >= 50
    assert profile.error.mape < 0.02
    assert profile.error.p90 < 0.05
    assert len(profile.source) > 40
    assert profile.engine.num_gpu_blocks is not None


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_profiles_grow_with_the_work(name: str) -> None:
    """More context and more prefill take longer, by amounts that are possible on a current GPU."""
    profile = load_profile(name)
    assert 0.003 < seconds(profile, decodes=1, context=500) < 0.06
    assert seconds(profile, decodes=32, context=500) < seconds(profile, decodes=32, context=2000)
    assert seconds(profile, prefill=256) < seconds(profile, prefill=2048) < seconds(profile, prefill=8192)
    assert seconds(profile, prefill=512) < seconds(profile, prefill=512, before=8192)
    assert seconds(profile, decodes=32, context=500) < seconds(profile, decodes=32, context=500, prefill=512)


def test_block_testbed_settings() -> None:
    """Llama-2-7B on A30 suggests the paper's 1056 blocks of 16, batch 48, chunk 512."""
    engine = load_profile("llama-2-7b-a30").engine
    assert (engine.num_gpu_blocks, engine.block_size) == (1056, 16)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (48, 512)


def test_known_h200_steps() -> None:
    """Predictions of decode batches and chunks of the H200 table are within 3 %."""
    profile = load_profile("llama-3.1-8b-h200")
    for batch, table_ms in ((1, 5.15), (64, 7.60), (256, 16.99)):
        assert seconds(profile, decodes=batch, context=1024) == pytest.approx(table_ms * 1e-3, rel=0.07)
    for chunk, table_ms in ((512, 11.9), (2048, 43.4)):
        assert seconds(profile, prefill=chunk) == pytest.approx(table_ms * 1e-3, rel=0.07)


def test_constant_profile_takes_one_second_always() -> None:
    """Every step of the constant profile, an empty one too, takes exactly a second."""
    profile = load_profile(CONSTANT)
    assert profile == constant_profile()
    assert profile.kind == CONSTANT
    assert seconds(profile) == 1.0
    assert seconds(profile, decodes=7, context=900) == 1.0
    assert seconds(profile, decodes=7, context=900, prefill=100, before=5) == 1.0


@pytest.mark.parametrize("name", profile_names())
def test_written_and_read_back(name: str) -> None:
    """JSON keeps every field of a profile."""
    profile = load_profile(name)
    assert profile_from_json(profile_to_json(profile)) == profile
    assert profile_from_dict(json.loads(json.dumps(profile_to_dict(profile)))) == profile


def test_the_transit_is_kept_where_it_was_measured() -> None:
    """It is written where there is one, and a profile without it can be read."""
    measured = replace(constant_profile(), transit=Transit(inward_s=0.01, outward_s=0.002))
    assert profile_from_json(profile_to_json(measured)) == measured
    assert "transit" not in profile_to_dict(constant_profile())
    with pytest.raises(ValueError, match="transit.inward_s"):
        profile_from_dict(profile_to_dict(constant_profile()) | {"transit": {"inward_s": -1, "outward_s": 0}})


def test_transfers_are_kept_where_they_are_known() -> None:
    """Each of the fields may be missing; known ones are settings of the engine, beside those that the profile suggests."""
    measured = replace(
        load_profile("llama-2-7b-a30"),
        transfer=KvTransferTime(kv_bytes_per_token=524288, kv_transfer_base_s=0.001, kv_transfer_bytes_per_s=2.5e10),
    )
    written = profile_to_dict(measured)
    assert written["transfer"] == {
        "kv_bytes_per_token": 524288,
        "kv_transfer_base_s": 0.001,
        "kv_transfer_bytes_per_s": 2.5e10,
    }
    assert profile_from_dict(written) == measured
    assert "transfer" not in profile_to_dict(constant_profile())
    assert EngineConfig(**measured.suggested_settings).transfer_s(0, 0) == 0.001
    assert measured.suggested_settings["num_gpu_blocks"] == measured.engine.num_gpu_blocks
    for wrong, error in (
        ({"kv_transfer_base_s": -1.0}, "transfer.kv_transfer_base_s: "),
        ({"kv_transfer_bytes_per_s": 0.0}, "transfer.kv_transfer_bytes_per_s: must be a number above 0"),
        ({"kv_bytes_per_token": 0}, "transfer.kv_bytes_per_token: must be at least 1"),
        ({"colour": "red"}, "transfer.colour: unknown field"),
        (3, "transfer: must be an object"),
    ):
        with pytest.raises(ValueError, match=f"^{error}"):
            profile_from_dict(written | {"transfer": wrong})


def test_an_unknown_name_gets_a_suggestion() -> None:
    """The error for a misspelt profile suggests the closest name, or lists all."""
    with pytest.raises(
        ValueError, match=r"^profile: there is none named 'llama-3.1-8b-h20'; did you mean llama-3.1-8b-h200\?$"
    ):
        load_profile("llama-3.1-8b-h20")
    with pytest.raises(ValueError, match=r"^profile: there is none named '%'; there are constant, .*llama-3.1-8b-h200"):
        load_profile("%")


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change that sets a nested field."""

    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            data = data[parent]
        data[last] = value

    return change


def without(path: str) -> Callable[[dict[str, Any]], None]:
    """Return a change that deletes a nested field."""

    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            data = data[parent]
        del data[last]

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (changed("version", 3), "version: this release reads versions 1 and 2, not 3"),
        (changed("version", "1"), "version: "),
        (changed("version", True), "version: "),
        (without("version"), "version: missing"),
        (without("step_time"), "step_time: missing"),
        (without("step_time.constant_s"), "step_time.constant_s: missing"),
        (without("step_time.decode_slope"), "step_time.decode_slope: missing"),
        (without("step_time.decode_slope.x"), "step_time.decode_slope.x: missing"),
        (without("valid.max_tokens"), "valid.max_tokens: missing"),
        (without("engine"), "engine: missing"),
        (changed("colour", "red"), "colour: unknown field"),
        (changed("step_time.colour", 1), "step_time.colour: unknown field"),
        (changed("step_time.by_tokens.z", []), "step_time.by_tokens.z: unknown field"),
        (changed("step_time", 3), "step_time: must be an object"),
        (changed("step_time.by_tokens", [1]), "step_time.by_tokens: must be an object"),
        (changed("step_time.by_tokens.x", "12"), "step_time.by_tokens.x: must be a list"),
        (changed("step_time.by_tokens", {"x": [], "y": []}), "step_time.by_tokens.x: "),
        (changed("step_time.by_tokens", {"x": [1, 2], "y": [1]}), "step_time.by_tokens.y: "),
        (changed("step_time.by_tokens", {"x": [2, 1], "y": [1, 1]}), "step_time.by_tokens.x: knots"),
        (changed("step_time.by_tokens", {"x": [1, 1], "y": [1, 1]}), "step_time.by_tokens.x: knots"),
        (changed("step_time.by_tokens", {"x": [1, math.nan], "y": [1, 1]}), "step_time.by_tokens.x: "),
        (changed("step_time.by_tokens", {"x": [1], "y": [-1]}), "step_time.by_tokens.y: "),
        (changed("step_time.by_tokens", {"x": [1], "y": [None]}), "step_time.by_tokens.y: must be a number"),
        (changed("step_time.constant_s", math.nan), "step_time.constant_s: "),
        (changed("step_time.constant_s", math.inf), "step_time.constant_s: "),
        (changed("step_time.constant_s", -1e-3), "step_time.constant_s: "),
        (changed("step_time.constant_s", "1"), "step_time.constant_s: must be a number"),
        (changed("step_time.constant_s", False), "step_time.constant_s: must be a number"),
        (changed("step_time.constant_s", 10**400), "step_time.constant_s: "),
        (changed("valid.max_tokens", 0), "valid.max_tokens: "),
        (changed("error.mape", -1.0), "error.mape: "),
        (changed("error.n", 1.5), "error.n: "),
        (changed("engine.num_gpu_blocks", 0), "engine.num_gpu_blocks: "),
        (changed("tensor_parallel", 0), "tensor_parallel: "),
        (changed("kind", "guessed"), "kind: must be one of"),
        (changed("name", ""), "name: "),
        (changed("gpu", 5), "gpu: "),
    ],
)
def test_a_bad_field_is_named(change: Callable[[dict[str, Any]], None], error: str) -> None:
    """The error for a missing, unknown or invalid field is one line that starts with its path."""
    data = copy.deepcopy(profile_to_dict(load_profile("llama-3.1-8b-h100")))
    change(data)
    with pytest.raises(ValueError, match=r"^.+$") as refusal:
        profile_from_dict(data)
    assert str(refusal.value).startswith(error)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"version": NaN}'])
def test_other_data_is_refused(text: str) -> None:
    """Data that is no JSON object of a profile is refused without a crash."""
    with pytest.raises(ValueError, match=r"^(profile|version): "):
        profile_from_json(text)
