"""Timing kernels on the CPU: against a real stack of layers, and for larger shapes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.fitting.kernel_plan import AttentionBatch, Reach
from predictor.fitting.kernel_profile import Timings, UntimedCosts, composed, fit_kernels, times_a_step
from predictor.fitting.model_shard import share_of
from predictor.fitting.regression import predict
from predictor.step_time import StepTime
from services.profiling.kernel_timing import TimedKernels, TimingOptions, _Budget, time_kernels
from services.profiling.torch_attention import ContiguousAttention, PagedAttention, attention_for, has_paged_kernel
from services.profiling.torch_device import CpuStopwatch
from services.profiling.torch_kernels import TorchLayer
from services.profiling.torch_weights import RandomWeights
from tests.services.profiling.real_stack import RealStack

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 688,
    "vocab_size": 2000,
    "torch_dtype": "float32",
    "max_position_embeddings": 1024,
}
SHARE = share_of(CONFIG, dtype="float32")
REACH = Reach(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024, kv_tokens=16384)
MAX_ATTEMPTS = 3
NO_LIMIT_S = 3600.0  # the plan ends long before, on any machine
BATCHES = (
    *(AttentionBatch(num_decodes=num, context=context) for num in (4, 12) for context in (50, 300, 900)),
    *(AttentionBatch(chunk=chunk, before=before) for chunk in (32, 100, 250) for before in (0, 300, 700)),
    AttentionBatch(chunk=100, before=200, num_decodes=8, context=400),
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: several threads that wait for each other on a busy machine take a hundred times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def always_one_thread() -> Iterator[None]:
    """Make processor times independent of the machine's load."""
    with one_thread():
        yield


def in_processor_time(_: torch.device, sample_s: float) -> CpuStopwatch:
    """Return a stopwatch of processor time."""
    return CpuStopwatch(sample_s, clock=time.thread_time)


@pytest.fixture(scope="module")
def timed() -> TimedKernels:
    """All kernels of a small model."""
    return timed_now()


def timed_now() -> TimedKernels:
    """Time all kernels."""
    options = TimingOptions(share=SHARE, reach=REACH, device=CPU, budget_s=NO_LIMIT_S)
    return time_kernels(options, lambda _: None, in_processor_time)


def test_the_composed_profile_predicts_a_real_stack_of_layers(timed: TimedKernels) -> None:
    """Given Python's time for a step of one token, all other steps are predicted within a factor of two.

    They are timed again where they are not, as other processes may have used caches and cores only for a part of the time.
    """
    ratios = ratios_of(timed)
    for _ in range(MAX_ATTEMPTS - 1):
        if are_close(ratios):
            break
        ratios = ratios_of(timed_now())
    assert are_close(ratios), ratios


def are_close(ratios: np.ndarray) -> bool:
    """Return whether predictions are about right."""
    return bool(np.all((ratios > 0.5) & (ratios < 2.0)) and 0.67 < np.median(ratios) < 1.5)


def ratios_of(timed: TimedKernels) -> np.ndarray:
    """Return the predicted times of steps, each as a multiple of the time that it takes."""
    stack, smallest = RealStack(SHARE, REACH.kv_tokens), AttentionBatch(num_decodes=1, context=16)
    kernels, _, _ = fit_kernels(timed.timings, SHARE, UntimedCosts())
    python_s = seconds_of(stack, smallest) - predicted_s(kernels, [smallest])[0]
    step_time, _, _ = fit_kernels(timed.timings, SHARE, UntimedCosts(cpu_s=max(0.0, python_s)))
    return predicted_s(step_time, BATCHES) / [seconds_of(stack, batch) for batch in BATCHES]


def seconds_of(stack: RealStack, batch: AttentionBatch) -> float:
    """Return the processor time of a step, the median of five."""
    stack.run(batch)
    taken = []
    for _ in range(5):
        begin_s = time.thread_time()
        stack.run(batch)
        taken.append(time.thread_time() - begin_s)
    return float(np.median(taken))


def predicted_s(step_time: StepTime, batches: Sequence[AttentionBatch]) -> np.ndarray:
    """Return the predicted times of batches; their measured times do not matter."""
    nothing = Timings(
        dense={name: {1: 0.0, 10**6: 0.0} for name in times_a_step(SHARE)},
        head={1: 0.0, 10**6: 0.0},
        attention=dict.fromkeys(batches, 0.0),
    )
    return predict(step_time, composed(nothing, SHARE))


def test_all_kernels_were_timed_at_all_counts(timed: TimedKernels) -> None:
    """All times are positive, and larger shapes take longer."""
    timings = timed.timings
    assert set(timings.dense) == set(times_a_step(SHARE))
    for name in ("qkv", "o", "gate_up", "down"):
        assert timings.dense[name][256] > 4 * timings.dense[name][4] > 0
    assert timings.dense["gate_up"][256] > 2 * timings.dense["o"][256]
    assert timings.head[16] > timings.head[1] > 0
    one, sixteen = (timings.attention[AttentionBatch(num_decodes=num, context=1024)] for num in (1, 16))
    assert sixteen > 4 * one > 0
    first, last = (timings.attention[AttentionBatch(chunk=256, before=before)] for before in (0, 768))
    assert last > 2 * first > 0
    assert any(batch.chunk and batch.num_decodes for batch in timings.attention)


def test_a_shard_takes_less_than_the_whole_model() -> None:
    """Half of the heads and of the MLP take about half the time, with enough tokens."""
    watch = CpuStopwatch(0.02, clock=time.thread_time)
    with torch.inference_mode():
        kernels = [
            TorchLayer(share, CPU).dense(256) for share in (SHARE, share_of(CONFIG, tensor_parallel=2, dtype="float32"))
        ]
        for name in ("qkv", "o", "gate_up", "down"):
            rounds = [[watch.seconds(one[name]) for one in kernels] for _ in range(5)]
            whole_s, half_s = (min(times) for times in zip(*rounds, strict=True))
            assert half_s < 0.8 * whole_s, name


def test_kernels_beyond_the_budget_are_left_out(timed: TimedKernels) -> None:
    """With a tiny budget only the first kernel of each kind is timed, and progress still reaches 1."""
    shares: list[float] = []
    options = TimingOptions(share=SHARE, reach=REACH, device=CPU, budget_s=1e-3)
    first_only = time_kernels(options, shares.append)
    assert len(first_only.timings.attention) < len(timed.timings.attention) / 10
    assert list(first_only.timings.dense["qkv"]) == [1]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    with pytest.raises(ValueError, match="budget: .* too few"):
        fit_kernels(first_only.timings, SHARE, UntimedCosts())


@given(st.lists(st.integers(1, 1000), min_size=1), st.floats(0.5, 5000.0), st.floats(0.1, 1.0))
@settings(deadline=None)
def test_a_budget_is_kept_where_time_grows_with_work(works: list[int], budget_s: float, until: float) -> None:
    """All points that fit into the budget are timed, cheapest first, and no others except the first."""
    now_s = 0.0

    def timed(work: int) -> float:
        nonlocal now_s
        now_s += work
        return now_s

    with patch("services.profiling.kernel_timing.time.monotonic", lambda: now_s):
        budget = _Budget(budget_s, len(works), lambda _: None)
        points = sorted(set(works))
        found = budget.spend(until, points, float, timed)
    assert list(found) == points[: len(found)]
    assert len(found) == 1 or sum(found) <= until * budget_s * (1 + 1e-9)
    assert len(found) == len(points) or sum(points[: len(found) + 1]) > until * budget_s * (1 - 1e-9)


def test_contiguous_attention() -> None:
    """Joined queries of a KV head give outputs of the right shape."""
    batch = AttentionBatch(num_decodes=3, context=40)
    with torch.inference_mode():
        attention = ContiguousAttention(SHARE, CPU, [batch])
        assert attention_for(SHARE, CPU, [batch]).name == attention.name
        parts = attention.of(batch)(1)
    assert [tuple(part.shape) for part in parts] == [(3, SHARE.num_kv_heads, 4, 32)]
    for part in parts:
        assert torch.isfinite(part).all()
        assert part.std() > 0


@pytest.mark.skipif(not has_paged_kernel(), reason="this torch version has no paged attention")
def test_paged_attention_is_called_correctly() -> None:
    """Without a GPU, torch's meta device checks the call and its shapes."""
    batch = AttentionBatch(chunk=300, before=500, num_decodes=5, context=700)
    attention = PagedAttention(share_of({**CONFIG, "torch_dtype": "bfloat16"}), torch.device("meta"), [batch])
    for turn in range(3):
        attention.of(batch)(turn)


def test_weights_have_copies_that_exceed_the_caches() -> None:
    """Small weights have a copy for each layer, so that a run does not find them in a cache."""
    weights = RandomWeights(share_of({**CONFIG, "num_hidden_layers": 3}, dtype="float32"), CPU)
    assert len({copy.data_ptr() for copy in weights.copies(64, 32)}) == 3
