"""What a batching rule needs in vLLM: its options, a profile, and an engine that its plans can be carried out in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .predictor.batching import settled
from .predictor.config import EngineConfig
from .predictor.profile import load_profile, profile_from_json
from .predictor.step_time import StepTime
from .predictor.suggestions import require_known
from .settings import UnsupportedError, engine_settings, require_supported
from .vllm_version import OF_BATCHING_RULES, has_batching_rules, running_version

VARIABLE = "BLOCK_RULE"  # JSON, or the path of a JSON file
KEY = "block_rule"  # in vLLM's --additional-config
UNTIMED = ("sarathi_fcfs", "sarathi_priority", "weighted_vtc")
UNTIMED_WITHOUT_ETA = ("edf", "sjf")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """What the operator has set; `profile` is a shipped profile's name or the path of one."""

    profile: str | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    correction: bool = True

    def __post_init__(self) -> None:
        """Refuse values of another type."""
        if self.profile is not None and not (isinstance(self.profile, str) and self.profile):
            raise ValueError(f"profile: must be a name or a path, not {self.profile!r}")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options: must be numbers by name, not {self.options!r}")
        if self.correction not in (True, False):
            raise ValueError(f"correction: must be true or false, not {self.correction!r}")


def rule_settings(additional_config: object) -> RuleSettings:
    """Read the settings from vLLM's additional configuration, or else from the environment."""
    source, given = f"--additional-config: {KEY}", None
    if isinstance(additional_config, Mapping):
        given = additional_config.get(KEY)
    if given is None and (text := os.environ.get(VARIABLE, "").strip()):
        source, given = VARIABLE, _parsed(text)
    if given is None:
        return RuleSettings()
    if not isinstance(given, Mapping):
        raise ValueError(f"{source}: must be an object, not {given!r}")
    try:
        require_known(given, [one.name for one in fields(RuleSettings)], "setting")
        return RuleSettings(**given)
    except ValueError as error:
        raise ValueError(f"{source}.{error}") from None


def _parsed(text: str) -> object:
    try:
        return json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{VARIABLE}: is neither JSON nor a file with it: {error}") from None


def rule_config(scheduler: Any, rule: str, settings: RuleSettings) -> EngineConfig:
    """Return the configuration of the engine model that has this scheduler's limits and the rule."""
    require_carried_out(scheduler)
    return settled(
        EngineConfig(**{**engine_settings(scheduler), "batcher": rule, "batcher_options": dict(settings.options)})
    )


def step_time_for(config: EngineConfig, profile: str | None) -> StepTime:
    """Return the step time of a profile; refuse a rule that plans in seconds without one."""
    if profile is None:
        is_untimed = config.batcher in UNTIMED_WITHOUT_ETA and config.batcher_options["eta"] == 0
        if config.batcher in UNTIMED or is_untimed:
            return StepTime()
        raise ValueError(f"profile: {config.batcher} plans by step times; name a profile in {KEY} or {VARIABLE}")
    path = Path(profile)
    if path.suffix == ".json":
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"profile: {path} cannot be read: {error.strerror}") from None
        return profile_from_json(text).step_time
    return load_profile(profile).step_time


def require_carried_out(scheduler: Any) -> None:
    """Refuse engines that would carry a plan out in another way, or of whose memory the plan knows too little."""
    if not has_batching_rules():
        known = ", ".join(f"{major}.{minor}" for major, minor in OF_BATCHING_RULES)
        raise UnsupportedError(f"vLLM {running_version()} is not supported with a batching rule, only {known}")
    require_supported(scheduler)
    config = scheduler.vllm_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    refused = {
        "KV connectors": scheduler.connector is not None,
        "encoder connectors": scheduler.ec_connector is not None,
        "LoRA": bool(scheduler.lora_config),
        "speculative decoding": bool(scheduler.num_spec_tokens),
        "encoder-decoder models": scheduler.is_encoder_decoder,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "decode context parallelism": scheduler.dcp_world_size > 1,
        "sliding windows and hybrid models": [type(one.kv_cache_spec).__name__ for one in groups]
        != ["FullAttentionSpec"],
        "long_prefill_token_threshold_adaptive": bool(
            scheduler.scheduler_config.long_prefill_token_threshold
            and getattr(scheduler, "adaptive_long_prefill_threshold", False)
        ),
    }
    for what, is_used in refused.items():
        if is_used:
            raise UnsupportedError(f"{what}: not supported with a batching rule")
