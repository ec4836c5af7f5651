"""The path of a scheduler's state file, and the engine's settings in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .drafts import speculation_settings, unsupported_speculation
from .layout import MAX_STEPS_IN_FLIGHT
from .scheduler_names import names_for
from .vllm_version import chosen_rules, known_version, running_version

DEFAULT_FILE = "/dev/shm/block/vllm.state"  # noqa: S108 - shared memory, in a folder that the writer creates as private
DEFAULT_LEASE_S = 30  # vLLM 0.32 distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py
MODELLED_CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
EARLY_SYNC_INTERVAL = 32  # vLLM 0.28 and 0.29 v1/engine/core.py `_has_global_unfinished_reqs`


class UnsupportedError(ValueError):
    """The engine is of a kind that state files do not support."""


def state_file(scheduler: Any) -> str:
    """Return the file of this scheduler's data-parallel rank."""
    path = Path(os.environ.get("BLOCK_STATE_FILE") or DEFAULT_FILE)
    rank = int(scheduler.vllm_config.parallel_config.data_parallel_index)
    return str(path.with_name(f"{path.stem}-dp{rank}{path.suffix}") if rank else path)


def require_supported(scheduler: Any) -> None:
    """Refuse engines with other kinds of steps than state files support."""
    config = scheduler.vllm_config
    if scheduler.num_sampled_tokens_per_step != 1:
        raise UnsupportedError("pooling and diffusion models are not supported")
    if unsupported := unsupported_speculation(scheduler):
        raise UnsupportedError(f"{unsupported} is not supported")
    if config.max_concurrent_batches > MAX_STEPS_IN_FLIGHT:
        raise UnsupportedError(f"{config.max_concurrent_batches} steps in flight are not supported")


def settings_of(scheduler: Any) -> dict[str, Any]:
    """Return the settings for the state file; `engine` has the fields of Block's `EngineConfig`, which are vLLM's."""
    engine = engine_settings(scheduler)
    if (planner := getattr(scheduler, "block_planner", None)) is not None:
        engine |= {"batcher": planner.config.batcher, "batcher_options": dict(planner.config.batcher_options)}
    return {
        "engine": engine,
        "model": str(scheduler.vllm_config.model_config.model),
        "source": f"vllm {running_version()}",
        **rank_settings(scheduler.vllm_config),
        **({"not_modelled": named} if (named := not_modelled(scheduler)) else {}),
    }


def not_modelled(scheduler: Any) -> list[str]:
    """Return what changes the scheduler's decisions and is no part of Block's engine model, each in a few words."""
    named = []
    if (interval := prefill_interval(scheduler)) > 1:
        named.append(f"prefill_schedule_interval {interval}")
    kind = type(scheduler)
    if not kind.__module__.startswith("vllm.") and not hasattr(scheduler, "block_planner"):
        named.append(f"scheduler_cls {kind.__module__}.{kind.__qualname__}")
    if getattr(scheduler, "connector", None) is not None:
        name = str(scheduler.vllm_config.kv_transfer_config.kv_connector)
        if name not in MODELLED_CONNECTORS:
            named.append(f"kv_connector {name}")
    return named


def prefill_interval(scheduler: Any) -> int:
    """Return in every how many steps prompts are computed; before 0.33 in each, except by ranks in lockstep."""
    config = scheduler.vllm_config
    if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
        return int(getattr(scheduler.scheduler_config, "prefill_schedule_interval", 1))
    return int(getattr(scheduler, "local_prefill_interval", 1))


def rank_settings(config: Any) -> dict[str, Any]:
    """Return which data-parallel rank an engine core is, and how ranks of a model with experts step together.

    Ranks of other models are independent engines to vLLM, which says no more of them than their number.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size < 2:
        return {}
    rules = {"sync_interval": EARLY_SYNC_INTERVAL, "syncs_first_step": False}  # of 0.28 and 0.29
    if (interval := getattr(parallel, "dp_sync_interval", None)) is not None:
        rules = {"sync_interval": int(interval), "syncs_first_step": True}
    return {
        "data_parallel": {
            "rank": int(parallel.data_parallel_index),
            "size": int(parallel.data_parallel_size),
            "group": f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_master_port}",
            **(rules if config.model_config.is_moe else {}),
        }
    }


def engine_settings(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's limits and rules."""
    rules, cache = scheduler.scheduler_config, scheduler.cache_config
    seats = getattr(scheduler, names_for(chosen_rules().release).seats)
    return {
        "batcher": "vllm_v1",
        "vllm_version": known_version(),
        "max_num_seqs": int(min(scheduler.max_num_running_reqs, seats)),
        "max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
        "block_size": int(scheduler.block_size),
        "num_gpu_blocks": int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks),
        "max_model_len": int(scheduler.max_model_len),
        "scheduling_policy": str(rules.policy),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enable_chunked_prefill": bool(rules.enable_chunked_prefill),
        "async_scheduling": bool(rules.async_scheduling),
        "long_prefill_token_threshold": int(rules.long_prefill_token_threshold),
        "long_prefill_token_threshold_adaptive": bool(getattr(rules, "long_prefill_token_threshold_adaptive", False)),
        "watermark": float(rules.watermark),
        "scheduler_reserve_full_isl": bool(rules.scheduler_reserve_full_isl),
        **transfer_settings(scheduler),
        **({} if getattr(scheduler, "block_planner", None) else adapter_settings(scheduler)),
        **encoder_settings(scheduler),
        **speculation_settings(scheduler),
    }


def encoder_settings(scheduler: Any) -> dict[str, Any]:
    """Return the encoder's budget; nothing for text models, for encoder-decoders, or whose steps a rule fills."""
    budget = int(getattr(scheduler, "max_num_encoder_input_tokens", 0) or 0)
    cache_size = int(getattr(getattr(scheduler, "encoder_cache_manager", None), "cache_size", 0) or 0)
    if not (budget and cache_size) or scheduler.is_encoder_decoder or getattr(scheduler, "block_planner", None):
        return {}
    return {
        "max_num_encoder_input_tokens": budget,
        "encoder_cache_size": cache_size,
        "disable_chunked_mm_input": bool(getattr(scheduler.scheduler_config, "disable_chunked_mm_input", False)),
    }


def adapter_settings(scheduler: Any) -> dict[str, Any]:
    """Return the limits of LoRA adapters; nothing for an engine that serves none, or whose steps a rule fills."""
    lora = getattr(scheduler, "lora_config", None)
    if lora is None:
        return {}
    return {"max_loras": int(lora.max_loras), "max_cpu_loras": int(lora.max_cpu_loras or lora.max_loras)}


def transfer_settings(scheduler: Any) -> dict[str, Any]:
    """Return what a scheduler with a KV connector says about transfers of KV blocks; nothing without one."""
    if getattr(scheduler, "connector", None) is None:
        return {}
    transfers = scheduler.vllm_config.kv_transfer_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    block_bytes = sum(len(group.layer_names) * int(group.kv_cache_spec.page_size_bytes) for group in groups)
    return {
        "kv_role": str(transfers.kv_role),
        "kv_load_failure_policy": str(transfers.kv_load_failure_policy),
        "kv_lease_s": float(transfers.get_from_extra_config("kv_lease_duration", DEFAULT_LEASE_S)),
        "kv_bytes_per_token": block_bytes // int(scheduler.block_size),
    }
