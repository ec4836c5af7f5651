"""Bytes of KV cache per token of known models, with grouped heads and with latent attention."""

from __future__ import annotations

from typing import Any

import pytest

from predictor.fitting.kv_bytes import kv_bytes_per_token
from predictor.fitting.roofline import model_shape


def grouped(layers: int, kv_heads: int, head_dim: int, heads: int = 64) -> dict[str, Any]:
    """Return the fields of a config.json that count."""
    return {
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "num_attention_heads": heads, "torch_dtype": "bfloat16",
    }  # fmt: skip


DEEPSEEK_V3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
LLAMA_31_8B = {
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_2_7B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kib"),
    [
        (LLAMA_31_8B, 128),
        (LLAMA_2_7B, 512),
        (grouped(28, 4, 128, heads=28), 56),  # Qwen2-7B
        (grouped(64, 8, 128), 256),  # Qwen3-32B
        (grouped(80, 8, 128), 320),  # Llama-3.1-70B
        (DEEPSEEK_V3, 68.625),
    ],
)
def test_known_models(config: dict[str, Any], kib: float) -> None:
    """They are layers times keys and values of all KV heads, or times one latent vector, times the number's size."""
    assert kv_bytes_per_token(config) == 1024 * kib


def test_it_agrees_with_the_roofline() -> None:
    """Both read the same sizes from a configuration."""
    assert kv_bytes_per_token(LLAMA_31_8B) == model_shape(LLAMA_31_8B).kv_bytes_per_token


def test_ranks_divide_heads_but_not_latents() -> None:
    """A rank has at least one head; the latent vector is on every rank."""
    whole = kv_bytes_per_token(LLAMA_31_8B)
    assert kv_bytes_per_token(LLAMA_31_8B, tensor_parallel=4) == whole // 4
    assert kv_bytes_per_token(LLAMA_31_8B, tensor_parallel=16) == whole // 8
    assert kv_bytes_per_token(DEEPSEEK_V3, tensor_parallel=8) == kv_bytes_per_token(DEEPSEEK_V3)


def test_the_cache_may_have_another_type() -> None:
    """An 8-bit cache takes half; a multimodal model is described by its text part."""
    assert kv_bytes_per_token(LLAMA_31_8B, cache_dtype="fp8_e4m3") == kv_bytes_per_token(LLAMA_31_8B) // 2
    assert kv_bytes_per_token({"model_type": "any", "text_config": LLAMA_31_8B}) == kv_bytes_per_token(LLAMA_31_8B)


@pytest.mark.parametrize(
    ("config", "cache_dtype", "error"),
    [
        ({}, "auto", "num_hidden_layers: missing"),
        (LLAMA_31_8B | {"num_hidden_layers": 0}, "auto", "num_hidden_layers: must be at least 1"),
        (LLAMA_31_8B | {"torch_dtype": "int3"}, "auto", "torch_dtype: 'int3' is none of"),
        (LLAMA_31_8B, "fp3", "cache_dtype: 'fp3' is none of"),
        ({"num_hidden_layers": 1, "kv_lora_rank": 8}, "auto", "qk_rope_head_dim: missing"),
    ],
)
def test_a_bad_field_is_named(config: dict[str, Any], cache_dtype: str, error: str) -> None:
    """The error is one line that starts with the field."""
    with pytest.raises(ValueError, match=f"^{error}"):
        kv_bytes_per_token(config, cache_dtype=cache_dtype)
