"""The roofline model is usable without measurements, and close to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predictor.fitting.regression import Steps, predict
from predictor.fitting.roofline import GPUS, gpu_named, model_shape, num_gpu_blocks, roofline_profile
from predictor.profile import ROOFLINE, load_profile, profile_from_json, profile_to_json

LLAMA_31_8B: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-3.1-8B",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}


def batches() -> Steps:
    """Return typical batches: decodes of 256 to 4096 tokens, chunks up to 8192, and both."""
    rows = [
        (n, n * c, q) for n in (0, 1, 8, 64, 256) for c in (256, 1024, 4096) for q in (0, 256, 2048, 8192) if n or q
    ]
    decodes, context, chunk = np.array([row for row in rows if row[1] <= 300_000], dtype=float).T
    return Steps(
        num_tokens=decodes + chunk,
        num_sampled=decodes + (chunk > 0),
        num_decodes=decodes,
        decode_context=context,
        num_prefills=(chunk > 0).astype(float),
        prefill_qq=chunk**2,
        prefill_qkv=np.zeros(len(chunk)),
        decode_longest=np.zeros(len(chunk)),
        seconds=np.ones(len(chunk)),
    )


@pytest.mark.parametrize("gpu", ["A100", "H100", "H200"])
def test_is_close_to_the_fitted_profiles(gpu: str) -> None:
    """Llama-3.1-8B is within a factor of 1.35 of the fitted profile for every batch, and 1.2 for most."""
    fitted = predict(load_profile(f"llama-3.1-8b-{gpu.lower()}").step_time, batches())
    estimated = predict(roofline_profile(LLAMA_31_8B, gpu).step_time, batches())
    ratio = np.maximum(estimated / fitted, fitted / estimated)
    assert ratio.max() < 1.35
    assert np.median(ratio) < 1.2


def test_is_marked_as_a_roofline() -> None:
    """The profile's kind and source show that it is an estimate, and it can be written and read."""
    profile = roofline_profile(LLAMA_31_8B, "H100")
    assert profile.kind == ROOFLINE
    assert profile.error is None
    assert "nothing measured" in profile.source
    assert profile_from_json(profile_to_json(profile)) == profile


def test_model_sizes() -> None:
    """Parameters and KV bytes are the published ones."""
    llama = model_shape(LLAMA_31_8B)
    assert llama.weight_bytes == pytest.approx(16.06e9, rel=0.01)
    assert llama.kv_bytes_per_token == 131072
    assert model_shape(QWEN3_30B_A3B).weight_bytes == pytest.approx(61e9, rel=0.02)


def test_blocks_for_kv() -> None:
    """An 80 GB GPU has about 25 thousand blocks of 16 for an 8B model; a small one has none for a large model."""
    assert 20_000 < num_gpu_blocks(model_shape(LLAMA_31_8B), GPUS["H100"]) < 30_000
    with pytest.raises(ValueError, match=r"^tensor_parallel: 61 GB of weights leave no room"):
        num_gpu_blocks(model_shape(QWEN3_30B_A3B), GPUS["A30"])


def test_only_routed_experts_are_read() -> None:
    """One token of a mixture of experts reads a few of them, many tokens read all; computation is that of a few."""
    model = model_shape(QWEN3_30B_A3B)
    assert model.weights_read(1) < 0.15 * model.weights_read(10_000)
    step_time = roofline_profile(QWEN3_30B_A3B, "H100").step_time
    table = step_time.by_tokens.table(2048)
    assert table[1] < 0.25 * table[256]
    assert np.all(np.diff(table) >= 0)


def test_more_gpus_are_faster_and_communicate() -> None:
    """Two GPUs halve a large step, except for communication."""
    one, two = (roofline_profile(LLAMA_31_8B, "H100", tensor_parallel=count).step_time for count in (1, 2))
    assert two.by_tokens.y[-1] == pytest.approx(one.by_tokens.y[-1] / 2, rel=0.01)
    assert one.token_s == 0.0
    assert two.token_s > 0.0


@pytest.mark.parametrize("name", ["H100", "h100-sxm", "NVIDIA H100 80GB", "h100_sxm5", "RTX PRO 6000", "rtxpro6000"])
def test_names_of_gpus(name: str) -> None:
    """A GPU is found by all usual spellings of its name."""
    assert gpu_named(name) in (GPUS["H100"], GPUS["RTX-PRO-6000"])


def test_an_unknown_gpu_gets_a_suggestion() -> None:
    """The error for an unknown GPU suggests the closest name, or lists all."""
    with pytest.raises(ValueError, match=r"^gpu: 'H300' is not known; did you mean H[12]00\?$"):
        gpu_named("H300")
    with pytest.raises(ValueError, match="^gpu: 'abacus' is not known; there are .*H100"):
        gpu_named("abacus")


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("num_hidden_layers", None, "num_hidden_layers: missing"),
        ("hidden_size", -1, "hidden_size: "),
        ("vocab_size", "many", "vocab_size: "),
        ("num_attention_heads", 0, "num_attention_heads: "),
        ("num_attention_heads", 24, "head_dim: missing"),
        ("num_key_value_heads", 64, "num_key_value_heads: "),
        ("torch_dtype", "int3", "torch_dtype: "),
    ],
)
def test_a_bad_configuration_is_named(field: str, value: object, error: str) -> None:
    """The error for an impossible configuration names the field."""
    with pytest.raises(ValueError, match=rf"^{error}"):
        model_shape({**LLAMA_31_8B, field: value})
