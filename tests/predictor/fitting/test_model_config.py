"""Sizes of known models from their config.json, against published and hand-computed ones."""

from __future__ import annotations

from typing import Any

import pytest

from predictor.fitting.gpus import GPUS
from predictor.fitting.kv_memory import kv_bytes_per_token, num_gpu_blocks
from predictor.fitting.model_config import model_shape
from predictor.fitting.model_shape import Experts, SlidingWindow
from tests.predictor.fitting.model_configs import (
    DEEPSEEK_V3,
    GEMMA_3_27B,
    GLM_45_AIR,
    GPT_OSS_120B,
    LLAMA_4_SCOUT,
    LLAMA_31_8B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
)

KIB = 1024


@pytest.mark.parametrize(
    ("config", "gigabytes"),
    [
        (LLAMA_31_8B, 2 * 8.03),
        (QWEN3_30B_A3B, 2 * 30.53),
        (DEEPSEEK_V3, 671 + 2),  # one byte a weight, two in the embeddings
        (GPT_OSS_120B, 65.3),  # 60.8 GiB
        (MIXTRAL_8X7B, 2 * 46.7),
        (QWEN3_NEXT_80B, 2 * 79.7),
        (GLM_45_AIR, 2 * 106.9),
        (LLAMA_4_SCOUT, 2 * 107.8),
        (GEMMA_3_27B, 2 * 27.0),
    ],
)
def test_parameters_are_the_published_ones(config: dict[str, Any], gigabytes: float) -> None:
    """All weights of the language model, in bytes."""
    assert model_shape(config).weight_bytes == pytest.approx(gigabytes * 1e9, rel=0.006)


@pytest.mark.parametrize(
    ("config", "kib"),
    [
        (LLAMA_31_8B, 128),
        (QWEN3_30B_A3B, 96),  # 48 layers x 2 x 4 heads x 128 x 2 bytes
        (DEEPSEEK_V3, 68.625),  # 61 layers x (512 + 64) x 2 bytes
        (GPT_OSS_120B, 72),
        (QWEN3_NEXT_80B, 24),  # 12 of 48 layers
        (GEMMA_3_27B, 496),
    ],
)
def test_a_new_token_takes_keys_and_values_in_all_attention_layers(config: dict[str, Any], kib: float) -> None:
    """Layers times keys and values of all KV heads, or times one latent vector."""
    assert model_shape(config).kv_bytes_per_token == kib * KIB


def test_windows_and_states_do_not_grow() -> None:
    """gpt-oss keeps 128 tokens in half of its layers; Qwen3-Next has a state of a constant size."""
    oss = model_shape(GPT_OSS_120B)
    layer = 2 * 8 * 64 * 2
    assert oss.sequence_bytes(100) == 36 * 100 * layer
    assert oss.sequence_bytes(10_000) == 18 * 10_000 * layer + 18 * 128 * layer
    assert kv_bytes_per_token(oss) < 0.52 * oss.kv_bytes_per_token
    following = model_shape(QWEN3_NEXT_80B)
    state = 36 * (32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3) * 2
    assert following.sequence_bytes(1) == 12 * 2 * 2 * 256 * 2 + state


def test_ranks_divide_heads_but_not_latents() -> None:
    """A rank has at least one head; the latent vector is on every rank, and experts are divided among all ranks."""
    llama, deepseek = model_shape(LLAMA_31_8B), model_shape(DEEPSEEK_V3)
    assert llama.layer_kv_bytes(tensor_parallel=4) == llama.layer_kv_bytes() / 4
    assert llama.layer_kv_bytes(tensor_parallel=16) == llama.layer_kv_bytes() / 8
    assert deepseek.layer_kv_bytes(tensor_parallel=8) == deepseek.layer_kv_bytes()
    experts = 58 * 256 * 3 * 7168 * 2048
    alone, eight = (deepseek.rank_weight_bytes(tensor_parallel=1, data_parallel=ranks) for ranks in (1, 8))
    assert alone - eight == pytest.approx(experts * 7 / 8)


def test_the_cache_may_have_another_type() -> None:
    """An 8-bit cache takes half: by the engine's option, or as the model's file says."""
    assert model_shape(LLAMA_31_8B, cache_dtype="fp8_e4m3").kv_bytes_per_token == 64 * KIB
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert model_shape(LLAMA_31_8B | {"quantization_config": scheme}).kv_bytes_per_token == 64 * KIB


def test_blocks_for_kv() -> None:
    """The memory beside weights, at 90 % less 2 GB, over the bytes of 16 tokens."""
    llama = model_shape(LLAMA_31_8B)
    room = 0.9 * 80e9 - 2e9 - llama.weight_bytes
    assert num_gpu_blocks(llama, GPUS["H100"]) == room // (16 * 128 * KIB)
    # Each of 16 ranks has a sixteenth of the experts, all other weights, and whole latents.
    deepseek = model_shape(DEEPSEEK_V3)
    room = 0.9 * 141e9 - 2e9 - deepseek.rank_weight_bytes(tensor_parallel=1, data_parallel=16)
    assert num_gpu_blocks(deepseek, GPUS["H200"], data_parallel=16) == room // (16 * 68.625 * KIB)
    with pytest.raises(ValueError, match=r"^tensor_parallel: 61 GB of weights leave no room"):
        num_gpu_blocks(model_shape(QWEN3_30B_A3B), GPUS["A30"])


def test_experts_by_family() -> None:
    """Families name the same sizes differently."""
    assert model_shape(QWEN3_30B_A3B).experts == Experts(num=128, per_token=8, size=768, shared_size=0, num_layers=48)
    assert model_shape(DEEPSEEK_V3).experts == Experts(num=256, per_token=8, size=2048, shared_size=2048, num_layers=58)
    assert model_shape(GPT_OSS_120B).experts == Experts(num=128, per_token=4, size=2880, shared_size=0, num_layers=36)
    assert model_shape(LLAMA_4_SCOUT).experts == Experts(
        num=16, per_token=1, size=8192, shared_size=8192, num_layers=48
    )
    every_second = QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    found = model_shape(every_second)
    assert found.experts is not None
    assert found.experts.num_layers == 23
    assert found.num_dense_layers == 25
    assert found.mlp_weights == 3 * 2048 * 6144


def test_untouched_experts_are_not_read() -> None:
    """One token leaves 120 of 128 experts of each layer; a dense model has none to leave."""
    qwen = model_shape(QWEN3_30B_A3B)
    assert qwen.weight_bytes - qwen.touched_bytes(1) == pytest.approx(48 * 120 * 3 * 2048 * 768 * 2)
    assert model_shape(LLAMA_31_8B).touched_bytes(1) == model_shape(LLAMA_31_8B).weight_bytes


def test_windows_by_family() -> None:
    """By a list of layers, by a pattern, in all layers, or not used."""
    assert model_shape(GPT_OSS_120B).window == SlidingWindow(num_tokens=128, num_layers=18)
    assert model_shape(GEMMA_3_27B).window == SlidingWindow(num_tokens=1024, num_layers=52)
    assert model_shape(LLAMA_4_SCOUT).window == SlidingWindow(num_tokens=8192, num_layers=36)
    mistral = LLAMA_31_8B | {"model_type": "mistral", "sliding_window": 4096}
    assert model_shape(mistral).window == SlidingWindow(num_tokens=4096, num_layers=32)
    assert model_shape(mistral | {"model_type": "qwen2"}).window is None


@pytest.mark.parametrize(
    ("num", "per_token", "tokens", "expected"),
    [
        (8, 2, 1, 2.0),
        (8, 2, 2, 3.5),  # 8 - 8 x (3/4)²
        (128, 8, 16, 128 * (1 - (15 / 16) ** 16)),
        (4, 4, 1, 4.0),
    ],
)
def test_distinct_experts(num: int, per_token: int, tokens: int, expected: float) -> None:
    """The expected number of distinct experts, where each token draws its own without repetition."""
    experts = Experts(num=num, per_token=per_token, size=1, shared_size=0, num_layers=1)
    assert experts.touched(tokens) == pytest.approx(expected)


def test_a_window_is_a_line() -> None:
    """The line for a short window is nearly constant; a window longer than all contexts is no window."""
    at_once, each = SlidingWindow(num_tokens=128, num_layers=1).attended()
    assert at_once + 4096 * each == pytest.approx(128, rel=0.03)
    at_once, each = SlidingWindow(num_tokens=100_000, num_layers=1).attended()
    assert (at_once, each) == (pytest.approx(0, abs=1e-6), pytest.approx(1))


@pytest.mark.parametrize(
    ("config", "changed", "error"),
    [
        (LLAMA_31_8B, {"num_hidden_layers": None}, "num_hidden_layers: missing"),
        (LLAMA_31_8B, {"hidden_size": -1}, "hidden_size: "),
        (LLAMA_31_8B, {"vocab_size": "many"}, "vocab_size: "),
        (LLAMA_31_8B, {"num_attention_heads": 0}, "num_attention_heads: "),
        (LLAMA_31_8B, {"num_attention_heads": 24}, "head_dim: missing"),
        (LLAMA_31_8B, {"num_key_value_heads": 64}, "num_key_value_heads: "),
        (LLAMA_31_8B, {"torch_dtype": "int3"}, "torch_dtype: "),
        (LLAMA_31_8B, {"layer_types": ["full_attention"]}, "layer_types: has 1 entries"),
        (LLAMA_31_8B, {"layer_types": ["mamba"] * 32}, "layer_types: must be one of .*, not 'mamba'"),
        (QWEN3_30B_A3B, {"num_experts": None}, "num_experts: missing, and model_type qwen3_moe has experts"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": None}, "num_experts_per_tok: missing"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 200}, "num_experts_per_tok: 200 is more than num_experts 128"),
        (QWEN3_30B_A3B, {"mlp_only_layers": 5}, "mlp_only_layers: must be a list"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": None}, "moe_intermediate_size: missing"),
        (MIXTRAL_8X7B, {"num_local_experts": None}, "num_local_experts: missing"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank: missing"),
        (DEEPSEEK_V3, {"v_head_dim": None}, "v_head_dim: missing"),
        (DEEPSEEK_V3, {"intermediate_size": None}, "intermediate_size: missing"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 99}, "first_k_dense_replace: 99 is more than"),
        (QWEN3_NEXT_80B, {"linear_num_key_heads": None}, "linear_num_key_heads: missing"),
    ],
)
def test_a_bad_field_is_named(config: dict[str, Any], changed: dict[str, Any], error: str) -> None:
    """The error is one line that starts with the field."""
    with pytest.raises(ValueError, match=f"^{error}") as raised:
        model_shape({**config, **changed})
    assert "\n" not in str(raised.value)
