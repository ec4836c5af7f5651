"""Kernels of models with experts and windows, by torch: they compute what a plain loop computes, and are all timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from predictor.fitting.kernel_plan import AttentionBatch, Reach
from predictor.fitting.kernel_profile import UntimedCosts, composed, fit_kernels, times_a_step
from predictor.fitting.model_shard import share_of
from services.profiling.kernel_timing import TimingOptions, time_kernels
from services.profiling.torch_attention import ContiguousAttention
from services.profiling.torch_experts import Routing, TorchExperts, random_routings
from services.profiling.torch_kernels import TorchLayer

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "mlp_only_layers": [0], "shared_expert_intermediate_size": 96, "vocab_size": 500,
    "torch_dtype": "float32", "max_position_embeddings": 256, "sliding_window": 32, "use_sliding_window": True,
    "max_window_layers": 1,
}  # fmt: skip
SHARE = share_of(CONFIG, dtype="float32")
REACH = Reach(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128, kv_tokens=1024)


def test_experts_compute_what_a_loop_over_them_does() -> None:
    """Each token's result is the sum of its experts' gated MLPs, by its shares."""
    generator = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(8, 64, 64, generator=generator), torch.randn(8, 64, 32, generator=generator)
    states = torch.randn(5, 64, generator=generator)
    (routing, *_) = random_routings(SHARE, 5, CPU)
    expected = torch.zeros_like(states)
    for token in range(5):
        for expert, share in zip(routing.experts[token], routing.shares[token], strict=True):
            gate, up = (gate_up[expert] @ states[token]).chunk(2)
            expected[token] += share * (down[expert] @ (functional.silu(gate) * up))
    found = TorchExperts(SHARE, gate_up, down).of([routing], states)(0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_routings_are_distinct_experts() -> None:
    """Each token has as many different experts as the model says, and routings differ."""
    routings = random_routings(SHARE, 50, CPU)
    assert all(len(set(row.tolist())) == 2 for routing in routings for row in routing.experts)
    assert not torch.equal(routings[0].experts, routings[1].experts)
    assert isinstance(routings[0], Routing)


def test_all_kernels_of_the_model_are_timed() -> None:
    """Dense and expert layers, shared experts and the router; layers are counted by kind."""
    times = times_a_step(SHARE)
    assert (times["gate_up"], times["experts"], times["router"], times["shared_down"]) == (1, 2, 2, 2)
    with torch.inference_mode():
        kernels = TorchLayer(SHARE, CPU).dense(8)
        assert set(kernels) == set(times)
        for run in kernels.values():
            run(0)
            run(1)


def test_a_profile_is_made_of_them() -> None:
    """The fit of all timings has a step for each batch whose attention was timed."""
    options = TimingOptions(share=SHARE, reach=REACH, device=CPU, budget_s=3600.0)
    timings = time_kernels(options, lambda _: None).timings
    assert len(composed(timings, SHARE)) == len(timings.attention)
    step_time, error, _ = fit_kernels(timings, SHARE, UntimedCosts(cpu_s=1e-3))
    assert step_time.constant_s >= 1e-3
    assert error.n > 0


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (AttentionBatch(num_decodes=3, context=100), [32 * 3]),  # a window of each
        (AttentionBatch(num_decodes=3, context=20), [20 * 3]),
        (AttentionBatch(chunk=16, before=100), [32 * 16, 16 * 16]),
        (AttentionBatch(chunk=96, before=100), [32 * 96]),  # each token of the chunk has a window
    ],
)
def test_windows_limit_what_is_attended_to(batch: AttentionBatch, rows: list[int]) -> None:
    """Keys times queries of each part, as torch is asked for."""
    asked: list[int] = []

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **_: Any) -> torch.Tensor:
        group = 1 if queries.shape[1] == SHARE.num_heads else SHARE.num_heads // SHARE.num_kv_heads
        asked.append(queries.shape[0] * queries.shape[2] // group * keys.shape[2])
        assert values.shape == keys.shape
        return queries

    attention = ContiguousAttention(SHARE, CPU, [batch])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", attend)
        attention.of(batch, 32)(0)
    assert asked == rows
