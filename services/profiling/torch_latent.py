"""Multi-head latent attention by torch, in the two forms of vLLM 0.32 (`mla_attention.py`).

A prefill chunk expands latents to keys and values of all heads, its own and those of the context before it. Decodes
move their queries into the space of the latents instead (absorbed), where all heads share one key and one value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from predictor.fitting.kernel_plan import AttentionBatch
from predictor.fitting.model_shape import LatentAttention
from predictor.fitting.model_shard import Share
from predictor.fitting.paged_layout import pool_size
from services.profiling.torch_device import Run
from services.profiling.torch_weights import RandomWeights, drawn_for, multiplied

EPSILON = 1e-6


class LatentProjections:
    """The projections around the attention: to latents, from them to queries, and from values to hidden states."""

    def __init__(self, share: Share, weights: RandomWeights) -> None:
        """Draw the weights; without a query latent, queries are projected from hidden states."""
        latent, hidden = latent_of(share), share.model.hidden_size
        self._share = share
        self._latent = latent
        self._random = weights.random
        self._to_latents = weights.products(latent.query_rank + latent.kv_rank + latent.rope_dim, hidden)
        self._to_queries = weights.products(share.num_heads * latent.key_dim, latent.query_rank or hidden)
        self._o = weights.products(hidden, share.attended_size)
        self._query_norm = weights.random(latent.query_rank) if latent.query_rank else None
        self._norm = weights.random(latent.kv_rank)

    def kernels(self, hidden: torch.Tensor) -> dict[str, Run]:
        """Return the kernels for tokens with these hidden states."""
        latent, tokens = self._latent, len(hidden)
        sizes = [latent.query_rank, latent.kv_rank, latent.rope_dim]
        queries, latents, _ = torch.split(self._random(tokens, sum(sizes)), sizes, dim=-1)
        normed = queries.contiguous() if latent.query_rank else hidden
        parts = self._random(tokens, self._share.num_heads + 1, latent.rope_dim)
        rotated, rotation = torch.empty_like(parts), self._random(tokens, 1, latent.rope_dim)
        vectors = self._random(tokens, latent.cached_dim)
        cache, slots = torch.empty_like(vectors), torch.randperm(tokens, device=hidden.device)

        def latent_norm(_: int) -> torch.Tensor:
            if self._query_norm is not None:
                functional.rms_norm(queries, (latent.query_rank,), self._query_norm, EPSILON)
            return functional.rms_norm(latents, (latent.kv_rank,), self._norm, EPSILON)

        return {
            "qkv_a": multiplied(hidden, self._to_latents),
            "latent_norm": latent_norm,
            "q_b": multiplied(normed, self._to_queries),
            "rotary": lambda _: torch.mul(parts, rotation, out=rotated),
            "kv_write": lambda _: cache.index_copy_(0, slots, vectors),
            "o": multiplied(self._random(tokens, self._share.attended_size), self._o),
        }


class TorchLatentAttention:
    """Expanded latents for a batch's chunk, then absorbed queries for its decodes, as vLLM runs them one by one.

    A chunk attends separately to the tokens before it and to itself; both results are added up by a kernel that moves
    as many bytes as vLLM's. Values are padded to the size of keys, as for FlashAttention 2. Decodes are products with
    contiguous latents: torch has no kernel for keys of this size, so engines with FlashMLA are faster.
    """

    name = "scaled_dot_product_attention over expanded latents and products with absorbed ones"

    def __init__(self, share: Share, device: torch.device, batches: Sequence[AttentionBatch]) -> None:
        """Draw the expansion's weights, and enough latents for each of the batches."""
        self._share = share
        self._device = device
        self._latent = latent_of(share)
        self._scale = self._latent.key_dim**-0.5
        rows = share.num_heads * (self._latent.nope_dim + self._latent.value_dim)
        self._expansions = RandomWeights(share, device).copies(rows, self._latent.kv_rank)
        largest = max(batch.kv_tokens for batch in batches)
        self._num_tokens = pool_size(largest, share.kv_bytes, share.model.num_layers)
        self._latents = self._drawn(self._num_tokens, self._latent.cached_dim)

    def of(self, batch: AttentionBatch, window: int | None = None) -> Run:
        """Return the kernels for one batch, which use other latents and weights each time."""
        assert window is None, "there is no latent attention with a window"
        parts = [
            *([self._chunk(batch.chunk, batch.before)] if batch.chunk else []),
            *([self._decodes(batch.num_decodes, batch.context)] if batch.num_decodes else []),
        ]
        return lambda number: [part(number) for part in parts]

    def expansion(self, number: int) -> torch.Tensor:
        """Return the weights from a latent to the keys and values of all heads."""
        return self._expansions[number % len(self._expansions)]

    def expanded(self, queries: torch.Tensor, latents: torch.Tensor, number: int, *, causal: bool) -> torch.Tensor:
        """Attend to the keys and values of all heads; queries and results are of tokens, heads and numbers."""
        latent, heads = self._latent, self._share.num_heads
        both = functional.linear(latents[:, : latent.kv_rank], self.expansion(number)).view(len(latents), heads, -1)
        keys = latents.new_empty(len(latents), heads, latent.key_dim)
        keys[..., : latent.nope_dim] = both[..., : latent.nope_dim]
        keys[..., latent.nope_dim :] = latents[:, None, latent.kv_rank :]
        return self._attended(queries, keys, both[..., latent.nope_dim :], causal=causal)

    def absorbed(self, queries: torch.Tensor, latents: torch.Tensor, number: int) -> torch.Tensor:
        """Attend with one query of each sequence to its latents; results are of sequences, heads and numbers."""
        joined = self._into_latents(queries, number)
        scores = torch.bmm(joined, latents.transpose(1, 2)).mul_(self._scale)
        attended = torch.bmm(torch.softmax(scores, dim=-1), latents[..., : self._latent.kv_rank])
        return self._out_of_latents(attended, number)

    def _chunk(self, chunk: int, before: int) -> Run:
        """Return the attention of a chunk; latents of the context are gathered first, as vLLM does."""
        latent, heads = self._latent, self._share.num_heads
        queries, own = self._drawn(chunk, heads, latent.key_dim), self._drawn(chunk, latent.cached_dim)
        if not before:
            return lambda number: self.expanded(queries, own, number, causal=True)
        slots = torch.randperm(self._num_tokens, device=self._device)
        tables = slots[: self._num_copies(before) * before].view(-1, before)
        shares = self._drawn(chunk, heads, 1)

        def run(number: int) -> torch.Tensor:
            attended = self.expanded(queries, own, number, causal=True)
            earlier = self.expanded(queries, self._latents[tables[number % len(tables)]], number, causal=False)
            return torch.lerp(attended, earlier, shares)

        return run

    def _decodes(self, sequences: int, context: int) -> Run:
        """Return the attention of decodes with equal contexts."""
        queries = self._drawn(sequences, self._share.num_heads, self._latent.key_dim)
        taken, copies = sequences * context, self._num_copies(sequences * context)
        latents = [self._latents[n * taken : (n + 1) * taken].view(sequences, context, -1) for n in range(copies)]
        return lambda number: self.absorbed(queries, latents[number % copies], number)

    def _num_copies(self, tokens: int) -> int:
        return max(1, min(self._share.model.num_layers, self._num_tokens // tokens))

    def _attended(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
    ) -> torch.Tensor:
        """Attend as many heads with keys and values of their own."""
        padded = functional.pad(values, (0, self._latent.key_dim - self._latent.value_dim))
        asking, given, own = (one.transpose(0, 1)[None] for one in (queries, keys, padded))
        attended = functional.scaled_dot_product_attention(asking, given, own, is_causal=causal)
        return attended[0].transpose(0, 1)[..., : self._latent.value_dim]

    def _into_latents(self, queries: torch.Tensor, number: int) -> torch.Tensor:
        """Multiply queries by the weights of keys, and append their rotary parts."""
        latent, heads = self._latent, self._share.num_heads
        weights = self.expansion(number).view(heads, -1, latent.kv_rank)[:, : latent.nope_dim]
        moved = queries.new_empty(len(queries), heads, latent.kv_rank)
        torch.bmm(queries[..., : latent.nope_dim].transpose(0, 1), weights, out=moved.transpose(0, 1))
        return torch.cat((moved, queries[..., latent.nope_dim :]), dim=-1)

    def _out_of_latents(self, attended: torch.Tensor, number: int) -> torch.Tensor:
        """Multiply attended latents by the weights of values."""
        latent, heads = self._latent, self._share.num_heads
        weights = self.expansion(number).view(heads, -1, latent.kv_rank)[:, latent.nope_dim :].transpose(1, 2)
        values = attended.new_empty(len(attended), heads, latent.value_dim)
        torch.bmm(attended.transpose(0, 1), weights, out=values.transpose(0, 1))
        return values

    def _drawn(self, *sizes: int) -> torch.Tensor:
        return drawn_for(self._share, self._device, *sizes)


def latent_of(share: Share) -> LatentAttention:
    """Return the latent attention of a model that has one."""
    assert share.model.latent is not None
    return share.model.latent
