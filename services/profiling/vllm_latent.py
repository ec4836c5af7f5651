"""vLLM's own latent attention on CPUs without AMX, where vLLM is installed: `cpu_mla.py` and its prefill backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from predictor.fitting.kernel_plan import AttentionBatch
from predictor.fitting.model_shard import Share
from predictor.fitting.paged_layout import num_pages, paged_layout, pool_size
from services.profiling.torch_device import Run
from services.profiling.torch_latent import TorchLatentAttention

PAGE_TOKENS = 16  # the only ones of the decode kernel, with these sizes of latents
KV_RANK, ROPE_DIM = 512, 64


def has_latent_kernels(share: Share) -> bool:
    """Whether vLLM's CPU build has the kernels for these sizes; with AMX it runs others."""
    latent = share.model.latent
    return (
        latent is not None
        and (latent.kv_rank, latent.rope_dim) == (KV_RANK, ROPE_DIM)
        and hasattr(torch.ops._C, "mla_decode_kvcache")  # noqa: SLF001
        and not torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    )


class VllmCpuLatentAttention(TorchLatentAttention):
    """Decodes over scattered pages by vLLM's kernel, and prompts by its plain products in single precision.

    vLLM computes whole prompts there, so a chunk's attention to the context before it is torch's.
    """

    name = f"vLLM's CPU latent attention over pages of {PAGE_TOKENS} tokens"

    def __init__(self, operators: Any, share: Share, batches: Sequence[AttentionBatch]) -> None:
        """Allocate a pool of pages that is large enough for each of the batches."""
        super().__init__(share, torch.device("cpu"), batches)
        self._operators = operators
        self._generator = np.random.default_rng(0)
        largest = max(num_pages(batch, PAGE_TOKENS) for batch in batches)
        self._pool_pages = pool_size(largest, PAGE_TOKENS * share.kv_bytes, share.model.num_layers)
        self._pages = self._drawn(self._pool_pages, PAGE_TOKENS, self._latent.cached_dim)

    def _decodes(self, sequences: int, context: int) -> Run:
        layout = paged_layout(
            AttentionBatch(num_decodes=sequences, context=context),
            page_tokens=PAGE_TOKENS,
            pool_pages=self._pool_pages,
            most_tables=self._share.model.num_layers,
            generator=self._generator,
        )
        lengths, tables = torch.from_numpy(layout.num_keys), [torch.from_numpy(table) for table in layout.tables]
        queries = self._drawn(sequences, self._share.num_heads, self._latent.key_dim)

        def run(number: int) -> torch.Tensor:
            moved = self._into_latents(queries, number)
            attended = torch.zeros(sequences, self._share.num_heads, self._latent.kv_rank, dtype=queries.dtype)
            self._operators.mla_decode_kvcache_cpu(
                attended, moved, self._pages, self._scale, tables[number % len(tables)], lengths
            )
            return self._out_of_latents(attended, number)

        return run

    def _attended(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
    ) -> torch.Tensor:
        """Attend as vLLM's prefill backend `CPU_SDPA_MLA` does."""
        asking, given, own = (one.transpose(0, 1).float() for one in (queries, keys, values))
        scores = torch.matmul(asking, given.transpose(1, 2)) * self._scale
        if causal:
            scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)[None], float("-inf"))
        attended = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32), own)
        return attended.transpose(0, 1).to(values.dtype)
