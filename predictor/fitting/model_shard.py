"""The part of a model that one device holds, read from `config.json`: the shapes of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictor.config import require_count
from predictor.fitting.roofline import RESERVED_BYTES, ModelShape, model_shape

# Decoders of one kind: norm, attention with rotary positions, norm, gated MLP. Other features are read below.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4}
LONGEST = 32768  # tokens, unless the model supports fewer; longer sequences are extrapolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One device's part of each layer and of the head, and the model that it is part of."""

    model: ModelShape
    tensor_parallel: int
    dtype: str
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    has_qkv_bias: bool
    has_qk_norm: bool
    has_one_embedding: bool  # input and output embedding are the same
    longest: int  # tokens of a sequence

    @property
    def qkv_size(self) -> int:
        """The width of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.model.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values on this device, in one layer."""
        return 2 * self.num_kv_heads * self.model.head_dim * BYTES_OF[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of the parameters on this device."""
        whole = self.model.weight_bytes / self.model.bytes_per_weight
        if self.has_one_embedding:
            whole -= self.model.head_weights
        return whole * BYTES_OF[self.dtype] / self.tensor_parallel

    def kv_tokens(self, memory_bytes: float, utilization: float) -> int:
        """Return the number of tokens whose keys and values fit into memory beside the weights; ValueError for none."""
        room = memory_bytes * utilization - RESERVED_BYTES - self.weight_bytes
        tokens = int(room // (self.kv_bytes * self.model.num_layers))
        if tokens < 1:
            raise ValueError(
                f"tensor_parallel: {self.weight_bytes / 1e9:.1f} GB of weights leave no room for KV blocks on a device"
                f" of {memory_bytes / 1e9:.0f} GB"
            )
        return tokens


def share_of(config: Mapping[str, Any], *, tensor_parallel: int = 1, dtype: str = "auto") -> Share:
    """Divide a model among devices as vLLM does; ValueError for a model with other kernels, or that is not divisible.

    Where there are fewer KV heads than devices, several devices hold the same head.
    """
    require_count("tensor_parallel", tensor_parallel)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type: {family!r} cannot be timed, only {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise ValueError("quantization_config: kernels of quantized weights cannot be timed")
    model = model_shape(config)
    if model.num_experts:
        raise ValueError("num_experts: a mixture of experts cannot be timed")
    if model.num_heads % model.num_kv_heads:
        raise ValueError(f"num_key_value_heads: {model.num_kv_heads} do not divide {model.num_heads} heads")
    for name, count in (("num_attention_heads", model.num_heads), ("intermediate_size", model.intermediate_size)):
        if count % tensor_parallel:
            raise ValueError(f"tensor_parallel: {tensor_parallel} devices cannot share {name}, {count}, evenly")
    fewer, more = sorted((tensor_parallel, model.num_kv_heads))
    if more % fewer:
        raise ValueError(
            f"tensor_parallel: {tensor_parallel} devices cannot share num_key_value_heads, {model.num_kv_heads}, evenly"
        )
    return Share(
        model=model,
        tensor_parallel=tensor_parallel,
        dtype=_dtype_of(config) if dtype == "auto" else dtype,
        num_heads=model.num_heads // tensor_parallel,
        num_kv_heads=max(1, model.num_kv_heads // tensor_parallel),
        intermediate_size=model.intermediate_size // tensor_parallel,
        vocab_size=-(-model.vocab_size // tensor_parallel),
        has_qkv_bias=family == "qwen2" or bool(config.get("attention_bias")),
        has_qk_norm=family == "qwen3",
        has_one_embedding=bool(config.get("tie_word_embeddings")),
        longest=_longest(config),
    )


def _dtype_of(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype not in BYTES_OF:
        raise ValueError(f"torch_dtype: {dtype!r} cannot be timed, only {', '.join(BYTES_OF)}")
    return dtype


def _longest(config: Mapping[str, Any]) -> int:
    """Return the longest sequence, limited to a sliding window: only full attention is timed."""
    longest = LONGEST
    windowed = config.get("use_sliding_window", config.get("model_type") == "mistral")
    for name in ("max_position_embeddings", *(("sliding_window",) if windowed else ())):
        if config.get(name) is not None:
            require_count(name, config[name])
            longest = min(longest, int(config[name]))
    return longest
