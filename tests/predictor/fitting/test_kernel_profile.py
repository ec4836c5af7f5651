"""Profiles from the times of kernels, which follow a known formula or were published."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.fitting.gpus import GPUS
from predictor.fitting.kernel_plan import NUM_MIXES, AttentionBatch, Reach, chunks, decodes, mixes, token_counts
from predictor.fitting.kernel_profile import Timings, UntimedCosts, composed, fit_kernels, times_a_step, with_untimed
from predictor.fitting.kv_memory import MEMORY_UTILIZATION
from predictor.fitting.model_shard import Share, share_of
from predictor.fitting.regression import COLUMNS, Steps, predict
from predictor.step_time import StepTime
from simulator.measured_runs import MEASURED_RUNS
from simulator.reference_data import data_folder
from simulator.replay import replay
from tests.predictor.fitting.test_model_shard import LLAMA_8B

SHARE = share_of(LLAMA_8B)
REACH = Reach(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192, kv_tokens=200_000)
LAYERS = 32
DENSE_S = 3e-6  # of each kernel, besides the time of its tokens
TOKEN_S = 4e-8
HEAD_S, SEQUENCE_S = 2e-4, 1e-6
DECODE_S, CONTEXT_S, PAIR_S = 5e-6, 4e-10, 1e-12


def attention_s(batch: AttentionBatch) -> float:
    """A formula like that of GPUs: a launch, bytes read by decodes, and products of chunks."""
    pairs = batch.chunk * (batch.before + batch.chunk / 2)
    return DECODE_S + CONTEXT_S * batch.num_decodes * batch.context + PAIR_S * 100 * pairs


def by_law(reach: Reach = REACH) -> Timings:
    """Return all planned timings, by the formula."""
    together, alone = decodes(reach), chunks(reach)
    mixed = mixes(alone, together, reach, np.random.default_rng(0))
    return Timings(
        dense={name: {t: DENSE_S + TOKEN_S * t for t in token_counts(reach)} for name in times_a_step(SHARE)},
        head={n: HEAD_S + SEQUENCE_S * n for n in (1, 2, 4, 8, 16, 32, 64)},
        attention={batch: attention_s(batch) for batch in [*together, *alone, *mixed]},
    )


def test_a_step_is_its_layers_and_its_head() -> None:
    """Each kernel counts as often as it runs, attention once per layer, the head by sampling sequences."""
    batch = AttentionBatch(chunk=128, before=1024, num_decodes=8, context=256)
    timings = replace(by_law(), attention={batch: attention_s(batch)})
    step = composed(timings, SHARE)
    dense = (DENSE_S + TOKEN_S * 136) * (2 * LAYERS + 1 + 7 * LAYERS + 1)
    assert step.seconds[0] == pytest.approx(dense + LAYERS * attention_s(batch) + HEAD_S + SEQUENCE_S * 9)
    assert (step.num_tokens[0], step.num_sampled[0], step.decode_context[0]) == (136, 9, 8 * 256)
    assert (step.prefill_qq[0], step.prefill_qkv[0]) == (128**2, 128 * 1024)


def test_batches_beyond_the_other_timings_are_left_out() -> None:
    """Where the budget ended before the largest counts, no step is extrapolated."""
    timings = by_law()
    short = replace(timings, dense={name: {1: 1e-5, 64: 2e-5} for name in times_a_step(SHARE)}, head={1: 1e-4, 8: 1e-4})
    steps = composed(short, SHARE)
    assert steps.num_tokens.max() <= 64
    assert steps.num_sampled.max() <= 8
    assert 0 < len(steps) < len(composed(timings, SHARE))


def test_the_fit_recovers_the_formula() -> None:
    """Steps of untimed sizes are predicted within a few per cent, and the held-out error is as small."""
    step_time, error, valid = fit_kernels(by_law(), SHARE, UntimedCosts())
    assert error.mape < 0.02
    assert (valid.max_tokens, valid.max_sequences) == (2048, 64)
    rows = [(n, n, n, n * c, 0, 0.0, 0.0, c, 0.0) for n in (1, 3, 23, 50) for c in (40, 700, 2500)]
    rows += [(q, 1, 0, 0, 1, q * q, q * f, 0, 0.0) for q in (20, 300, 1500) for f in (0, 500, 5000)]
    unseen = Steps(**dict(zip(COLUMNS, np.array(rows, dtype=float).T, strict=True)))
    asked = [AttentionBatch(num_decodes=int(r[2]), context=int(r[7])) for r in rows[:12]]
    asked += [AttentionBatch(chunk=int(r[0]), before=int(r[6] / r[0])) for r in rows[12:]]
    dense = (DENSE_S + TOKEN_S * unseen.num_tokens) * (9 * LAYERS + 2)
    law = dense + HEAD_S + SEQUENCE_S * unseen.num_sampled + LAYERS * np.array([attention_s(batch) for batch in asked])
    assert np.max(np.abs(predict(step_time, unseen) / law - 1)) < 0.05


def test_untimed_costs_are_added() -> None:
    """CPU time per step; two all-reduces per layer, each with a latency and a ring transfer of every token's state."""
    plain = StepTime(constant_s=1e-3)
    assert with_untimed(plain, SHARE, UntimedCosts(cpu_s=2e-3)).constant_s == pytest.approx(3e-3)
    four = share_of(LLAMA_8B, tensor_parallel=4)
    with_links = with_untimed(plain, four, UntimedCosts(cpu_s=2e-3, all_reduce_s=1e-5, link_bytes_per_s=1e11))
    assert with_links.constant_s == pytest.approx(3e-3 + 2 * LAYERS * 1e-5)
    assert with_links.token_s == pytest.approx(2 * LAYERS * (2 * 3 / 4) * 4096 * 2 / 1e11)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"cpu_s": -1.0}, "cpu_overhead_ms"),
        ({"all_reduce_s": float("nan")}, "all_reduce_us"),
        ({"link_bytes_per_s": 0.0}, "link_gb_per_s"),
    ],
)
def test_impossible_untimed_costs_are_refused(bad: dict[str, float], error: str) -> None:
    """The error names the time or bandwidth."""
    with pytest.raises(ValueError, match=error):
        UntimedCosts(**bad)


def test_too_little_is_refused() -> None:
    """A few batches are not enough for a profile."""
    timings = by_law()
    with pytest.raises(ValueError, match="budget: 3 batches"):
        fit_kernels(replace(timings, attention=dict(list(timings.attention.items())[:3])), SHARE, UntimedCosts())


@pytest.mark.parametrize(
    ("model", "config", "devices"),
    [
        ("meta-llama/Llama-3.1-8B", LLAMA_8B, 1),
        (
            "Qwen/Qwen3-32B",
            {
                **LLAMA_8B, "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "head_dim": 128,
                "num_attention_heads": 64, "intermediate_size": 25600, "vocab_size": 151936,
            },
            2,
        ),
    ],
)  # fmt: skip
def test_kernels_of_a_real_gpu_make_a_close_profile(model: str, config: dict[str, object], devices: int) -> None:
    """From published tables the fit gets as many batches as a plan has, and predicts thousands of others."""
    share = share_of(config, tensor_parallel=devices)
    timings = published(model, share)
    step_time, error, _ = fit_kernels(as_if_timed(timings), share, UntimedCosts())
    every = composed(timings, share)
    off = np.abs(predict(step_time, every) / every.seconds - 1)
    assert error.p50 < 0.02
    assert np.median(off) < 0.03
    assert np.mean(off) < 0.05


def test_a_measured_run_takes_a_little_longer_than_its_kernels() -> None:
    """For a real vLLM's run such a profile lacks only the CPU time."""
    timings = published("meta-llama/Llama-3.1-8B", SHARE)
    step_time, _, _ = fit_kernels(as_if_timed(timings), SHARE, UntimedCosts())
    run = next(run for run in MEASURED_RUNS.values() if run.profile == "llama-3.1-8b-rtxpro6000")
    requests, measured = run.requests(data_folder())
    room = SHARE.kv_tokens(GPUS["RTX-PRO-6000"].memory_bytes, MEMORY_UTILIZATION)
    replayed = replay(run.config(room // 16), step_time, requests)
    off = np.array([outcome.e2e_s for outcome in replayed]) / measured.last_token_s - 1
    assert -0.1 < np.median(off) < 0


def as_if_timed(timings: Timings) -> Timings:
    """Keep the batches that the command times: all of one kind, and a few mixes."""
    mixed = [batch for batch in timings.attention if batch.chunk and batch.num_decodes]
    drawn = np.random.default_rng(0).permutation(len(mixed))[:NUM_MIXES]
    dropped = set(mixed) - {mixed[index] for index in drawn}
    return replace(timings, attention={b: s for b, s in timings.attention.items() if b not in dropped})


def published(model: str, share: Share) -> Timings:
    """Read LLMServingSim's tables as timings, to contexts of 16k and 200k tokens in a batch."""
    try:
        data = data_folder()
    except ValueError as missing:
        pytest.skip(str(missing))
    folder = data / f"profiles/llmservingsim/perf/RTXPRO6000/{model}/bf16/tp{share.tensor_parallel}"
    names = {
        "embedding": "embedding", "norm": "layernorm", "qkv": "qkv_proj", "qk_norm": "qk_norm", "rotary": "rotary_emb",
        "o": "o_proj", "gate_up": "gate_up_proj", "activation": "act_fn", "down": "down_proj",
    }  # fmt: skip
    dense = table(folder / "dense.csv", "tokens")
    heads = table(folder / "per_sequence.csv", "sequences")
    with (folder / "attention.csv").open() as lines:
        attention = {
            AttentionBatch(
                chunk=int(row["prefill_chunk"]),
                before=int(row["kv_prefill"]) if int(row["prefill_chunk"]) else 0,
                num_decodes=int(row["n_decode"]),
                context=int(row["kv_decode"]) if int(row["n_decode"]) else 0,
            ): float(row["time_us"]) * 1e-6
            for row in csv.DictReader(lines)
        }
    return Timings(
        dense={
            # writing keys and values is part of that attention
            name: dense[names[name]] if name in names else dict.fromkeys(dense["o_proj"], 0.0)
            for name in times_a_step(share)
        },
        head={count: heads["lm_head"][count] + heads["sampler"][count] for count in heads["lm_head"]},
        attention={b: s for b, s in attention.items() if b.num_decodes * b.context <= 200_000},
    )


def table(path: Path, count: str) -> dict[str, dict[int, float]]:
    """Read seconds by kernel and count."""
    found: dict[str, dict[int, float]] = {}
    with path.open() as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["layer"], {})[int(row[count])] = float(row["time_us"]) * 1e-6
    return found
