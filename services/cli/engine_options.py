"""The latency profile and the engine's settings, as flags with vLLM's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from predictor.config import SCHEDULING_POLICIES, EngineConfig
from services.cli.settings_options import SettingValues
from services.settings import DEFAULT_PROFILE, CommandSettings, Option, SettingsPart

if TYPE_CHECKING:
    from predictor.profile import Profile


def batcher_names() -> Collection[str]:
    """List the local schedulers; this imports their kernels."""
    from predictor.batching import BATCHERS

    return tuple(BATCHERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModelSettings:
    """The latency profile of an engine, and a file with its settings."""

    profile: Annotated[
        str, Option("Latency profile: the name of a shipped one, or a JSON file.", short="-p", metavar="NAME|FILE")
    ] = DEFAULT_PROFILE
    engine_file: Annotated[
        str,
        Option(
            "File with the engine's settings, in a table [engine] or without one.",
            name="engine",
            short="-c",
            metavar="TOML",
        ),
    ] = ""
    speculative_config: Annotated[
        str,
        Option(
            'Speculative decoding as vLLM configures it: {"method": "ngram", "num_speculative_tokens": 3}.',
            metavar="JSON",
        ),
    ] = ""


ENGINE_CONFIG = SettingsPart(
    EngineConfig,
    deferred=True,
    unset="the profile's",
    options={
        "batcher": {"choices": batcher_names},
        "scheduling_policy": {"choices": SCHEDULING_POLICIES},
        "batcher_options": {"flag": "batcher_option", "metavar": "NAME=NUMBER", "unset": "the local scheduler's"},
        "num_gpu_blocks": {"aliases": ("num_gpu_blocks_override",)},
    },
)
# of commands that work on one engine, or on a cluster of them, in this process
ENGINE = CommandSettings("engine", EngineModelSettings, ENGINE_CONFIG, file="none", environment=("BLOCK",))


def profile_named(name: str) -> Profile:
    """Load a shipped profile, or one from a JSON file."""
    from predictor.profile import load_profile, profile_from_json, profile_names
    from simulator.codec import read_text

    if name in profile_names() or not name.endswith(".json"):
        return load_profile(name)
    try:
        return profile_from_json(read_text(name))
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None


def engine_of(given: SettingValues, *, sglang: bool = False) -> tuple[Profile, EngineConfig]:
    """Load the profile, and settle the engine's settings; SGLang's have its local scheduler, and pages of one token."""
    model = given.make(EngineModelSettings)
    profile = profile_named(model.profile)
    return profile, engine_config(profile, settings_in(given), sglang=sglang)


def settings_in(given: SettingValues) -> dict[str, Any]:
    """Return the engine's settings that were given: by flags and environment first, then in the file."""
    from simulator.codec import settings_from_toml
    from simulator.speculative_config import speculative_settings

    model = given.make(EngineModelSettings)
    from_file = settings_from_toml(model.engine_file) if model.engine_file else {}
    speculation = speculative_settings(model.speculative_config) if model.speculative_config else {}
    return {**from_file, **speculation, **given.given(EngineConfig)}


def engine_config(profile: Profile, given: Mapping[str, Any], *, sglang: bool = False) -> EngineConfig:
    """Settle the engine's settings: the given ones first, then those of the profile."""
    suggested = profile.suggested_settings
    if sglang:
        plain = EngineConfig()
        sizes = [suggested.get(name, getattr(plain, name)) for name in ("num_gpu_blocks", "block_size")]
        suggested = {**suggested, "batcher": "sglang", "block_size": 1, "num_gpu_blocks": sizes[0] * sizes[1]}
    try:
        return EngineConfig(**{**suggested, **given})
    except TypeError as error:
        raise ValueError(str(error)) from None
