"""One layer's kernels by torch, on one device's shard of the weights, which are random.

GEMMs, norms, embedding and attention are the kernels that engines run, or torch's closest ones. Engines fuse kernels
that only move data; for rotary positions and the activation, one kernel that moves as many bytes replaces these.
Attention runs over pages if torch has a kernel for it, else over contiguous keys and values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from predictor.fitting.kernel_plan import AttentionBatch
from predictor.fitting.model_shard import Share
from predictor.fitting.paged_layout import CACHE_BYTES, Counts, num_pages, paged_layout, pool_size
from services.profiling.torch_device import Run
from services.profiling.torch_experts import ExpertKernel, TorchExperts, random_routings
from services.profiling.vllm_kernels import (
    HEAD_DIMS,
    Product,
    VllmCpuAttention,
    VllmCpuExperts,
    cpu_operators,
    has_experts_of,
    vllm_cpu_product,
)

SCALE = 0.02  # of weights, so that products neither overflow nor vanish
EPSILON = 1e-6
MAX_DRAWN = 2**20
PAGE_TOKENS = 256  # FlashAttention's pages must be multiples of that
HALVES = ("bfloat16", "float16")
TRIAL = AttentionBatch(chunk=16, before=16, num_decodes=2, context=16)


class TorchLayer:
    """A layer's weights, and its kernels for a number of tokens or sequences."""

    def __init__(self, share: Share, device: torch.device) -> None:
        """Draw the weights, each with enough copies to exceed every cache."""
        self._share = share
        self._device = device
        self._dtype = getattr(torch, share.dtype)
        hidden, heads = share.model.hidden_size, share.num_heads * share.model.head_dim
        self._qkv = self.products(share.qkv_size, hidden)
        self._o = self.products(hidden, heads)
        if share.model.num_dense_layers:
            self._mlp = Mlp(self, hidden, share.intermediate_size)
        if share.model.experts:
            num, size = share.model.experts.num, share.expert_size
            self._router = self.products(num, hidden)
            self._shared = Mlp(self, hidden, share.shared_size) if share.shared_size else None
            weights = zip(self.copies(num * 2 * size, hidden), self.copies(num * size, hidden), strict=False)
            self._experts = [
                experts_for(share, device, gate_up.view(num, 2 * size, hidden), down.view(num, hidden, size))
                for gate_up, down in weights
            ]
        self._vocabulary = self._random(share.vocab_size, hidden)
        self._head = product_of(self._vocabulary, device)
        self._bias = self._random(share.qkv_size) if share.has_qkv_bias else None
        self._norm = self._random(hidden)
        self._head_norm = self._random(share.model.head_dim)

    def dense(self, tokens: int) -> dict[str, Run]:
        """Return the kernels that depend only on the number of tokens, by name."""
        share, model = self._share, self._share.model
        hidden, residual = self._random(tokens, model.hidden_size), self._random(tokens, model.hidden_size)
        queries_and_keys = self._random(tokens, share.num_heads + share.num_kv_heads, model.head_dim)
        rotated, rotation = torch.empty_like(queries_and_keys), self._random(tokens, 1, model.head_dim)
        attended = self._random(tokens, share.num_heads * model.head_dim)
        keys_and_values = self._random(tokens, 2 * share.num_kv_heads * model.head_dim)
        cache = torch.empty_like(keys_and_values)
        slots = torch.randperm(tokens, device=self._device)
        ids = torch.randint(share.vocab_size, (tokens,), device=self._device)

        def norm(_: int) -> torch.Tensor:
            residual.add_(hidden)
            return functional.rms_norm(residual, (model.hidden_size,), self._norm, EPSILON)

        kernels: dict[str, Run] = {
            "embedding": lambda _: functional.embedding(ids, self._vocabulary),
            "norm": norm,
            "qkv": _multiplied(hidden, self._qkv, self._bias),
            "rotary": lambda _: torch.mul(queries_and_keys, rotation, out=rotated),
            "kv_write": lambda _: cache.index_copy_(0, slots, keys_and_values),
            "o": _multiplied(attended, self._o),
        }
        if model.num_dense_layers:
            kernels |= self._mlp.kernels(hidden, self._random)
        if model.experts:
            kernels |= self._expert_kernels(hidden)
        if share.has_qk_norm:
            kernels["qk_norm"] = lambda _: functional.rms_norm(
                queries_and_keys, (model.head_dim,), self._head_norm, EPSILON
            )
        return kernels

    def _expert_kernels(self, hidden: torch.Tensor) -> dict[str, Run]:
        """Return the kernels of a layer with experts."""
        experts = self._share.model.experts
        assert experts is not None
        routings = random_routings(self._share, len(hidden), self._device)
        runs = [kernel.of(routings, hidden) for kernel in self._experts]

        def router(number: int) -> object:
            scores = self._router[number % len(self._router)](hidden, None)
            return torch.softmax(scores, dim=-1).topk(experts.per_token)

        kernels: dict[str, Run] = {"router": router, "experts": lambda number: runs[number % len(runs)](number)}
        if self._shared:
            kernels |= {f"shared_{name}": run for name, run in self._shared.kernels(hidden, self._random).items()}
        return kernels

    def head(self, sequences: int) -> Run:
        """Return the kernel that samples a token per sequence: output embedding and argmax."""
        hidden = self._random(sequences, self._share.model.hidden_size)
        return lambda _: self._head(hidden, None).float().argmax(dim=-1)

    def products(self, rows: int, columns: int) -> list[Product]:
        """Draw a matrix, with enough copies to exceed every cache, and return the products with each."""
        return [product_of(weight, self._device) for weight in self.copies(rows, columns)]

    def copies(self, rows: int, columns: int) -> list[torch.Tensor]:
        """Draw a matrix, with enough copies to exceed every cache."""
        first = self._random(rows, columns)
        size = first.element_size() * first.nelement()
        more = min(self._share.model.num_layers, -(-CACHE_BYTES // size)) - 1
        return [first, *(first.clone() for _ in range(more))]

    def _random(self, *sizes: int) -> torch.Tensor:
        return drawn(sizes, self._dtype, self._device).mul_(SCALE)


class Mlp:
    """A gated MLP: its weights, and its kernels."""

    def __init__(self, layer: TorchLayer, hidden: int, size: int) -> None:
        """Draw the weights."""
        self._size = size
        self._gate_up, self._down = layer.products(2 * size, hidden), layer.products(hidden, size)

    def kernels(self, hidden: torch.Tensor, random: Callable[..., torch.Tensor]) -> dict[str, Run]:
        """Return the kernels for tokens with these hidden states."""
        gated, activated = random(len(hidden), 2 * self._size), random(len(hidden), self._size)
        return {
            "gate_up": _multiplied(hidden, self._gate_up),
            "activation": lambda _: functional.glu(gated),
            "down": _multiplied(activated, self._down),
        }


def product_of(weight: torch.Tensor, device: torch.device) -> Product:
    """Return the product of hidden states and a matrix: vLLM's on CPUs if it is installed, else torch's."""
    operators = cpu_operators() if device.type == "cpu" else None
    if operators is not None:
        return vllm_cpu_product(operators, weight)
    return lambda states, bias: functional.linear(states, weight, bias)


def experts_for(share: Share, device: torch.device, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertKernel:
    """Return the experts' kernel: vLLM's on CPUs if it is installed, else torch's."""
    operators = cpu_operators() if device.type == "cpu" else None
    if operators is not None and has_experts_of(share):
        return VllmCpuExperts(operators, gate_up, down)
    return TorchExperts(share, gate_up, down)


def drawn(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Fill a tensor with normal numbers; at most MAX_DRAWN are drawn and then repeated, which is faster on CPUs."""
    count = math.prod(sizes)
    some = torch.empty(min(count, MAX_DRAWN), dtype=dtype, device=device).normal_()
    return some.repeat(-(-count // len(some)))[:count].view(*sizes)


def _multiplied(states: torch.Tensor, products: list[Product], bias: torch.Tensor | None = None) -> Run:
    return lambda number: products[number % len(products)](states, bias)


class Attention(Protocol):
    """A layer's attention on one device."""

    name: str

    def of(self, batch: AttentionBatch, window: int | None = None) -> Run:
        """Return the kernels for one batch, in a layer with or without a sliding window."""
        ...


def attention_for(share: Share, device: torch.device, batches: Sequence[AttentionBatch]) -> Attention:
    """Return the attention for these batches: paged if vLLM or torch and the device support it, else contiguous."""
    operators = cpu_operators() if device.type == "cpu" else None
    if operators is not None and share.model.head_dim in HEAD_DIMS:
        return VllmCpuAttention(operators, share, batches)
    if device.type == "cuda" and share.dtype in HALVES and has_paged_kernel():
        paged = PagedAttention(share, device, [*batches, TRIAL])
        try:
            paged.of(TRIAL)(0)
            torch.cuda.synchronize()
        except RuntimeError:  # a GPU without FlashAttention
            del paged
        else:
            return paged
    return ContiguousAttention(share, device, batches)


def has_paged_kernel() -> bool:
    """Whether this torch version has paged attention."""
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        return False
    return {"block_table", "seqused_k"} <= set(inspect.signature(varlen_attn_out).parameters)


class PagedAttention:
    """FlashAttention as engines use it: a batch's chunk and decodes in one launch, over scattered pages."""

    name = f"FlashAttention over pages of {PAGE_TOKENS} tokens"

    def __init__(self, share: Share, device: torch.device, batches: Sequence[AttentionBatch]) -> None:
        """Allocate a pool of pages that is large enough for each of the batches."""
        self._share = share
        self._device = device
        self._generator = np.random.default_rng(0)
        largest = max(num_pages(batch, PAGE_TOKENS) for batch in batches)
        self._pool_pages = pool_size(largest, PAGE_TOKENS * share.kv_bytes, share.model.num_layers)
        sizes = (self._pool_pages, PAGE_TOKENS, share.num_kv_heads, share.model.head_dim)
        self._keys, self._values = (_random(share, device, *sizes) for _ in range(2))

    def of(self, batch: AttentionBatch, window: int | None = None) -> Run:
        """Return the kernel for one batch, which uses other pages each time."""
        from torch.nn.attention.varlen import varlen_attn_out

        layout = paged_layout(
            batch,
            page_tokens=PAGE_TOKENS,
            pool_pages=self._pool_pages,
            most_tables=self._share.model.num_layers,
            generator=self._generator,
        )
        queries = _random(
            self._share, self._device, batch.num_tokens, self._share.num_heads, self._share.model.head_dim
        )
        attended = torch.empty_like(queries)
        first_queries, first_keys, num_keys = (
            self._on_device(counts) for counts in (layout.first_queries, layout.first_keys, layout.num_keys)
        )
        tables = [self._on_device(table) for table in layout.tables]
        return lambda number: varlen_attn_out(
            attended,
            queries,
            self._keys,
            self._values,
            first_queries,
            first_keys,
            layout.most_queries,
            layout.most_keys,
            window_size=(-1 if window is None else window - 1, 0),  # causal: each token sees no later one
            enable_gqa=True,
            seqused_k=num_keys,
            block_table=tables[number % len(tables)],
        )

    def _on_device(self, counts: Counts) -> torch.Tensor:
        return torch.from_numpy(counts).to(self._device)


class ContiguousAttention:
    """Attention over contiguous keys and values, the parts of a batch one after the other.

    Gathering pages first would read and write everything once more, which no engine does, so keys and values are
    contiguous. A chunk attends separately to the tokens before it and to itself. Without a mask, the queries of one KV
    head are joined as if they were one sequence's, so that the head is read once.
    """

    name = "scaled_dot_product_attention over contiguous keys and values"

    def __init__(self, share: Share, device: torch.device, batches: Sequence[AttentionBatch]) -> None:
        """Allocate enough keys and values for each of the batches."""
        self._share = share
        self._device = device
        largest = max(batch.kv_tokens for batch in batches)
        self._num_tokens = pool_size(largest, share.kv_bytes, share.model.num_layers)
        sizes = (self._num_tokens, share.num_kv_heads, share.model.head_dim)
        self._keys, self._values = (_random(share, device, *sizes) for _ in range(2))

    def of(self, batch: AttentionBatch, window: int | None = None) -> Run:
        """Return the kernels for one batch, which use other keys and values each time.

        In a window each token of a longer chunk attends to as many tokens: pieces as long as the window attend to one
        another.
        """
        parts: list[Run] = []
        seen = batch.kv_tokens if window is None else window
        if batch.num_decodes:
            parts.append(self._in_full(batch.num_decodes, 1, min(batch.context, seen)))
        if batch.chunk > seen:
            parts.append(self._in_full(batch.chunk // seen, seen, seen))
        elif batch.chunk:
            if batch.before:
                parts.append(self._in_full(1, batch.chunk, min(batch.before, seen)))
            parts.append(self._causal(batch.chunk))
        return lambda number: [part(number) for part in parts]

    def _in_full(self, sequences: int, queries: int, keys: int) -> Run:
        share, head_dim = self._share, self._share.model.head_dim
        rows = queries * (share.num_heads // share.num_kv_heads)
        attending = _random(share, self._device, sequences, share.num_kv_heads, rows, head_dim)
        taken = sequences * keys
        num_copies = max(1, min(share.model.num_layers, self._num_tokens // taken))

        def views(pool: torch.Tensor) -> list[torch.Tensor]:
            return [
                pool[number * taken : (number + 1) * taken].view(sequences, keys, -1, head_dim).transpose(1, 2)
                for number in range(num_copies)
            ]

        pairs = list(zip(views(self._keys), views(self._values), strict=True))
        return lambda number: functional.scaled_dot_product_attention(attending, *pairs[number % num_copies])

    def _causal(self, chunk: int) -> Run:
        sizes = (1, self._share.num_heads, chunk, self._share.model.head_dim)
        queries, keys, values = (_random(self._share, self._device, *sizes) for _ in range(3))
        return lambda _: functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def _random(share: Share, device: torch.device, *sizes: int) -> torch.Tensor:
    return drawn(sizes, getattr(torch, share.dtype), device)
