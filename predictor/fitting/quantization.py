"""The bytes of a model's weights and of its KV cache, from `quantization_config` of its Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from predictor.config import require_count
from predictor.fitting.model_shape import WeightBytes
from predictor.suggestions import require_choice, unknown_choice

BYTES_OF_DTYPE = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4, "fp8": 1}
BYTES_OF_CACHE = BYTES_OF_DTYPE | {"fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "nvfp4": 9 / 16}
DEFAULT_DTYPE = "bfloat16"
FULL_PRECISION = ("float32", "float")
METHODS = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4", "quark")
FIELD = "quantization_config"
# Bits of scales per weight: one byte for 32 weights (mxfp4), for 16 (nvfp4).
MXFP4_BITS = 4 + 8 / 32
NVFP4_BITS = 4 + 8 / 16
GROUP_SCALE_BITS = 16  # beside the group's zero point
KEPT = {"attention": ("self_attn", "attention"), "mlp": ("mlp", "feed_forward"), "experts": ("experts",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The bits of a quantized weight, scales included, and the bits in which products are computed."""

    weight_bits: float
    compute_bits: int = 16
    only_experts: bool = False


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the type in which vLLM holds the weights that are not quantized.

    By default vLLM converts models of 32-bit numbers (`_resolve_auto_dtype` in vllm/config/model.py).
    """
    dtype = str(config.get("torch_dtype") or config.get("dtype") or DEFAULT_DTYPE).removeprefix("torch.")
    return DEFAULT_DTYPE if dtype in FULL_PRECISION else dtype


def dtype_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a weight that is not quantized."""
    dtype = dtype_of(config)
    require_choice("torch_dtype", dtype, BYTES_OF_DTYPE)
    return BYTES_OF_DTYPE[dtype]


def weight_bytes_of(config: Mapping[str, Any]) -> WeightBytes:
    """Return the bytes of a weight in each part of the model; embeddings and the head are not quantized."""
    plain = float(dtype_bytes(config))
    whole = WeightBytes(
        attention=plain, mlp=plain, experts=plain, head=max(2.0, plain), compute_bits=8 if plain == 1 else 16
    )
    given = config.get(FIELD)
    if not given:
        return whole
    if not isinstance(given, Mapping):
        raise ValueError(f"{FIELD}: must be an object, not {type(given).__name__}")
    found = _quantization(given)
    parts = {"experts"} if found.only_experts else set(KEPT) - _kept_parts(given)
    return replace(whole, **dict.fromkeys(parts, found.weight_bits / 8), compute_bits=found.compute_bits)


def kv_number_bytes(config: Mapping[str, Any], *, cache_dtype: str = "auto") -> float:
    """Return the bytes of a number of the KV cache: as given, else as the model's file says, else as the weights."""
    if cache_dtype != "auto":
        require_choice("kv_cache_dtype", cache_dtype, ("auto", *BYTES_OF_CACHE))
        return float(BYTES_OF_CACHE[cache_dtype])
    given = config.get(FIELD)
    given = given if isinstance(given, Mapping) else {}
    scheme = given.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return _count(scheme, "num_bits", f"{FIELD}.kv_cache_scheme.") / 8
    inner = given.get("quantization")
    algorithm = given.get("kv_cache_quant_algo") or (inner or {}).get("kv_cache_quant_algo")
    if algorithm:
        if str(algorithm).upper() not in ("FP8", "NVFP4"):
            raise unknown_choice(f"{FIELD}.kv_cache_quant_algo", algorithm, ("FP8", "NVFP4"))
        return 1.0 if str(algorithm).upper() == "FP8" else NVFP4_BITS / 8
    return float(max(2, dtype_bytes(config)))


def _quantization(given: Mapping[str, Any]) -> Quantization:
    """Return the format of quantized weights; an error names the field."""
    method = str(given.get("quant_method") or "").lower()
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization(weight_bits=8, compute_bits=8)
    if method == "mxfp4":
        return Quantization(weight_bits=MXFP4_BITS, only_experts=True)
    if method in ("awq", "gptq"):
        return _grouped(_count(given, "bits"), given.get("group_size"))
    if method == "bitsandbytes":
        return Quantization(weight_bits=8 if given.get("load_in_8bit") else 4.5)
    if method == "modelopt":
        inner = given.get("quantization")
        return _modelopt(given if not isinstance(inner, Mapping) else inner)
    if method == "compressed-tensors":
        return _config_group(_first_group(given, "config_groups"), "weights", "input_activations", "num_bits")
    if method == "quark":
        return _quark(given)
    raise unknown_choice(f"{FIELD}.quant_method", method or None, METHODS)


def _modelopt(given: Mapping[str, Any]) -> Quantization:
    algorithm = str(given.get("quant_algo") or "").upper()
    if algorithm.startswith("FP8"):
        return Quantization(weight_bits=8, compute_bits=8)
    if algorithm == "NVFP4":
        return Quantization(weight_bits=NVFP4_BITS, compute_bits=4)
    if algorithm.startswith("W4A"):
        return _grouped(4, given.get("group_size"))
    raise unknown_choice(f"{FIELD}.quant_algo", algorithm or None, ("FP8", "NVFP4", "W4A16_AWQ"))


def _config_group(group: Mapping[str, Any], weights: str, activations: str, bits: str) -> Quantization:
    path = f"{FIELD}.config_groups."
    given = group.get(weights)
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}{weights}: missing")
    weight_bits = _count(given, bits, f"{path}{weights}.")
    found = _grouped(weight_bits, given.get("group_size"))
    if weight_bits == 4 and given.get("type") == "float":
        found = replace(found, weight_bits=NVFP4_BITS)
    inputs = group.get(activations)
    if not isinstance(inputs, Mapping):
        return found
    return replace(found, compute_bits=_count(inputs, bits, f"{path}{activations}."))


def _quark(given: Mapping[str, Any]) -> Quantization:
    group = given.get("global_quant_config")
    weight = group.get("weight") if isinstance(group, Mapping) else None
    if not isinstance(weight, Mapping) or not weight.get("dtype"):
        raise ValueError(f"{FIELD}.global_quant_config.weight.dtype: missing")
    dtype = str(weight["dtype"])
    if dtype.startswith("fp8"):
        return Quantization(weight_bits=8, compute_bits=8)
    if dtype == "fp4":
        return Quantization(weight_bits=MXFP4_BITS, compute_bits=4)
    if dtype in ("int8", "int4", "uint4"):
        return _grouped(8 if dtype == "int8" else 4, weight.get("group_size"))
    known = ("fp8_e4m3", "fp4", "int8", "int4", "uint4")
    raise unknown_choice(f"{FIELD}.global_quant_config.weight.dtype", dtype, known)


def _grouped(bits: int, group_size: object) -> Quantization:
    """Return weights of so many bits, with a scale and a zero point for each group of them."""
    if not isinstance(group_size, int) or group_size < 1:  # -1 or null: one scale for a whole column
        return Quantization(weight_bits=bits)
    return Quantization(weight_bits=bits + (GROUP_SCALE_BITS + bits) / group_size)


def _first_group(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    groups = given.get(name)
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{FIELD}.{name}: missing")
    first = next(iter(groups.values()))
    if not isinstance(first, Mapping):
        raise ValueError(f"{FIELD}.{name}: must hold objects")
    return first


def _kept_parts(given: Mapping[str, Any]) -> set[str]:
    """Return the parts whose weights are not quantized, by the names of modules that the file leaves out."""
    names: list[str] = []
    for field in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"):
        listed = given.get(field)
        if isinstance(listed, Iterable) and not isinstance(listed, str | Mapping):
            names += [str(name) for name in listed]
    kept = set()
    for part, words in KEPT.items():
        # A router or one projection left out is no part.
        endings = tuple(
            ending for word in words for ending in (word, f"{word}*", f"{word}.*", f"{word}.*$", f"{word}$")
        )
        if any(name.endswith(endings) for name in names):
            kept.add(part)
    return kept | ({"experts"} if "mlp" in kept else set())


def _count(given: Mapping[str, Any], name: str, path: str = f"{FIELD}.") -> int:
    if given.get(name) is None:
        raise ValueError(f"{path}{name}: missing")
    require_count(f"{path}{name}", given[name])
    return int(given[name])
