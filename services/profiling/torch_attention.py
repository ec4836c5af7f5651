"""A layer's attention by torch: over pages where it has a kernel for that, else over keys and values in a row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from predictor.fitting.kernel_plan import AttentionBatch
from predictor.fitting.model_shard import Share
from predictor.fitting.paged_layout import Counts, num_pages, paged_layout
from services.profiling.stopwatch import Run
from services.profiling.torch_layer import CACHE_BYTES, drawn

PAGE_TOKENS = 256  # FlashAttention's pages must be multiples of that
HALVES = ("bfloat16", "float16")
TRIAL = AttentionBatch(chunk=16, before=16, num_decodes=2, context=16)


class Attention(Protocol):
    """A layer's attention on some device."""

    name: str

    def of(self, batch: AttentionBatch) -> Run:
        """Give the kernels for one batch."""
        ...


def attention_for(share: Share, device: torch.device, batches: Sequence[AttentionBatch]) -> Attention:
    """Choose the best that there is for batches such as these: over pages where torch and this device can."""
    if device.type == "cuda" and share.dtype in HALVES and has_paged_kernel():
        paged = AttentionOverPages(share, device, [*batches, TRIAL])
        try:
            paged.of(TRIAL)(0)
            torch.cuda.synchronize()
        except RuntimeError:  # a GPU that FlashAttention was not made for
            del paged
        else:
            return paged
    return AttentionInARow(share, device, batches)


def has_paged_kernel() -> bool:
    """Tell whether this torch has attention over pages."""
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        return False
    return {"block_table", "seqused_k"} <= set(inspect.signature(varlen_attn_out).parameters)


class AttentionOverPages:
    """FlashAttention as engines use it: a batch's chunk and decodes in one launch, over pages that lie anywhere."""

    name = f"FlashAttention over pages of {PAGE_TOKENS} tokens"

    def __init__(self, share: Share, device: torch.device, batches: Sequence[AttentionBatch]) -> None:
        """Make a pool of pages that holds each of the batches."""
        self._share = share
        self._device = device
        self._generator = np.random.default_rng(0)
        largest = max(num_pages(batch, PAGE_TOKENS) for batch in batches)
        self._pool_pages = _enough(largest, PAGE_TOKENS * share.kv_bytes, share.model.num_layers)
        sizes = (self._pool_pages, PAGE_TOKENS, share.num_kv_heads, share.model.head_dim)
        self._keys, self._values = (_random(share, device, *sizes) for _ in range(2))

    def of(self, batch: AttentionBatch) -> Run:
        """Give the kernel for one batch, which takes other pages each time."""
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
            self._there(counts) for counts in (layout.first_queries, layout.first_keys, layout.num_keys)
        )
        tables = [self._there(table) for table in layout.tables]
        return lambda turn: varlen_attn_out(
            attended,
            queries,
            self._keys,
            self._values,
            first_queries,
            first_keys,
            layout.most_queries,
            layout.most_keys,
            window_size=(-1, 0),  # causal: a chunk's last token sees all, its first one all before it and itself
            enable_gqa=True,
            seqused_k=num_keys,
            block_table=tables[turn % len(tables)],
        )

    def _there(self, counts: Counts) -> torch.Tensor:
        return torch.from_numpy(counts).to(self._device)


class AttentionInARow:
    """Attention over keys and values that lie in a row, the batch's parts one after the other.

    Gathering pages first would read and write everything once more, which no engine does, so they are taken to lie
    well. The chunk attends apart to what was before it and to itself. Where no mask tells queries of one KV head apart,
    they are put side by side as if they were one sequence's, so that it is read once.
    """

    name = "scaled_dot_product_attention over keys and values in a row"

    def __init__(self, share: Share, device: torch.device, batches: Sequence[AttentionBatch]) -> None:
        """Make keys and values enough for each of the batches."""
        self._share = share
        self._device = device
        largest = max(batch.kv_tokens for batch in batches)
        self._num_tokens = _enough(largest, share.kv_bytes, share.model.num_layers)
        sizes = (self._num_tokens, share.num_kv_heads, share.model.head_dim)
        self._keys, self._values = (_random(share, device, *sizes) for _ in range(2))

    def of(self, batch: AttentionBatch) -> Run:
        """Give the kernels for one batch, which take other keys and values each time."""
        parts: list[Run] = []
        if batch.num_decodes:
            parts.append(self._in_full(batch.num_decodes, 1, batch.context))
        if batch.before:
            parts.append(self._in_full(1, batch.chunk, batch.before))
        if batch.chunk:
            parts.append(self._causal(batch.chunk))
        return lambda turn: [part(turn) for part in parts]

    def _in_full(self, sequences: int, queries: int, keys: int) -> Run:
        share, head_dim = self._share, self._share.model.head_dim
        rows = queries * (share.num_heads // share.num_kv_heads)
        asking = _random(share, self._device, sequences, share.num_kv_heads, rows, head_dim)
        taken = sequences * keys
        turns = max(1, min(share.model.num_layers, self._num_tokens // taken))

        def views(pool: torch.Tensor) -> list[torch.Tensor]:
            return [
                pool[turn * taken : (turn + 1) * taken].view(sequences, keys, -1, head_dim).transpose(1, 2)
                for turn in range(turns)
            ]

        pairs = list(zip(views(self._keys), views(self._values), strict=True))
        return lambda turn: functional.scaled_dot_product_attention(asking, *pairs[turn % turns])

    def _causal(self, chunk: int) -> Run:
        sizes = (1, self._share.num_heads, chunk, self._share.model.head_dim)
        queries, keys, values = (_random(self._share, self._device, *sizes) for _ in range(3))
        return lambda _: functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def _enough(largest: int, bytes_each: int, num_layers: int) -> int:
    """So many that the largest batch fits, and that smaller ones find nothing in a cache if layers would not."""
    return min(max(largest, -(-CACHE_BYTES // bytes_each)), num_layers * largest)


def _random(share: Share, device: torch.device, *sizes: int) -> torch.Tensor:
    return drawn(sizes, getattr(torch, share.dtype), device)
