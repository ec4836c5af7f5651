"""A layer's attention by torch: over pages if torch has a kernel for it, else over contiguous keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from predictor.fitting.kernel_plan import AttentionBatch
from predictor.fitting.model_shard import Share
from predictor.fitting.paged_layout import Counts, num_pages, paged_layout, pool_size
from services.profiling.torch_device import Run
from services.profiling.torch_latent import TorchLatentAttention
from services.profiling.torch_weights import drawn_for
from services.profiling.vllm_kernels import HEAD_DIMS, VllmCpuAttention, cpu_operators
from services.profiling.vllm_latent import VllmCpuLatentAttention, has_latent_kernels

PAGE_TOKENS = 256  # FlashAttention's pages must be multiples of that
HALVES = ("bfloat16", "float16")
TRIAL = AttentionBatch(chunk=16, before=16, num_decodes=2, context=16)


class Attention(Protocol):
    """A layer's attention on one device."""

    name: str

    def of(self, batch: AttentionBatch, window: int | None = None) -> Run:
        """Return the kernels for one batch, in a layer with or without a sliding window."""
        ...


def attention_for(share: Share, device: torch.device, batches: Sequence[AttentionBatch]) -> Attention:
    """Return the attention for these batches: paged if vLLM or torch and the device support it, else contiguous."""
    operators = cpu_operators() if device.type == "cpu" else None
    if share.model.latent and operators is not None and has_latent_kernels(share):
        return VllmCpuLatentAttention(operators, share, batches)
    if share.model.latent:
        return TorchLatentAttention(share, device, batches)
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
        self._keys, self._values = (drawn_for(share, device, *sizes) for _ in range(2))

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
        queries = drawn_for(
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
        self._keys, self._values = (drawn_for(share, device, *sizes) for _ in range(2))

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
        attending = drawn_for(share, self._device, sequences, share.num_kv_heads, rows, head_dim)
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
        queries, keys, values = (drawn_for(self._share, self._device, *sizes) for _ in range(3))
        return lambda _: functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
