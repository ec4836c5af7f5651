"""Reads a model's sizes from its Hugging Face `config.json`, by the names that each family gives to its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor.config import require_count
from predictor.fitting.model_shape import Experts, LatentAttention, LinearAttention, ModelShape, SlidingWindow
from predictor.fitting.quantization import dtype_bytes, kv_number_bytes, weight_bytes_of
from predictor.suggestions import require_choice

Config = Mapping[str, Any]

# The field with the number of experts; where a family is known to have experts, the field must be there.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERT_COUNT_OF = {
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "deepseek_v32": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts",
    "glm4_moe": "n_routed_experts",
    "glm4_moe_lite": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    "kimi_k2": "n_routed_experts",
    "llama4_text": "num_local_experts",
    "mixtral": "num_local_experts",
    "olmoe": "num_experts",
    "phimoe": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "qwen3_next": "num_experts",
}
PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_k")
# Families whose `intermediate_size` is that of one expert.
SIZE_OF_AN_EXPERT = ("mixtral", "gpt_oss", "phimoe", "olmoe", "llama4_text")
# Every so many layers one attends to everything, where the file has a window but no list of layers.
WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}
CHUNK_PATTERN = 4  # of models with chunked attention
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
LAYER_TYPES = (FULL, SLIDING, CHUNKED, LINEAR)


def text_config(config: Config) -> Config:
    """Return the part about the language model: multimodal models have an inner `text_config`."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def model_shape(config: Config, *, cache_dtype: str = "auto") -> ModelShape:
    """Read the sizes of a decoder; an error is one line that starts with the field."""
    config = text_config(config)
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    latent = _latent(config)
    if hidden % heads and not config.get("head_dim") and not latent:
        raise ValueError(f"head_dim: missing, and hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    kv_heads = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if kv_heads > heads:
        raise ValueError(f"num_key_value_heads: {kv_heads} is more than num_attention_heads {heads}")
    layers = _count(config, "num_hidden_layers")
    experts = _experts(config, layers)
    kinds = _layer_kinds(config, layers)
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_count(config, "head_dim") if config.get("head_dim") else hidden // heads,
        intermediate_size=_dense_size(config, experts, layers),
        vocab_size=_count(config, "vocab_size"),
        weight_bytes_each=weight_bytes_of(config),
        number_bytes=max(2, dtype_bytes(config)),
        kv_number_bytes=kv_number_bytes(config, cache_dtype=cache_dtype),
        has_one_embedding=bool(config.get("tie_word_embeddings")),
        has_gated_queries=config.get("model_type") == "qwen3_next",
        experts=experts,
        latent=latent,
        window=_window(config, kinds),
        linear=_linear(config, kinds),
    )


def _experts(config: Config, layers: int) -> Experts | None:
    family = str(config.get("model_type") or "")
    found = next((name for name in EXPERT_COUNTS if config.get(name)), None)
    if found is None:
        if family in EXPERT_COUNT_OF:
            raise ValueError(f"{EXPERT_COUNT_OF[family]}: missing, and model_type {family} has experts")
        return None
    num = _count(config, found)
    per_token = next((_count(config, name) for name in PER_TOKEN if config.get(name) is not None), None)
    if per_token is None:
        raise ValueError(f"{PER_TOKEN[0]}: missing, and {found} is {num}")
    if per_token > num:
        raise ValueError(f"{PER_TOKEN[0]}: {per_token} is more than {found} {num}")
    if config.get("moe_intermediate_size") is not None:
        size = _count(config, "moe_intermediate_size")
    elif family in SIZE_OF_AN_EXPERT:
        size = _count(config, "intermediate_size")
    else:
        raise ValueError(f"moe_intermediate_size: missing, and {found} is {num}")
    with_experts = _num_expert_layers(config, layers)
    if with_experts == 0:
        return None
    return Experts(
        num=num, per_token=per_token, size=size, shared_size=_shared_size(config, size), num_layers=with_experts
    )


def _num_expert_layers(config: Config, layers: int) -> int:
    """Count the layers with experts: after the first dense ones, every so many, less those that are listed."""
    if isinstance(listed := config.get("moe_layers"), list):
        return len(listed)
    first = _whole(config, "first_k_dense_replace", 0)
    frequency = next(
        (_count(config, n) for n in ("moe_layer_freq", "interleave_moe_layer_step") if isinstance(config.get(n), int)),
        1,
    )
    step = _whole(config, "decoder_sparse_step", 1) or 1
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers: must be a list of layers, not {str(dense)[:40]!r}")
    if first > layers:
        raise ValueError(f"first_k_dense_replace: {first} is more than num_hidden_layers {layers}")
    if config.get("interleave_moe_layer_step") is not None:
        return sum((layer + 1) % frequency == 0 for layer in range(layers))
    return sum(
        layer >= first and layer % frequency == 0 and (layer + 1) % step == 0 and layer not in dense
        for layer in range(layers)
    )


def _shared_size(config: Config, size: int) -> int:
    """Return the width of all shared experts of a layer together."""
    if config.get("shared_expert_intermediate_size"):
        return _count(config, "shared_expert_intermediate_size")
    if config.get("model_type") == "llama4_text":  # one, as large as the others
        return size
    for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"):
        if config.get(name):
            return _count(config, name) * size
    return 0


def _dense_size(config: Config, experts: Experts | None, layers: int) -> int:
    """Return the width of a dense layer's MLP, which a model with experts in all layers may leave out."""
    if experts and experts.num_layers == layers:
        return 0
    return _count(config, "intermediate_size_mlp" if config.get("intermediate_size_mlp") else "intermediate_size")


def _latent(config: Config) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        if str(config.get("model_type")).startswith(("deepseek_v", "kimi_k", "glm4_moe_lite")):
            raise ValueError(f"kv_lora_rank: missing, and model_type {config['model_type']} has latent attention")
        return None
    return LatentAttention(
        query_rank=_whole(config, "q_lora_rank", 0),
        kv_rank=_count(config, "kv_lora_rank"),
        nope_dim=_count(config, "qk_nope_head_dim"),
        rope_dim=_count(config, "qk_rope_head_dim"),
        value_dim=_count(config, "v_head_dim"),
    )


def _layer_kinds(config: Config, layers: int) -> list[str]:
    """Return what each layer attends to."""
    listed = config.get("layer_types")
    if isinstance(listed, list):
        if len(listed) != layers:
            raise ValueError(f"layer_types: has {len(listed)} entries, but num_hidden_layers is {layers}")
        for kind in listed:
            require_choice("layer_types", kind, LAYER_TYPES)
        return [str(kind) for kind in listed]
    if interval := _whole(config, "full_attention_interval", 0):
        return [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    family = str(config.get("model_type") or "")
    if config.get("attention_chunk_size"):
        return [CHUNKED if (layer + 1) % CHUNK_PATTERN else FULL for layer in range(layers)]
    if not _has_window(config, family):
        return [FULL] * layers
    pattern = _whole(config, "sliding_window_pattern", WINDOW_PATTERNS.get(family, 0))
    if pattern:
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    full = _whole(config, "max_window_layers", 0) if family.startswith("qwen") else 0
    return [FULL if layer < full else SLIDING for layer in range(layers)]


def _has_window(config: Config, family: str) -> bool:
    if not config.get("sliding_window"):
        return False
    return bool(config.get("use_sliding_window", not family.startswith("qwen")))


def _window(config: Config, kinds: list[str]) -> SlidingWindow | None:
    windowed = sum(kind in (SLIDING, CHUNKED) for kind in kinds)
    if not windowed:
        return None
    name = "attention_chunk_size" if CHUNKED in kinds else "sliding_window"
    return SlidingWindow(num_tokens=_count(config, name), num_layers=windowed)


def _linear(config: Config, kinds: list[str]) -> LinearAttention | None:
    """Read layers with a gated delta rule: a matrix of keys and values for each head, and a short convolution."""
    num = kinds.count(LINEAR)
    if not num:
        return None
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    key_heads, value_heads, key_dim, value_dim, kernel = (_count(config, f"linear_{name}") for name in names)
    keys, values, hidden = key_heads * key_dim, value_heads * value_dim, _count(config, "hidden_size")
    return LinearAttention(
        num_layers=num,
        weights=hidden * (2 * keys + 2 * values + 2 * value_heads + values),
        state_numbers=value_heads * key_dim * value_dim + (2 * keys + values) * (kernel - 1),
        state_number_bytes=4 if config.get("mamba_ssm_dtype") == "float32" else max(2, dtype_bytes(config)),
    )


def _count(config: Config, name: str) -> int:
    if config.get(name) is None:
        raise ValueError(f"{name}: missing")
    require_count(name, config[name])
    return int(config[name])


def _whole(config: Config, name: str, default: int) -> int:
    """Return a whole number from zero, or the default where the field is missing or null."""
    if config.get(name) is None:
        return default
    require_count(name, config[name], at_least=0)
    return int(config[name])
