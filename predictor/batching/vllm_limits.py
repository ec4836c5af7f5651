"""Limits with which vLLM, v0 and v1, refuses to start (0.32 `SchedulerConfig.verify_max_model_len`)."""

from __future__ import annotations

from predictor.config import EngineConfig


def check(config: EngineConfig) -> None:
    """Refuse a configuration that vLLM refuses at start."""
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and budget < config.max_model_len:
        raise ValueError(
            f"max_num_batched_tokens: {budget} is below max_model_len {config.max_model_len}, "
            "which needs enable_chunked_prefill"
        )
    if budget < config.max_num_seqs:
        raise ValueError(f"max_num_batched_tokens: {budget} is below max_num_seqs {config.max_num_seqs}")
    if budget <= config.speculation.draft_slots:
        raise ValueError(
            f"max_num_batched_tokens: {budget} leaves no token beside the {config.speculation.draft_slots} that "
            f"speculative_method {config.speculative_method} needs for each request"
        )
    if config.long_prefill_token_threshold > config.max_model_len:
        raise ValueError(
            f"long_prefill_token_threshold: {config.long_prefill_token_threshold} is above max_model_len "
            f"{config.max_model_len}"
        )
