"""Kernels of models with latent attention: both forms compute what the formulas say, and no product is missing."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from predictor.fitting.kernel_plan import AttentionBatch, Reach
from predictor.fitting.kernel_profile import UntimedCosts, composed, fit_kernels, times_a_step
from predictor.fitting.model_shard import Share, share_of
from services.profiling.kernel_timing import TimingOptions, time_kernels
from services.profiling.torch_attention import attention_for
from services.profiling.torch_device import Run
from services.profiling.torch_kernels import TorchLayer
from services.profiling.torch_latent import TorchLatentAttention, latent_of
from tests.services.profiling.test_kernel_timing import one_thread

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "vocab_size": 500, "torch_dtype": "float32",
    "max_position_embeddings": 256,
}  # fmt: skip
SHARE = share_of(CONFIG, dtype="float32")
DIRECT = share_of({**CONFIG, "q_lora_rank": None}, dtype="float32")
HALF = share_of(CONFIG, tensor_parallel=2)
LATENT = latent_of(SHARE)
REACH = Reach(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128, kv_tokens=1024)
TOKENS = 10


@pytest.fixture(scope="module", autouse=True)
def always_one_thread() -> Iterator[None]:
    """Keep the tests short on a busy machine."""
    with one_thread():
        yield


def of_formulas(attention: TorchLatentAttention, queries: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Expand keys and values of each head, and let each token attend to those before it."""
    results = torch.empty(len(queries), SHARE.num_heads, LATENT.value_dim)
    size = LATENT.nope_dim + LATENT.value_dim
    for head in range(SHARE.num_heads):
        weights = attention.expansion(0)[head * size : (head + 1) * size]
        keys, values = (latents[:, : LATENT.kv_rank] @ weights.T).split([LATENT.nope_dim, LATENT.value_dim], dim=-1)
        keys = torch.cat((keys, latents[:, LATENT.kv_rank :]), dim=-1)
        for token, query in enumerate(queries[:, head]):
            scores = keys[: token + 1] @ query * (LATENT.nope_dim + LATENT.rope_dim) ** -0.5
            results[token, head] = torch.softmax(scores, dim=0) @ values[: token + 1]
    return results


def test_both_forms_are_the_formulas() -> None:
    """A prompt's chunk expands its latents; its last token, as a decode, absorbs the weights, with the same result."""
    with torch.inference_mode():
        attention = TorchLatentAttention(SHARE, CPU, [AttentionBatch(chunk=TOKENS)])
        attention.expansion(0).mul_(20)
        queries = torch.randn(TOKENS, SHARE.num_heads, LATENT.key_dim)
        latents = torch.randn(TOKENS, LATENT.cached_dim)
        expected = of_formulas(attention, queries, latents)
        expanded = attention.expanded(queries, latents, 0, causal=True)
        absorbed = attention.absorbed(queries[-1:], latents[None], 0)
    torch.testing.assert_close(expanded, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(absorbed[0], expected[-1], rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (AttentionBatch(num_decodes=3, context=100), [3]),
        (AttentionBatch(chunk=16), [16]),
        (AttentionBatch(chunk=16, before=100, num_decodes=2, context=50), [16, 2]),
    ],
)
def test_batches_have_a_chunk_and_decodes(batch: AttentionBatch, parts: list[int]) -> None:
    """Each part returns a value for all of its tokens and heads, whichever part of the latents it reads."""
    with torch.inference_mode():
        attention = attention_for(SHARE, CPU, [batch])
        assert isinstance(attention, TorchLatentAttention)
        run = attention.of(batch)
        for turn in range(3):
            results = run(turn)
            assert isinstance(results, list)
            assert [tuple(one.shape) for one in results] == [(num, 4, LATENT.value_dim) for num in parts]
            assert all(torch.isfinite(one).all() for one in results)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("query_rank", [24, None])
def test_a_layer_has_the_products_of_transformers(query_rank: int | None) -> None:
    """Operations of a dense layer's matrices, and of the expansion, are those of transformers' layer."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

    names = {name: value for name, value in CONFIG.items() if name not in ("model_type", "torch_dtype")}
    config = DeepseekV3Config(**{**names, "q_lora_rank": query_rank}, attn_implementation="eager")
    layer = DeepseekV3DecoderLayer(config, 0)
    hidden, positions = torch.randn(1, TOKENS, 64), torch.arange(TOKENS)[None]
    rotary = DeepseekV3RotaryEmbedding(config)(hidden, positions)
    with torch.inference_mode(), FlopCounterMode(display=False) as theirs:
        layer(hidden, position_embeddings=rotary)
    share = SHARE if query_rank else DIRECT
    kernels = ("qkv_a", "q_b", "o", "gate_up", "down")
    with torch.inference_mode():
        dense = TorchLayer(share, CPU).dense(TOKENS)
        attention = TorchLatentAttention(share, CPU, [AttentionBatch(chunk=TOKENS)])
        queries, latents = torch.randn(TOKENS, 4, LATENT.key_dim), torch.randn(TOKENS, LATENT.cached_dim)
        with FlopCounterMode(display=False) as ours:
            for name in kernels:
                dense[name](0)
            attention.expanded(queries, latents, 0, causal=True)
    assert products(ours) == products(theirs) > 0


def products(counter: FlopCounterMode) -> int:
    """Return the operations of matrices of weights, which have no batches."""
    counts = counter.get_flop_counts()["Global"]
    return sum(number for kind, number in counts.items() if str(kind) in ("aten.mm", "aten.addmm"))


def test_decodes_have_the_operations_of_the_absorbed_form() -> None:
    """Queries go into the latents and values come out of them; each pair of a query and a key costs both ranks."""
    batch = AttentionBatch(num_decodes=3, context=40)
    with torch.inference_mode():
        run = TorchLatentAttention(SHARE, CPU, [batch]).of(batch)
        with FlopCounterMode(display=False) as counter:
            run(0)
    moved = 2 * 3 * 4 * LATENT.kv_rank * (LATENT.nope_dim + LATENT.value_dim)
    assert counter.get_total_flops() == moved + 3 * 40 * SHARE.model.decode_pair_flops


def test_chunks_expand_the_context_before_them() -> None:
    """The latents of the context are expanded as those of the chunk are."""
    counts = []
    with torch.inference_mode():
        for before in (0, 48):
            batch = AttentionBatch(chunk=16, before=before)
            run = TorchLatentAttention(SHARE, CPU, [batch]).of(batch)
            with FlopCounterMode(display=False) as counter:
                run(0)
            counts.append(products(counter))
    assert counts[0] == 2 * 16 * LATENT.kv_rank * 4 * (LATENT.nope_dim + LATENT.value_dim)
    assert counts[1] == 4 * counts[0]


@pytest.mark.parametrize("share", [SHARE, DIRECT, HALF])
def test_all_kernels_of_the_model_are_there(share: Share) -> None:
    """Dense and expert layers, shared experts, and the projections around latents, also on a device of two."""
    times = times_a_step(share)
    assert (times["qkv_a"], times["q_b"], times["gate_up"], times["experts"], times["shared_down"]) == (3, 3, 1, 2, 2)
    assert "qkv" not in times
    with torch.inference_mode():
        kernels = TorchLayer(share, CPU).dense(8)
        assert set(kernels) == set(times)
        for run in kernels.values():
            run(0)
            run(1)


class OneRun:
    """A stopwatch that runs each kernel once."""

    def seconds(self, run: Run) -> float:
        """Return the seconds of one run."""
        begin_s = time.perf_counter()
        run(0)
        return time.perf_counter() - begin_s


def test_a_profile_is_made_of_them() -> None:
    """The fit of all timings has a step for each batch whose attention was timed."""
    options = TimingOptions(share=SHARE, reach=REACH, device=CPU, budget_s=3600.0)
    timed = time_kernels(options, lambda _: None, lambda *_: OneRun())
    assert "latents" in timed.attention
    assert len(composed(timed.timings, SHARE)) == len(timed.timings.attention)
    step_time, error, _ = fit_kernels(timed.timings, SHARE, UntimedCosts(cpu_s=1e-3))
    assert step_time.constant_s >= 1e-3
    assert error.n > 0
