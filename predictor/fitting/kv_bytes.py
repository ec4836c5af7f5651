"""The bytes of KV cache per token, from a model's Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor.config import require_count

BYTES_OF_CACHE = {
    "auto": 0,  # that of the weights
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
DEFAULT_DTYPE = "bfloat16"


def kv_bytes_per_token(config: Mapping[str, Any], *, cache_dtype: str = "auto", tensor_parallel: int = 1) -> int:
    """Return the bytes of one token's KV cache in all layers, on one rank.

    Attention with grouped or multiple heads keeps a key and a value for each KV head, which the ranks divide among
    them; with fewer heads than ranks each rank has one. Multi-head latent attention keeps one latent vector and its
    rotary part, which every rank has whole. Models with an inner `text_config` are described by that.
    """
    require_count("tensor_parallel", tensor_parallel)
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    size = _bytes_of_number(text, cache_dtype)
    layers = _count(text, "num_hidden_layers")
    if text.get("kv_lora_rank"):
        return layers * (_count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")) * size
    heads = _count(text, "num_attention_heads")
    kv_heads = _count(text, "num_key_value_heads") if text.get("num_key_value_heads") else heads
    head_dim = _count(text, "head_dim") if text.get("head_dim") else _count(text, "hidden_size") // heads
    return 2 * layers * max(1, kv_heads // tensor_parallel) * head_dim * size


def _bytes_of_number(config: Mapping[str, Any], cache_dtype: str) -> int:
    names = {"cache_dtype": cache_dtype}
    if cache_dtype == "auto":
        names = {"torch_dtype": str(config.get("torch_dtype") or config.get("dtype") or DEFAULT_DTYPE)}
    ((field, name),) = names.items()
    if not (size := BYTES_OF_CACHE.get(name.removeprefix("torch."), 0)):
        raise ValueError(f"{field}: {name!r} is none of {', '.join(known for known in BYTES_OF_CACHE)}")
    return size


def _count(config: Mapping[str, Any], name: str) -> int:
    if config.get(name) is None:
        raise ValueError(f"{name}: missing")
    require_count(name, config[name])
    return int(config[name])
