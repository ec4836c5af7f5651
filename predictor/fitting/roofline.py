"""Estimates a profile without measurements: bytes over bandwidth or operations over peak, whichever is longer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.config import require_count
from predictor.fitting.regression import rounded
from predictor.profile import ROOFLINE, Profile, SuggestedEngine, ValidRange
from predictor.step_time import Curve, StepTime
from predictor.suggestions import did_you_mean

# The shares of the peaks that engines reach, such that Llama-3.1-8B has nearly the fitted H100, H200 and A100 profiles.
BANDWIDTH_SHARE = 0.75
FLOPS_SHARE = 0.7
ATTENTION_FLOPS_SHARE = 0.4
LINK_SHARE = 0.6
# Small kernels of a layer: each costs a launch on the GPU.
SMALL_KERNELS_PER_LAYER = 6
KERNEL_S = 2.5e-6
ALL_REDUCE_S = 12e-6
CPU_S = 5e-4
# Activations that a layer writes and reads back, in hidden states.
HIDDEN_PASSES = 10
# GPU memory besides weights and KV cache: activations, CUDA graphs, the context.
RESERVED_BYTES = 2.0e9
MEMORY_UTILIZATION = 0.9
BLOCK_SIZE = 16

MAX_TOKENS = 16384
MAX_SEQUENCES = 1024

BYTES_OF_DTYPE = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU: dense 16-bit peak, memory, multiprocessors, and bytes per second to other GPUs."""

    flops: float
    bandwidth: float
    memory_bytes: float
    num_sms: int
    link_bandwidth: float


# From the vendors' data sheets; links are NVLink where available, else PCIe, in one direction.
GPUS = {
    "A10": Gpu(flops=125e12, bandwidth=600e9, memory_bytes=24e9, num_sms=72, link_bandwidth=32e9),
    "A30": Gpu(flops=165e12, bandwidth=933e9, memory_bytes=24e9, num_sms=56, link_bandwidth=100e9),
    "A40": Gpu(flops=150e12, bandwidth=696e9, memory_bytes=48e9, num_sms=84, link_bandwidth=56e9),
    "A100-40G": Gpu(flops=312e12, bandwidth=1555e9, memory_bytes=40e9, num_sms=108, link_bandwidth=300e9),
    "A100": Gpu(flops=312e12, bandwidth=2039e9, memory_bytes=80e9, num_sms=108, link_bandwidth=300e9),
    "H100": Gpu(flops=989e12, bandwidth=3350e9, memory_bytes=80e9, num_sms=132, link_bandwidth=450e9),
    "H100-PCIE": Gpu(flops=756e12, bandwidth=2000e9, memory_bytes=80e9, num_sms=114, link_bandwidth=64e9),
    "H200": Gpu(flops=989e12, bandwidth=4800e9, memory_bytes=141e9, num_sms=132, link_bandwidth=450e9),
    "H20": Gpu(flops=148e12, bandwidth=4000e9, memory_bytes=96e9, num_sms=78, link_bandwidth=450e9),
    "B200": Gpu(flops=2250e12, bandwidth=8000e9, memory_bytes=180e9, num_sms=148, link_bandwidth=900e9),
    "L4": Gpu(flops=121e12, bandwidth=300e9, memory_bytes=24e9, num_sms=58, link_bandwidth=32e9),
    "L40S": Gpu(flops=362e12, bandwidth=864e9, memory_bytes=48e9, num_sms=142, link_bandwidth=32e9),
    "RTX-PRO-6000": Gpu(flops=500e12, bandwidth=1792e9, memory_bytes=96e9, num_sms=188, link_bandwidth=64e9),
    "RTX-4090": Gpu(flops=165e12, bandwidth=1008e9, memory_bytes=24e9, num_sms=128, link_bandwidth=32e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer that its step time depends on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    bytes_per_weight: int = 2
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_weight

    @property
    def attention_weights(self) -> int:
        """Parameters of a layer's query, key, value and output projections."""
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * queries + 2 * keys)

    @property
    def expert_weights(self) -> int:
        """Parameters of a layer's gated MLP, or of one expert of it."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        """Parameters of the output embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, with an input and an output embedding."""
        layer = self.attention_weights + max(1, self.num_experts) * self.expert_weights
        return self.bytes_per_weight * (self.num_layers * layer + 2 * self.head_weights)

    def weights_read(self, num_tokens: int) -> float:
        """Parameters of a layer that a step reads; of experts, those that at least one token is routed to."""
        if self.num_experts == 0:
            return float(self.attention_weights + self.expert_weights)
        untouched = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.attention_weights + self.num_experts * (1 - untouched) * self.expert_weights

    @property
    def weights_used(self) -> int:
        """Parameters of a layer that are used for one token."""
        return self.attention_weights + max(1, self.experts_per_token) * self.expert_weights


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Hugging Face `config.json` of the Llama, Mistral, Qwen2 or Qwen3 kind, with or without experts."""
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    experts = next((_count(config, name) for name in ("num_experts", "num_local_experts") if config.get(name)), 0)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype not in BYTES_OF_DTYPE:
        raise ValueError(f"torch_dtype: {dtype!r} is none of {', '.join(BYTES_OF_DTYPE)}")
    if hidden % heads and not config.get("head_dim"):
        raise ValueError(f"head_dim: missing, and hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    kv_heads = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if kv_heads > heads:
        raise ValueError(f"num_key_value_heads: {kv_heads} is more than num_attention_heads {heads}")
    own_size = experts and config.get("moe_intermediate_size")
    return ModelShape(
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_count(config, "head_dim") if config.get("head_dim") else hidden // heads,
        intermediate_size=_count(config, "moe_intermediate_size" if own_size else "intermediate_size"),
        vocab_size=_count(config, "vocab_size"),
        bytes_per_weight=BYTES_OF_DTYPE[dtype],
        num_experts=experts,
        experts_per_token=_count(config, "num_experts_per_tok") if experts else 0,
    )


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, in any usual spelling."""
    by_key = {_key(known): known for known in GPUS}
    key = _key(name)
    if key not in by_key:
        hint = did_you_mean(name, GPUS, f"; there are {', '.join(GPUS)}")
        raise ValueError(f"gpu: {name!r} is not known{hint}")
    return GPUS[by_key[key]]


def roofline_profile(
    config: Mapping[str, Any], gpu_name: str, *, tensor_parallel: int = 1, name: str | None = None
) -> Profile:
    """Estimate a profile from a model's configuration and a GPU's data sheet; its kind is `roofline`."""
    require_count("tensor_parallel", tensor_parallel)
    gpu, model = gpu_named(gpu_name), model_shape(config)
    model_name = str(config.get("_name_or_path") or config.get("model_type") or "unnamed")
    return Profile(
        name=name or f"{model_name.rsplit('/', 1)[-1].lower()}-{_key(gpu_name)}-roofline",
        model=model_name,
        gpu=gpu_name,
        tensor_parallel=tensor_parallel,
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        kind=ROOFLINE,
        step_time=roofline_step_time(model, gpu, tensor_parallel=tensor_parallel),
        valid=ValidRange(max_tokens=MAX_TOKENS, max_sequences=MAX_SEQUENCES, max_context_tokens=2**30),
        error=None,
        source=(
            "roofline, nothing measured: the model's configuration and the GPU's data sheet, at "
            f"{BANDWIDTH_SHARE:.0%} of its bandwidth and {FLOPS_SHARE:.0%} of its peak"
        ),
        engine=SuggestedEngine(
            num_gpu_blocks=num_gpu_blocks(model, gpu, tensor_parallel=tensor_parallel), block_size=BLOCK_SIZE
        ),
    )


def roofline_step_time(model: ModelShape, gpu: Gpu, *, tensor_parallel: int = 1) -> StepTime:
    """Estimate a step time from first principles."""
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE * tensor_parallel
    flops = gpu.flops * FLOPS_SHARE * tensor_parallel
    attention_flops = gpu.flops * ATTENTION_FLOPS_SHARE * tensor_parallel
    tokens = [0, 1, *sorted({round(2 ** (step / 4)) for step in range(1, 4 * int(math.log2(MAX_TOKENS)) + 1)} - {1})]
    query_flops = 4 * model.num_heads * model.head_dim * model.num_layers
    small_s = SMALL_KERNELS_PER_LAYER * KERNEL_S * model.num_layers
    slope = rounded(model.kv_bytes_per_token / bandwidth)
    base = rounded(KERNEL_S * model.num_layers)
    return StepTime(
        constant_s=CPU_S + small_s + _all_reduce_s(model, tensor_parallel),
        token_s=rounded(_all_reduce_token_s(model, gpu, tensor_parallel)),
        prefill_s=base,
        prefill_qq_s=rounded(query_flops / 2 / attention_flops),
        prefill_qkv_s=rounded(query_flops / attention_flops),
        by_tokens=Curve(
            x=tuple(float(count) for count in tokens),
            y=tuple(rounded(_layers_s(model, max(1, count), bandwidth, flops)) for count in tokens),
        ),
        by_sequences=Curve(
            x=(0.0, 1.0, 256.0, 1024.0),
            y=tuple(rounded(_head_s(model, count, bandwidth, flops)) for count in (0, 1, 256, 1024)),
        ),
        decode_base=Curve(x=(1.0,), y=(base,)),
        decode_slope=Curve(x=(1.0,), y=(slope,)),
        mixed_base=Curve(x=(1.0,), y=(base,)),
        mixed_slope=Curve(x=(1.0,), y=(slope,)),
    )


def num_gpu_blocks(
    model: ModelShape,
    gpu: Gpu,
    *,
    tensor_parallel: int = 1,
    block_size: int = BLOCK_SIZE,
    memory_utilization: float = MEMORY_UTILIZATION,
) -> int:
    """Estimate the number of KV blocks of an engine."""
    room = tensor_parallel * (gpu.memory_bytes * memory_utilization - RESERVED_BYTES) - model.weight_bytes
    blocks = int(room // (block_size * model.kv_bytes_per_token))
    if blocks < 1:
        raise ValueError(
            f"tensor_parallel: {model.weight_bytes / 1e9:.0f} GB of weights leave no room for KV blocks on "
            f"{tensor_parallel} GPUs of {gpu.memory_bytes / 1e9:.0f} GB"
        )
    return blocks


def _layers_s(model: ModelShape, num_tokens: int, bandwidth: float, flops: float) -> float:
    """Estimate the seconds of all layers without attention: weight reads or products, and communication."""
    read_s = model.weights_read(num_tokens) * model.bytes_per_weight / bandwidth
    multiply_s = 2 * model.weights_used * num_tokens / flops
    pass_s = 2 * HIDDEN_PASSES * num_tokens * model.hidden_size / bandwidth
    # Where both are equal they overlap only in part: a smooth maximum.
    return model.num_layers * (float(np.hypot(read_s, multiply_s)) + pass_s)


def _head_s(model: ModelShape, num_sequences: int, bandwidth: float, flops: float) -> float:
    read_s = model.head_weights * model.bytes_per_weight / bandwidth
    multiply_s = 2 * model.head_weights * num_sequences / flops
    return float(np.hypot(read_s, multiply_s))


def _all_reduce_s(model: ModelShape, tensor_parallel: int) -> float:
    return 0.0 if tensor_parallel == 1 else 2 * model.num_layers * ALL_REDUCE_S


def _all_reduce_token_s(model: ModelShape, gpu: Gpu, tensor_parallel: int) -> float:
    """Estimate communication per token: two ring all-reduces of every hidden state per layer."""
    passed = 2 * (tensor_parallel - 1) / tensor_parallel * 2 * model.num_layers * model.hidden_size
    return passed * model.bytes_per_weight / (gpu.link_bandwidth * LINK_SHARE)


def _key(name: str) -> str:
    """Return the distinguishing part of a GPU's name."""
    plain = name.lower()
    for noise in ("nvidia", "geforce", "blackwell", "server edition", "sxm5", "sxm4", "sxm", "80gb", "-", "_", " "):
        plain = plain.replace(noise, "")
    return plain


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if value is None:
        raise ValueError(f"{name}: missing")
    require_count(name, value)
    return int(value)
