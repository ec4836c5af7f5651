"""One layer's kernels by torch, on one device's share of the weights, which are random.

GEMMs, norms, embedding and attention are what engines run, or torch's best at it. Engines fuse what only moves data, so
for rotary positions and the activation one kernel that moves as many bytes stands here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from predictor.fitting.model_shard import Share
from services.profiling.stopwatch import Run

CACHE_BYTES = 2**28  # no cache of a device is larger: weights are read from memory, as they are where layers take turns
SCALE = 0.02  # of weights: products neither overflow nor vanish
EPSILON = 1e-6
MOST_DRAWN = 2**20


class TorchLayer:
    """Weights, and on them the kernels of so many tokens or sequences."""

    def __init__(self, share: Share, device: torch.device) -> None:
        """Make the weights, of each as many copies as no cache holds."""
        self._share = share
        self._device = device
        self._dtype = getattr(torch, share.dtype)
        hidden, heads = share.model.hidden_size, share.num_heads * share.model.head_dim
        self._qkv = self._copies(share.qkv_size, hidden)
        self._o = self._copies(hidden, heads)
        self._gate_up = self._copies(2 * share.intermediate_size, hidden)
        self._down = self._copies(hidden, share.intermediate_size)
        self._head = self._random(share.vocab_size, hidden)
        self._bias = self._random(share.qkv_size) if share.has_qkv_bias else None
        self._norm = self._random(hidden)
        self._head_norm = self._random(share.model.head_dim)

    def dense(self, tokens: int) -> dict[str, Run]:
        """Give the kernels that know nothing but their tokens, by name."""
        share, model = self._share, self._share.model
        hidden, residual = self._random(tokens, model.hidden_size), self._random(tokens, model.hidden_size)
        queries_and_keys = self._random(tokens, share.num_heads + share.num_kv_heads, model.head_dim)
        rotated, rotation = torch.empty_like(queries_and_keys), self._random(tokens, 1, model.head_dim)
        attended = self._random(tokens, share.num_heads * model.head_dim)
        gated = self._random(tokens, 2 * share.intermediate_size)
        activated = self._random(tokens, share.intermediate_size)
        keys_and_values = self._random(tokens, 2 * share.num_kv_heads * model.head_dim)
        cache = torch.empty_like(keys_and_values)
        slots = torch.randperm(tokens, device=self._device)
        ids = torch.randint(share.vocab_size, (tokens,), device=self._device)

        def norm(_: int) -> torch.Tensor:
            residual.add_(hidden)
            return functional.rms_norm(residual, (model.hidden_size,), self._norm, EPSILON)

        kernels: dict[str, Run] = {
            "embedding": lambda _: functional.embedding(ids, self._head),
            "norm": norm,
            "qkv": _multiplied(hidden, self._qkv, self._bias),
            "rotary": lambda _: torch.mul(queries_and_keys, rotation, out=rotated),
            "kv_write": lambda _: cache.index_copy_(0, slots, keys_and_values),
            "o": _multiplied(attended, self._o),
            "gate_up": _multiplied(hidden, self._gate_up),
            "activation": lambda _: functional.glu(gated),
            "down": _multiplied(activated, self._down),
        }
        if share.has_qk_norm:
            kernels["qk_norm"] = lambda _: functional.rms_norm(
                queries_and_keys, (model.head_dim,), self._head_norm, EPSILON
            )
        return kernels

    def head(self, sequences: int) -> Run:
        """Give what makes a token of each sequence's last state: the output embedding, and the likeliest token."""
        hidden = self._random(sequences, self._share.model.hidden_size)
        return lambda _: functional.linear(hidden, self._head).float().argmax(dim=-1)

    def _copies(self, rows: int, columns: int) -> list[torch.Tensor]:
        first = self._random(rows, columns)
        size = first.element_size() * first.nelement()
        more = min(self._share.model.num_layers, -(-CACHE_BYTES // size)) - 1
        return [first, *(first.clone() for _ in range(more))]

    def _random(self, *sizes: int) -> torch.Tensor:
        return drawn(sizes, self._dtype, self._device).mul_(SCALE)


def drawn(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Fill a tensor with normal numbers: a million of them, over and over, as drawing more takes processors long."""
    count = math.prod(sizes)
    some = torch.empty(min(count, MOST_DRAWN), dtype=dtype, device=device).normal_()
    return some.repeat(-(-count // len(some)))[:count].view(*sizes)


def _multiplied(states: torch.Tensor, copies: list[torch.Tensor], bias: torch.Tensor | None = None) -> Run:
    return lambda turn: functional.linear(states, copies[turn % len(copies)], bias)
