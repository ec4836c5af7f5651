"""Bytes of quantized weights, by the formats of config.json."""

from __future__ import annotations

from typing import Any

import pytest

from predictor.fitting.quantization import kv_number_bytes, weight_bytes_of


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    group = {"weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


@pytest.mark.parametrize(
    ("given", "bits", "compute_bits"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8, 8),
        ({"quant_method": "fbgemm_fp8"}, 8, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, 16),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, 16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, 16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, 4),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 8, 8),
        (compressed({"num_bits": 8, "type": "float"}, {"num_bits": 8}), 8, 8),
        (compressed({"num_bits": 4, "type": "int", "group_size": 32}), 4 + 20 / 32, 16),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}, {"num_bits": 4}), 4.5, 4),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 8, 8),
    ],
)
def test_formats(given: dict[str, Any], bits: float, compute_bits: int) -> None:
    """Weights with their scales; embeddings and the head stay as they are."""
    found = weight_bytes_of({"torch_dtype": "bfloat16", "quantization_config": given})
    assert found.mlp * 8 == found.attention * 8 == found.experts * 8 == pytest.approx(bits)
    assert found.head == 2
    assert found.compute_bits == compute_bits


def test_parts_that_are_left_out() -> None:
    """mxfp4 holds experts only; a listed part stays whole, a listed router or layer norm is no part."""
    mxfp4 = weight_bytes_of({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}})
    assert (mxfp4.experts, mxfp4.attention, mxfp4.mlp) == (4.25 / 8, 2, 2)
    some = weight_bytes_of({
        "torch_dtype": "bfloat16",
        "quantization_config": compressed(
            {"num_bits": 8}, {"num_bits": 8}, ignore=["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
        ),
    })  # fmt: skip
    assert (some.attention, some.mlp, some.experts) == (2, 1, 1)


def test_the_types_of_caches() -> None:
    """As given, else as the file says, else as the weights before quantization."""
    fp8 = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    assert kv_number_bytes(fp8) == 2
    assert kv_number_bytes(fp8, cache_dtype="fp8") == 1
    assert kv_number_bytes({"torch_dtype": "float32"}) == 2  # vLLM converts it
    assert kv_number_bytes({"torch_dtype": "float32"}, cache_dtype="float32") == 4
    assert kv_number_bytes({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}) == 1


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("fp8", "quantization_config: must be an object"),
        ({"quant_method": "magic"}, "quantization_config.quant_method: must be one of awq, .*, not 'magic'"),
        ({}, None),
        ({"bits": 4}, "quantization_config.quant_method: must be one of .*, not None"),
        ({"quant_method": "awq"}, "quantization_config.bits: missing"),
        ({"quant_method": "awq", "bits": "four"}, "quantization_config.bits: must be a whole number"),
        ({"quant_method": "modelopt"}, "quantization_config.quant_algo: must be one of FP8, .*, not None"),
        ({"quant_method": "compressed-tensors"}, "quantization_config.config_groups: missing"),
        (compressed({"type": "int"}), "quantization_config.config_groups.weights.num_bits: missing"),
        ({"quant_method": "quark"}, "quantization_config.global_quant_config.weight.dtype: missing"),
    ],
)
def test_a_bad_format_is_named(given: Any, error: str | None) -> None:
    """The error names the field; an empty configuration is none."""
    config = {"torch_dtype": "bfloat16", "quantization_config": given}
    if error is None:
        assert weight_bytes_of(config).mlp == 2
        return
    with pytest.raises(ValueError, match=f"^{error}"):
        weight_bytes_of(config)
    with pytest.raises(ValueError, match="^kv_cache_dtype: must be one of auto, .*, not 'fp3'"):
        kv_number_bytes({}, cache_dtype="fp3")
