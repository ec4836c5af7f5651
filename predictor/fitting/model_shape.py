"""The sizes of a decoder-only transformer that its step time and its memory depend on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

# Contexts over which a sliding window is approximated by a line.
LONGEST_CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: of `num` experts each token is routed to `per_token`, and to the shared ones."""

    num: int
    per_token: int
    size: int  # width of one expert's MLP
    shared_size: int  # width of all shared experts together
    num_layers: int  # layers that have experts; the others have a dense MLP

    def touched(self, num_tokens: float) -> float:
        """Return the expected number of distinct experts that this many tokens are routed to, all equally likely."""
        return self.num * (1.0 - (1.0 - self.per_token / self.num) ** num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are one latent vector per token and a rotary part, for all heads."""

    query_rank: int  # 0: queries are not compressed
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        """The size of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """The size of what a token leaves in the cache."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Layers that attend to the last tokens only."""

    num_tokens: int
    num_layers: int

    def attended(self) -> tuple[float, float]:
        """Return a line for the tokens attended to from a context: how many at once, and how many per context token."""
        return _line_below(self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers whose state has a constant size per sequence, instead of keys and values per token."""

    num_layers: int
    weights: int  # parameters of one layer
    state_numbers: int  # of one sequence in one layer
    state_number_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of a weight by part, scales included, and the bits in which products are computed."""

    attention: float = 2.0
    mlp: float = 2.0
    experts: float = 2.0
    head: float = 2.0
    compute_bits: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of a dense MLP; 0 where all layers have experts
    vocab_size: int
    weight_bytes_each: WeightBytes = WeightBytes()
    number_bytes: int = 2  # of hidden states
    kv_number_bytes: float = 2.0
    has_one_embedding: bool = False  # input and output embedding are the same
    has_gated_queries: bool = False  # queries have a gate of the same size
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window: SlidingWindow | None = None
    linear: LinearAttention | None = None

    @property
    def num_attention_layers(self) -> int:
        """The layers that keep keys and values."""
        return self.num_layers - (self.linear.num_layers if self.linear else 0)

    @property
    def num_windowed_layers(self) -> int:
        """Those of them with a sliding window."""
        return self.window.num_layers if self.window else 0

    @property
    def num_dense_layers(self) -> int:
        """The layers with a dense MLP."""
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def attention_weights(self) -> int:
        """Parameters of an attention layer's projections."""
        if self.latent:
            return self.copied_attention_weights + self._latent_head_weights
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        return self.hidden_size * ((3 if self.has_gated_queries else 2) * queries + 2 * keys)

    @property
    def copied_attention_weights(self) -> int:
        """Those of them that every rank has whole: the projections to latent vectors."""
        if not self.latent:
            return 0
        return self.hidden_size * (self.latent.query_rank + self.latent.kv_rank + self.latent.rope_dim)

    @property
    def _latent_head_weights(self) -> int:
        assert self.latent is not None
        latent, heads = self.latent, self.num_heads
        queries = heads * (latent.nope_dim + latent.rope_dim) * (latent.query_rank or self.hidden_size)
        keys_and_values = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
        return queries + keys_and_values + heads * latent.value_dim * self.hidden_size

    @property
    def mlp_weights(self) -> int:
        """Parameters of a dense layer's gated MLP."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def expert_weights(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden_size * self.experts.size if self.experts else 0

    @property
    def shared_weights(self) -> int:
        """Parameters of a layer's shared experts."""
        return 3 * self.hidden_size * self.experts.shared_size if self.experts else 0

    @property
    def router_weights(self) -> int:
        """Parameters of a layer's router, which is not quantized."""
        return self.hidden_size * self.experts.num if self.experts else 0

    @property
    def head_weights(self) -> int:
        """Parameters of the output embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return round(self.rank_weight_bytes(tensor_parallel=1))

    def touched_bytes(self, num_tokens: int) -> float:
        """Return the bytes of parameters without those of experts that so many tokens are not expected to touch."""
        if not self.experts:
            return self.weight_bytes
        untouched = self.experts.num_layers * (self.experts.num - self.experts.touched(num_tokens))
        return self.weight_bytes - untouched * self.expert_weights * self.weight_bytes_each.experts

    def rank_weight_bytes(self, *, tensor_parallel: int, data_parallel: int = 1) -> float:
        """Return the bytes of parameters on one rank: experts are divided among all ranks, the rest among some."""
        each, ranks = self.weight_bytes_each, tensor_parallel * data_parallel
        own = (self.attention_weights - self.copied_attention_weights) / tensor_parallel
        total = self.num_attention_layers * (own + self.copied_attention_weights) * each.attention
        if self.linear:
            total += self.linear.num_layers * self.linear.weights / tensor_parallel * each.attention
        total += self.num_dense_layers * self.mlp_weights / tensor_parallel * each.mlp
        if self.experts:
            layer = self.experts.num * self.expert_weights / ranks * each.experts
            layer += self.shared_weights / tensor_parallel * each.mlp + self.router_weights * self.number_bytes
            total += self.experts.num_layers * layer
        return total + (1 if self.has_one_embedding else 2) * self.head_weights / tensor_parallel * each.head

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one new token's keys and values in all layers."""
        return round(self.num_attention_layers * self.layer_kv_bytes())

    def layer_kv_bytes(self, *, tensor_parallel: int = 1) -> float:
        """Return the bytes of a token's keys and values in one layer on one rank, with at least one head.

        Every rank has the latent vectors whole.
        """
        if self.latent:
            return (self.latent.kv_rank + self.latent.rope_dim) * self.kv_number_bytes
        return 2 * max(1.0, self.num_kv_heads / tensor_parallel) * self.head_dim * self.kv_number_bytes

    def sequence_bytes(self, num_tokens: int, *, tensor_parallel: int = 1) -> float:
        """Return the bytes of a sequence's keys and values on one rank: windowed layers keep the last tokens only."""
        layer = self.layer_kv_bytes(tensor_parallel=tensor_parallel)
        full = self.num_attention_layers - self.num_windowed_layers
        total = full * num_tokens * layer
        if self.window:
            total += self.window.num_layers * min(num_tokens, self.window.num_tokens) * layer
        if self.linear:
            total += self.state_bytes / tensor_parallel
        return total

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in all layers with linear attention."""
        if not self.linear:
            return 0
        return self.linear.num_layers * self.linear.state_numbers * self.linear.state_number_bytes

    def attended_layers(self) -> tuple[float, float]:
        """Return how many tokens a query attends to, summed over the layers: in any context, and per context token."""
        full = float(self.num_attention_layers - self.num_windowed_layers)
        if not self.window:
            return 0.0, full
        at_once, each = self.window.attended()
        return self.window.num_layers * at_once, full + self.window.num_layers * each

    @property
    def pair_flops(self) -> int:
        """Operations for one query and one key in one layer, in prefill."""
        if self.latent:
            return 2 * self.num_heads * (self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim)
        return 4 * self.num_heads * self.head_dim

    @property
    def decode_pair_flops(self) -> int:
        """Operations for one query and one key in one layer, in decoding; latent vectors are not expanded there."""
        if self.latent:
            return 2 * self.num_heads * (2 * self.latent.kv_rank + self.latent.rope_dim)
        return self.pair_flops


@cache
def _line_below(window: int) -> tuple[float, float]:
    """Return the line closest to min(context, window), from 0 to LONGEST_CONTEXT, with no negative part."""
    contexts = np.arange(1.0, LONGEST_CONTEXT + 1)
    attended = np.minimum(contexts, window)
    slope, start = np.polyfit(contexts, attended, 1)
    if start < 0:  # cannot be: the function is concave and starts at zero
        start, slope = 0.0, float(contexts @ attended / (contexts @ contexts))
    return float(start), float(max(0.0, slope))
