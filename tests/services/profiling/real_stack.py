"""A straightforward decoder of the Qwen3 family that runs a batch through all its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from predictor.fitting.kernel_plan import AttentionBatch
from predictor.fitting.model_shard import Share


@dataclass(slots=True)
class Layer:
    """The weights of one layer, and its KV cache."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: torch.Tensor
    head_norms: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class RealStack:
    """All layers and the head, with real attention, rotary positions and residuals."""

    def __init__(self, share: Share, kv_tokens: int) -> None:
        """Draw the weights."""
        self.share = share
        model = share.model
        size, heads, kv_heads = model.head_dim, share.num_heads, share.num_kv_heads
        self.embedding = torch.randn(share.vocab_size, model.hidden_size) * 0.02
        self.layers = [
            Layer(
                qkv=torch.randn(share.qkv_size, model.hidden_size) * 0.02,
                o=torch.randn(model.hidden_size, heads * size) * 0.02,
                gate_up=torch.randn(2 * share.intermediate_size, model.hidden_size) * 0.02,
                down=torch.randn(model.hidden_size, share.intermediate_size) * 0.02,
                norms=torch.ones(2, model.hidden_size),
                head_norms=torch.ones(2, size),
                keys=torch.randn(kv_tokens, kv_heads, size),
                values=torch.randn(kv_tokens, kv_heads, size),
            )
            for _ in range(model.num_layers)
        ]

    @torch.inference_mode()
    def run(self, batch: AttentionBatch) -> torch.Tensor:
        """Compute one step; return the next token of each sequence."""
        model, share = self.share.model, self.share
        tokens, size = batch.num_tokens, model.head_dim
        last = [batch.context - 1] * batch.num_decodes
        positions = torch.tensor([*last, *range(batch.before, batch.before + batch.chunk)], dtype=torch.float32)
        angles = positions[:, None, None] * (10000.0 ** -(torch.arange(0, size, 2) / size))
        cos, sin = angles.cos(), angles.sin()
        hidden = functional.embedding(torch.arange(tokens) % share.vocab_size, self.embedding)
        for layer in self.layers:
            normed = functional.rms_norm(hidden, (model.hidden_size,), layer.norms[0])
            qkv = functional.linear(normed, layer.qkv).view(tokens, -1, size)
            queries, keys, values = qkv.split([share.num_heads, share.num_kv_heads, share.num_kv_heads], dim=1)
            queries = rotated(functional.rms_norm(queries, (size,), layer.head_norms[0]), cos, sin)
            keys = rotated(functional.rms_norm(keys, (size,), layer.head_norms[1]), cos, sin)
            attended = self.attention(layer, batch, queries, keys, values)
            hidden = hidden + functional.linear(attended.reshape(tokens, -1), layer.o)
            normed = functional.rms_norm(hidden, (model.hidden_size,), layer.norms[1])
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        sampled = [*range(batch.num_decodes), *([tokens - 1] if batch.chunk else [])]
        return functional.linear(hidden[sampled], self.embedding).argmax(dim=-1)

    def attention(
        self, layer: Layer, batch: AttentionBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Write new keys and values into the cache, and attend; decodes and chunk separately."""
        parts, num = [], batch.num_decodes
        if num:
            slots = torch.arange(num) * batch.context + batch.context - 1
            layer.keys[slots], layer.values[slots] = keys[:num], values[:num]
            all_keys, all_values = (
                cache[: num * batch.context].view(num, batch.context, -1, keys.shape[-1]).transpose(1, 2)
                for cache in (layer.keys, layer.values)
            )
            asking = queries[:num].view(num, keys.shape[1], -1, keys.shape[-1])
            parts.append(functional.scaled_dot_product_attention(asking, all_keys, all_values).flatten(1))
        if batch.chunk:
            end = batch.before + batch.chunk
            layer.keys[batch.before : end], layer.values[batch.before : end] = keys[num:], values[num:]
            repeated = queries.shape[1] // keys.shape[1]
            all_keys, all_values = (
                cache[:end].transpose(0, 1).repeat_interleave(repeated, dim=0)[None]
                for cache in (layer.keys, layer.values)
            )
            mask = torch.ones(batch.chunk, end, dtype=torch.bool).tril(batch.before)
            asking = queries[num:].transpose(0, 1)[None]
            attended = functional.scaled_dot_product_attention(asking, all_keys, all_values, attn_mask=mask)
            parts.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
