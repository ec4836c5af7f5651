"""The path of a scheduler's state file, and the engine's settings in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .layout import MAX_STEPS_IN_FLIGHT

DEFAULT_FILE = "/dev/shm/block/vllm.state"  # noqa: S108 - shared memory, in a folder that the writer creates as private
DEFAULT_LEASE_S = 30  # vLLM 0.32 distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py


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
    if scheduler.num_spec_tokens:
        raise UnsupportedError("speculative decoding is not supported")
    if config.max_concurrent_batches > MAX_STEPS_IN_FLIGHT:
        raise UnsupportedError(f"{config.max_concurrent_batches} steps in flight are not supported")


def settings_of(scheduler: Any) -> dict[str, Any]:
    """Return the settings for the state file; `engine` has the fields of Block's `EngineConfig`, which are vLLM's."""
    import vllm

    engine = engine_settings(scheduler)
    if (planner := getattr(scheduler, "block_planner", None)) is not None:
        engine |= {"batcher": planner.config.batcher, "batcher_options": dict(planner.config.batcher_options)}
    return {
        "engine": engine,
        "model": str(scheduler.vllm_config.model_config.model),
        "source": f"vllm {vllm.__version__}",
    }


def engine_settings(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's limits and rules."""
    rules, cache = scheduler.scheduler_config, scheduler.cache_config
    return {
        "batcher": "vllm_v1",
        "max_num_seqs": int(min(scheduler.max_num_running_reqs, scheduler.max_num_active_reqs)),
        "max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
        "block_size": int(scheduler.block_size),
        "num_gpu_blocks": int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks),
        "max_model_len": int(scheduler.max_model_len),
        "scheduling_policy": str(rules.policy),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enable_chunked_prefill": bool(rules.enable_chunked_prefill),
        "async_scheduling": bool(rules.async_scheduling),
        "long_prefill_token_threshold": int(rules.long_prefill_token_threshold),
        "watermark": float(rules.watermark),
        "scheduler_reserve_full_isl": bool(rules.scheduler_reserve_full_isl),
        **transfer_settings(scheduler),
        **({} if getattr(scheduler, "block_planner", None) else adapter_settings(scheduler)),
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
