"""The part of a model on one device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.fitting.model_shard import LONGEST, share_of
from tests.predictor.fitting.model_configs import DEEPSEEK_V3, GLM_45_AIR

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
DEEPSEEK = {name: value for name, value in DEEPSEEK_V3.items() if name != "quantization_config"}


def test_a_whole_model_on_one_device_has_its_published_size() -> None:
    """Llama-3.1-8B has eight billion parameters, and 128 KiB of keys and values per token."""
    share = share_of(LLAMA_8B)
    assert share.weight_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    assert share.kv_bytes * share.model.num_layers == 128 * 1024
    assert share.qkv_size == 4096 + 2 * 1024
    assert not share.has_qk_norm
    assert not share.has_qkv_bias


@given(st.sampled_from([1, 2, 4, 8, 16, 32]))
@settings(deadline=None)
def test_devices_share_everything_evenly(devices: int) -> None:
    """Heads, MLP and vocabulary are divided; KV heads too, and with more devices than KV heads they are copied."""
    whole, share = share_of(LLAMA_8B), share_of(LLAMA_8B, tensor_parallel=devices)
    assert share.num_heads * devices == whole.num_heads
    assert share.intermediate_size * devices == whole.intermediate_size
    assert share.vocab_size * devices >= whole.vocab_size
    assert share.num_kv_heads == max(1, whole.num_kv_heads // devices)
    assert share.weight_bytes * devices == pytest.approx(whole.weight_bytes)


def test_the_rest_of_memory_is_counted_in_tokens() -> None:
    """With 90 % of 80 GB, 8B leaves room for about four hundred thousand; with 16 GB for none."""
    share = share_of(LLAMA_8B)
    assert 350_000 < share.kv_tokens(80e9, 0.9) < 450_000
    assert share_of(LLAMA_8B, tensor_parallel=2).kv_tokens(80e9, 0.9) > 2 * share.kv_tokens(80e9, 0.9)
    with pytest.raises(ValueError, match=r"^tensor_parallel: 16\.1 GB of weights leave no room"):
        share.kv_tokens(16e9, 0.9)


def test_families_differ_little() -> None:
    """Qwen2 adds a bias to its queries, keys and values, and Qwen3 norms its heads; one embedding may serve twice."""
    assert share_of({**LLAMA_8B, "model_type": "qwen2"}).has_qkv_bias
    assert share_of({**LLAMA_8B, "model_type": "qwen3"}).has_qk_norm
    tied = share_of({**LLAMA_8B, "tie_word_embeddings": True})
    assert share_of(LLAMA_8B).weight_bytes - tied.weight_bytes == 2 * 128256 * 4096


def test_sequences_are_limited() -> None:
    """By the model's length, or by the longest that is timed."""
    assert share_of(LLAMA_8B).longest == LONGEST
    assert share_of({**LLAMA_8B, "max_position_embeddings": 2048}).longest == 2048
    assert share_of({k: v for k, v in LLAMA_8B.items() if k != "max_position_embeddings"}).longest == LONGEST


def test_each_device_has_a_part_of_every_expert() -> None:
    """Four devices each have a quarter of the width of all experts, shared ones included."""
    whole, quarter = (share_of(GLM_45_AIR, tensor_parallel=count) for count in (1, 4))
    assert (whole.expert_size, whole.shared_size) == (1408, 1408)
    assert (quarter.expert_size, quarter.shared_size) == (352, 352)
    assert whole.weight_bytes == pytest.approx(2 * 106.9e9, rel=0.01)
    routers = 45 * 4096 * 128 * 2  # every device has them
    assert 4 * quarter.weight_bytes - whole.weight_bytes == pytest.approx(3 * routers)
    with pytest.raises(ValueError, match=r"^tensor_parallel: 3 devices cannot share moe_intermediate_size, 1408"):
        share_of(GLM_45_AIR, tensor_parallel=3)


@pytest.mark.parametrize(
    ("changed", "devices", "error"),
    [
        ({"model_type": "gpt2"}, 1, "model_type: 'gpt2' cannot be timed"),
        ({"model_type": None}, 1, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, 1, "quantization_config"),
        ({"model_type": "deepseek_v32"}, 1, "model_type: 'deepseek_v32' cannot be timed"),
        ({"num_experts": 64, "num_experts_per_tok": 8}, 1, "moe_intermediate_size: missing"),
        ({"torch_dtype": "fp8"}, 1, "torch_dtype"),
        ({"torch_dtype": "int4"}, 1, "torch_dtype"),
        ({"num_key_value_heads": 5}, 1, "num_key_value_heads"),
        ({"hidden_size": None}, 1, "hidden_size: missing"),
        ({"hidden_size": "large"}, 1, "hidden_size"),
        ({"max_position_embeddings": 0}, 1, "max_position_embeddings"),
        ({}, 3, "tensor_parallel: 3 devices cannot share num_attention_heads"),
        ({"num_key_value_heads": 4, "num_attention_heads": 24, "head_dim": 128, "intermediate_size": 12000}, 6, "num_key_value_heads"),
        ({}, 0, "tensor_parallel"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_timed_are_refused(changed: dict[str, Any], devices: int, error: str) -> None:
    """Other architectures, quantized weights, experts without a size, and devices that cannot share."""
    with pytest.raises(ValueError, match=error):
        share_of({**LLAMA_8B, **changed}, tensor_parallel=devices)


@given(st.sampled_from([1, 2, 8, 16, 128]))
@settings(deadline=None)
def test_every_device_has_whole_latents(devices: int) -> None:
    """Heads and their values are divided; what a token leaves in the cache is not, whatever the number of KV heads."""
    share = share_of(DEEPSEEK, tensor_parallel=devices)
    assert share.num_heads * devices == 128
    assert share.attended_size * devices == 128 * 128
    assert (share.num_kv_heads, share.kv_bytes) == (1, 2 * (512 + 64))
    assert share.kv_bytes * 61 == share.model.kv_bytes_per_token


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"])
def test_families_with_latents(family: str) -> None:
    """They have one kind of layer, without biases; queries may have no latent."""
    share = share_of({**DEEPSEEK, "model_type": family, "q_lora_rank": None, "attention_bias": True})
    assert share.model.latent is not None
    assert share.model.latent.query_rank == 0
    assert not share.has_qkv_bias


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank: missing"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim: missing"),
        ({"v_head_dim": 256}, "v_head_dim: 256 is more than qk_nope_head_dim and qk_rope_head_dim, 192"),
        ({"index_topk": 2048}, "index_topk: kernels of sparse attention"),
        ({"model_type": "glm4_moe_lite", "kv_lora_rank": None}, "kv_lora_rank: missing"),
        ({"model_type": "llama"}, "kv_lora_rank: model_type llama has no latent attention"),
    ],
)
def test_latents_that_cannot_be_timed_are_refused(changed: dict[str, Any], error: str) -> None:
    """The line starts with the field."""
    with pytest.raises(ValueError, match=f"^{error}"):
        share_of({**DEEPSEEK, **changed})


def test_a_missing_query_latent_is_named() -> None:
    """Null is for queries without a latent; without the field they would have the default of transformers."""
    with pytest.raises(ValueError, match="^q_lora_rank: missing"):
        share_of({name: value for name, value in DEEPSEEK.items() if name != "q_lora_rank"})
