"""The part of a model that one device holds, read from `config.json`: the shapes of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictor.config import require_count
from predictor.fitting.kv_memory import RESERVED_BYTES, kv_bytes_per_token
from predictor.fitting.model_config import model_shape
from predictor.fitting.model_shape import LatentAttention, ModelShape
from predictor.fitting.quantization import dtype_of

# Decoders of one kind: norm, attention with rotary positions, norm, gated MLP or experts. Features are read below.
FAMILIES = ("glm4_moe", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
WITH_LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")  # one layer in vLLM, `DeepseekV2MLAAttention`
WITH_QKV_BIAS = ("gpt_oss", "qwen2", "qwen2_moe")
WITH_QK_NORM = ("qwen3", "qwen3_moe")
BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4}
LONGEST = 32768  # tokens, unless the model supports fewer; longer sequences are extrapolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One device's part of each layer and of the head, and the model that it is part of."""

    model: ModelShape
    tensor_parallel: int
    dtype: str
    num_heads: int
    num_kv_heads: int  # 1 with latent attention: what is cached serves all heads
    intermediate_size: int  # of a dense MLP; 0 where all layers have experts
    expert_size: int  # of one expert: each device has a part of all of them
    shared_size: int  # of all shared experts together
    vocab_size: int
    has_qkv_bias: bool
    has_qk_norm: bool
    longest: int  # tokens of a sequence

    @property
    def qkv_size(self) -> int:
        """The width of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.model.head_dim

    @property
    def attended_size(self) -> int:
        """The width of what attention returns, for all heads together."""
        return self.num_heads * (self.model.latent.value_dim if self.model.latent else self.model.head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values on this device, in one layer; latents are whole on every device."""
        if self.model.latent:
            return self.model.latent.cached_dim * BYTES_OF[self.dtype]
        return 2 * self.num_kv_heads * self.model.head_dim * BYTES_OF[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of the parameters on this device."""
        own_type = self.model.rank_weight_bytes(tensor_parallel=self.tensor_parallel)
        return own_type * BYTES_OF[self.dtype] / self.model.number_bytes

    def kv_tokens(self, memory_bytes: float, utilization: float) -> int:
        """Return the number of tokens whose keys and values fit into memory beside the weights; ValueError for none."""
        room = memory_bytes * utilization - RESERVED_BYTES - self.weight_bytes
        own_type = kv_bytes_per_token(self.model, tensor_parallel=self.tensor_parallel)
        tokens = int(room // (own_type * BYTES_OF[self.dtype] / self.model.number_bytes))
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
    if family not in FAMILIES + WITH_LATENTS:
        raise ValueError(f"model_type: {family!r} cannot be timed, only {', '.join(sorted(FAMILIES + WITH_LATENTS))}")
    if config.get("quantization_config"):
        raise ValueError("quantization_config: kernels of quantized weights cannot be timed")
    model = model_shape(config)
    if model.latent:
        _require_dense_latents(config, model.latent)
    dtype = _dtype_of(config) if dtype == "auto" else dtype
    if model.num_heads % model.num_kv_heads:
        raise ValueError(f"num_key_value_heads: {model.num_kv_heads} do not divide {model.num_heads} heads")
    experts = model.experts
    divided = {"num_attention_heads": model.num_heads, "intermediate_size": model.intermediate_size}
    if experts:
        divided |= {"moe_intermediate_size": experts.size, "shared_expert_intermediate_size": experts.shared_size}
    for name, count in divided.items():
        if count % tensor_parallel:
            raise ValueError(f"tensor_parallel: {tensor_parallel} devices cannot share {name}, {count}, evenly")
    kv_heads = 1 if model.latent else model.num_kv_heads
    fewer, more = sorted((tensor_parallel, kv_heads))
    if more % fewer:
        raise ValueError(
            f"tensor_parallel: {tensor_parallel} devices cannot share num_key_value_heads, {model.num_kv_heads}, evenly"
        )
    return Share(
        model=model,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        num_heads=model.num_heads // tensor_parallel,
        num_kv_heads=max(1, kv_heads // tensor_parallel),
        intermediate_size=model.intermediate_size // tensor_parallel,
        expert_size=experts.size // tensor_parallel if experts else 0,
        shared_size=experts.shared_size // tensor_parallel if experts else 0,
        vocab_size=-(-model.vocab_size // tensor_parallel),
        has_qkv_bias=not model.latent and (family in WITH_QKV_BIAS or bool(config.get("attention_bias"))),
        has_qk_norm=family in WITH_QK_NORM or bool(config.get("use_qk_norm")),
        longest=_longest(config),
    )


def _require_dense_latents(config: Mapping[str, Any], latent: LatentAttention) -> None:
    """Refuse latent attention that chooses among the tokens, or whose sizes are not all there."""
    if config["model_type"] not in WITH_LATENTS:
        raise ValueError(f"kv_lora_rank: model_type {config['model_type']} has no latent attention")
    if "q_lora_rank" not in config:  # transformers has a default, other than null
        raise ValueError("q_lora_rank: missing; null is for queries without a latent")
    if config.get("index_topk"):
        raise ValueError("index_topk: kernels of sparse attention cannot be timed")
    if latent.value_dim > latent.key_dim:
        raise ValueError(
            f"v_head_dim: {latent.value_dim} is more than qk_nope_head_dim and qk_rope_head_dim, {latent.key_dim}"
        )


def _dtype_of(config: Mapping[str, Any]) -> str:
    dtype = dtype_of(config)
    if dtype not in BYTES_OF:
        raise ValueError(f"torch_dtype: {dtype!r} cannot be timed, only {', '.join(BYTES_OF)}")
    return dtype


def _longest(config: Mapping[str, Any]) -> int:
    """Return the longest sequence."""
    if config.get("max_position_embeddings") is None:
        return LONGEST
    require_count("max_position_embeddings", config["max_position_embeddings"])
    return min(LONGEST, int(config["max_position_embeddings"]))
