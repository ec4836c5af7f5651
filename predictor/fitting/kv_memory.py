"""How many KV blocks fit into the memory of GPUs beside a model's weights."""

from __future__ import annotations

from predictor.fitting.gpus import Gpu
from predictor.fitting.model_shape import ModelShape

# GPU memory besides weights and KV cache: activations, CUDA graphs, the context.
RESERVED_BYTES = 2.0e9
MEMORY_UTILIZATION = 0.9
BLOCK_SIZE = 16
# The length at which layers with a window, or with a state of constant size, are counted as bytes per token.
TYPICAL_SEQUENCE_TOKENS = 4096


def num_gpu_blocks(
    model: ModelShape,
    gpu: Gpu,
    *,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    block_size: int = BLOCK_SIZE,
    memory_utilization: float = MEMORY_UTILIZATION,
) -> int:
    """Estimate the number of KV blocks of an engine."""
    weight_bytes = model.rank_weight_bytes(tensor_parallel=tensor_parallel, data_parallel=data_parallel)
    room = gpu.memory_bytes * memory_utilization - RESERVED_BYTES - weight_bytes
    blocks = int(room // (block_size * kv_bytes_per_token(model, tensor_parallel=tensor_parallel)))
    if blocks < 1:
        ranks = tensor_parallel * data_parallel
        raise ValueError(
            f"tensor_parallel: {ranks * weight_bytes / 1e9:.0f} GB of weights leave no room for KV blocks on {ranks}"
            f" GPUs of {gpu.memory_bytes / 1e9:.0f} GB"
        )
    return blocks


def kv_bytes_per_token(model: ModelShape, *, tensor_parallel: int = 1) -> float:
    """Return the bytes of KV cache per token on one rank: all layers' where they grow alike, else a typical mean."""
    tokens = TYPICAL_SEQUENCE_TOKENS
    return model.sequence_bytes(tokens, tensor_parallel=tensor_parallel) / tokens
