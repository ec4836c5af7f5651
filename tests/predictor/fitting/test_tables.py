"""Public tables are read as published, without impossible rows, and fitted within the documented errors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.fitting.gpus import GPUS
from predictor.fitting.iteration_table import (
    fit_iteration_table,
    fit_prefill_attention,
    is_possible,
    read_iteration_table,
    with_attention,
)
from predictor.fitting.kernel_tables import fit_kernel_tables, kernel_table_profile, read_kernel_tables
from predictor.fitting.model_shape import ModelShape
from predictor.fitting.vidur_tables import (
    PER_LAYER,
    PER_STEP,
    error_of_layers,
    fit_attention,
    fit_vidur_tables,
    read_attention_table,
    read_layer_table,
    scaled_attention,
)
from predictor.step_time import StepTime
from predictor.tabulated_costs import step_seconds, tabulate

DATA = Path(os.environ.get("BLOCK_DATA", Path(__file__).parents[4] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="BLOCK_DATA names no data")

TINY = ModelShape(
    num_layers=2,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=32000,
)
QWEN2_7B = replace(
    TINY, num_layers=28, hidden_size=3584, num_heads=28, num_kv_heads=4, intermediate_size=18944, vocab_size=152064
)
LLAMA_2_7B = replace(TINY, num_layers=32, num_kv_heads=32)
A30 = GPUS["A30"]


def write_layers(path: Path, cells: dict[tuple[int, str], str]) -> Path:
    """Write a table in which every kernel takes 1 ms and 0.01 ms per token, except for the given cells."""
    names = (*PER_LAYER, PER_STEP)
    lines = ["num_tokens,num_tensor_parallel_workers," + ",".join(f"time_stats.{name}.median" for name in names)]
    for tokens in (1, 64, 128, 256, 512):
        values = [cells.get((tokens, name), str(1 + 0.01 * tokens)) for name in names]
        lines += [f"{tokens},1," + ",".join(values), f"{tokens},2," + ",".join("0.5" for _ in names)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_bad_rows_are_interpolated_and_counted(tmp_path: Path) -> None:
    """Cells that are blank or faster than the GPU can be are interpolated."""
    bad = {(128, "attn_pre_proj"): "0.0017", (256, "attn_post_proj"): "", (256, "mlp_act"): "0.001"}
    layer = read_layer_table(write_layers(tmp_path / "mlp.csv", bad), model=TINY, gpu=A30)
    assert layer.tokens.tolist() == [1, 64, 128, 256, 512]
    assert layer.num_impossible["attn_pre_proj"] == 1
    assert layer.num_blank["attn_post_proj"] == 1
    assert layer.filtered() == "attn_pre_proj 1 too fast, attn_post_proj 1 blank"
    assert layer.seconds["attn_pre_proj"][2] == pytest.approx(2.28e-3)
    assert layer.seconds["attn_post_proj"][3] == pytest.approx(3.56e-3)
    assert layer.seconds["mlp_act"][3] == pytest.approx(1e-6)


def test_a_step_has_all_its_layers(tmp_path: Path) -> None:
    """The step time of a table is layers times kernels, residuals added twice, with one embedding."""
    layer = read_layer_table(write_layers(tmp_path / "mlp.csv", {}), model=TINY, gpu=A30)
    step_time = fit_vidur_tables(layer, StepTime(), model=TINY, gpu=A30)
    assert step_time.by_tokens.table(64)[64] == pytest.approx((2 * 10 + 1) * 1.64e-3, rel=0.03)
    assert step_time.by_sequences.y[0] == pytest.approx(32000 * 4096 * 2 / 933e9 / 0.8, rel=1e-3)


@needs_data
def test_block_tables_bad_rows() -> None:
    """The impossible rows of Block's A30 tables are found, and the others give an increasing step time."""
    folder = DATA / "profiles/block/compute/a30"
    llama = read_layer_table(folder / "meta-llama/Llama-2-7b-hf/mlp.csv", model=LLAMA_2_7B, gpu=A30)
    qwen = read_layer_table(folder / "Qwen/Qwen-2-7B/mlp.csv", model=QWEN2_7B, gpu=A30)
    assert llama.num_impossible["attn_pre_proj"] == 40
    assert llama.num_blank["attn_post_proj"] == 37
    assert qwen.num_impossible["attn_pre_proj"] == 76
    for layer in (llama, qwen):
        for seconds in layer.seconds.values():
            assert np.all(seconds > 0)
    assert error_of_layers(llama, model=LLAMA_2_7B).mape < 0.03


@needs_data
def test_block_attention_and_its_scaling() -> None:
    """Qwen2-7B's attention fits; scaled to eight times the KV heads, the cost of a token follows its bytes."""
    folder = DATA / "profiles/block/compute/a30/Qwen/Qwen-2-7B"
    layer = read_layer_table(folder / "mlp.csv", model=QWEN2_7B, gpu=A30)
    attention, error, _ = fit_attention(read_attention_table(folder / "attention.csv"), layer, model=QWEN2_7B, gpu=A30)
    assert error.mape < 0.02
    scaled = scaled_attention(attention, measured=QWEN2_7B, wanted=LLAMA_2_7B)
    bandwidth = LLAMA_2_7B.kv_bytes_per_token / scaled.decode_slope.table(48)[48]
    assert 0.6 * A30.bandwidth < bandwidth < A30.bandwidth
    assert scaled.prefill_qq_s == pytest.approx(attention.prefill_qq_s * (32 * 4096) / (28 * 3584), rel=1e-3)


@needs_data
@pytest.mark.parametrize("gpu", ["a100_sxm", "h100_sxm", "h200_sxm"])
def test_iteration_table(gpu: str) -> None:
    """Held-out steps of Llama-3.1-8B are predicted within 2 %."""
    steps = read_iteration_table(DATA / "derived/iter_ms_llama31_8b_bf16_tp1.csv", gpu)
    _, error, valid = fit_iteration_table(steps, StepTime(prefill_qq_s=3e-10, prefill_qkv_s=6e-10))
    assert error.mape < 0.02
    assert valid.max_sequences == 512


@needs_data
def test_unknown_gpu_of_the_iteration_table() -> None:
    """The error names a GPU without rows."""
    with pytest.raises(ValueError, match=r"^gpu: no row is for 'tpu'"):
        read_iteration_table(DATA / "derived/iter_ms_llama31_8b_bf16_tp1.csv", "tpu")


def test_prefill_attention_is_causal() -> None:
    """The context before a chunk costs twice as much per token as the chunk itself."""
    chunk = np.array([128.0, 512.0, 1024.0, 2048.0, 4096.0])
    fitted = fit_prefill_attention(chunk, 1e-4 + 1e-7 * chunk + 4e-10 * chunk**2)
    assert fitted.prefill_qq_s == pytest.approx(4e-10, rel=0.01)
    assert fitted.prefill_qkv_s == pytest.approx(8e-10, rel=0.01)


def test_attention_beyond_the_peak_is_detected() -> None:
    """Times that need more operations per second than the GPU has are impossible."""
    model = replace(TINY, num_layers=32)
    chunk = np.array([8192.0])
    operations = 2 * 32 * 128 * 32 * chunk**2
    assert is_possible(chunk, operations / 700e12, model=model, gpu=GPUS["H100"])
    assert not is_possible(chunk, operations / 2000e12, model=model, gpu=GPUS["H100"])


@needs_data
def test_attention_can_be_replaced() -> None:
    """Rows without a chunk are unchanged, others change by the difference."""
    steps = read_iteration_table(DATA / "derived/iter_ms_llama31_8b_bf16_tp1.csv", "h200_sxm")
    changed = with_attention(steps, counted=StepTime(prefill_qq_s=1e-10), actual=StepTime(prefill_qq_s=3e-10))
    assert changed.seconds - steps.seconds == pytest.approx(2e-10 * steps.prefill_qq, abs=1e-12)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "num_layers", "kv_heads"),
    [("meta-llama/Llama-3.1-8B/bf16/tp1", 32, 8), ("Qwen/Qwen3-32B/bf16/tp2", 64, 4)],
)
def test_kernel_tables(folder: str, num_layers: int, kv_heads: int) -> None:
    """Whole steps of regions that are left out are predicted within 2 %, nine in ten within 4 %."""
    tables = read_kernel_tables(DATA / "profiles/llmservingsim/perf/RTXPRO6000" / folder)
    step_time, error, valid = fit_kernel_tables(tables, num_layers=num_layers, kv_heads_per_gpu=kv_heads, num_sms=188)
    assert error.mape < 0.015
    assert error.p90 < 0.04
    assert error.n > 10_000
    assert (valid.max_tokens, valid.max_sequences, valid.max_sequence_context) == (2048, 256, 16384)
    one_wave = next(
        x for x, y in zip(step_time.decode_wait.x[4:], step_time.decode_wait.y[4:], strict=True) if y > 0.05
    )
    assert one_wave * kv_heads == pytest.approx(0.8 * 2 * 188, abs=kv_heads)
    assert step_time.decode_wait.y[-1] == 0.0
    # matrix products need another tile of 128 tokens here
    seconds = step_time.by_tokens.table(512)
    assert seconds[385] - seconds[384] > 10 * (seconds[384] - seconds[350])


TABLES = {
    "dense.csv": ["layer,tokens,time_us"]
    + [
        f"{layer},{tokens},{often * (5 + tokens)}"
        for layer, often in (
            ("qkv_proj", 6), ("rotary_emb", 1), ("o_proj", 4), ("layernorm", 1), ("gate_up_proj", 28), ("act_fn", 1),
            ("down_proj", 14), ("embedding", 1), ("final_layernorm", 1),
        )
        for tokens in (1, 8, 64, 128, 256)
    ],
    "per_sequence.csv": ["layer,sequences,time_us"]
    + [f"{layer},{count},{700 + count}" for layer in ("lm_head", "sampler") for count in (1, 8, 16)],
    "attention.csv": ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    + [f"0,0,{n},{context},{8 + n * context / 500}" for n in (1, 4, 16) for context in (64, 256, 1024)]
    + [f"{chunk},{before},0,0,{7 + chunk * (before + chunk / 2) / 9000}" for chunk in (16, 64, 128, 240) for before in (0, 512)]
    + [
        f"{chunk},0,{n},{context},{7 + chunk**2 / 18000 + n * context / 300}"
        for chunk in (16, 64, 128, 240) for n in (1, 4, 16) for context in (64, 256, 1024)
    ],
    "skew.csv": ["pc,kp,n,nb,kvs,kv_big,t_skew_us"]
    + [f"0,0,16,1,{context},{4 * context},{3 * (8 + 16 * 1.4 * context / 500)}" for context in (64, 128, 256)],
}  # fmt: skip


def write_tables(folder: Path, changed: str = "", old: str = "", new: str | None = None) -> Path:
    """Write kernel tables of which one has a line replaced, or left out."""
    for name, lines in TABLES.items():
        assert changed != name or old in lines
        kept = [new if name == changed and line == old else line for line in lines]
        (folder / name).write_text("\n".join(line for line in kept if line is not None) + "\n", encoding="utf-8")
    return folder


def test_tables_of_a_law(tmp_path: Path) -> None:
    """What is linear in all counts is interpolated without error, and batches of several chunks follow."""
    tables = read_kernel_tables(write_tables(tmp_path))
    step_time, error, valid = fit_kernel_tables(tables, num_layers=2, kv_heads_per_gpu=8, num_sms=100)
    assert error.p50 < 0.01
    assert valid.max_sequence_context == 1024
    costs = tabulate(step_time, 256, 16)
    dense = costs.by_tokens[10] + costs.by_count[10, 0]
    found = step_seconds(costs, 10, 10, 10, 10.0 * 500, 0, 0.0, 0.0) - dense
    assert found == pytest.approx(2e-6 * (8 + 10 * 500 / 500), rel=1e-3)
    found = (
        step_seconds(costs, 128, 2, 0, 0.0, 2, 2 * 64.0**2, 64.0 * 200) - costs.by_tokens[128] - costs.by_count[2, 0]
    )
    pairs = 2 * 64**2 / 2 + 64 * 200
    assert found == pytest.approx(2e-6 * (7 + pairs / 9000), rel=0.02)


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        ("dense.csv", "act_fn,64,69", None, r"^layer: act_fn has no row with count 64"),
        ("dense.csv", "act_fn,64,69", "act_fn,64,69000", r"^dense.csv: layer act_fn, tokens 64: 69000 us, but 13 and 133"),
        ("dense.csv", "act_fn,64,69", "act_fn,64,-69", r"^dense.csv line \d+: time_us: must be finite and at least 0"),
        ("dense.csv", "act_fn,64,69", "x" * 200_000, r"^dense.csv line \d+: cannot be read: field larger"),
        ("dense.csv", "layer,tokens,time_us", "layer,tokens,ms", "^dense.csv: time_us: the column is missing"),
        (
            "attention.csv", "0,0,4,256,10.048", None,
            "^attention.csv: n_decode 4, kv_decode 256: there is no row, but of longer contexts",
        ),
        (
            "attention.csv", "0,0,4,256,10.048", "0,0,4,256,0.010048",
            "^attention.csv: n_decode 4, kv_decode 256: 0.010048 us, but .* is it in another unit",
        ),
        ("attention.csv", "0,0,4,256,10.048", "0,0,4,256,", r"^attention.csv line \d+: time_us: must be a number, not ''"),
        ("attention.csv", "0,0,4,256,10.048", "0,0,4,256,0", r"^attention.csv line \d+: time_us: must be above 0"),
    ],
)  # fmt: skip
def test_bad_kernel_tables(tmp_path: Path, table: str, old: str, new: str | None, message: str) -> None:
    """One line names the cell that is missing, negative, or in another unit."""
    folder = write_tables(tmp_path, table, old, new)
    with pytest.raises(ValueError, match=message):
        fit_kernel_tables(read_kernel_tables(folder), num_layers=2, kv_heads_per_gpu=8, num_sms=100)


def test_tables_in_milliseconds(tmp_path: Path) -> None:
    """Times with which a step would be faster than its weights can be read are in another unit."""
    folder = write_tables(tmp_path)
    rows = [line.rsplit(",", 1) for line in TABLES["dense.csv"][1:]]
    lines = [TABLES["dense.csv"][0], *(f"{cell},{float(time) / 1000}" for cell, time in rows)]
    (folder / "dense.csv").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^dense.csv: time_us: a step of few tokens would take"):
        kernel_table_profile(
            folder, name="n", model="m", shape=replace(TINY, num_layers=32), gpu="A30",
            tensor_parallel=1, dtype="bfloat16",
        )  # fmt: skip


def test_kv_heads_must_be_shared_evenly() -> None:
    """Three GPUs cannot share eight KV heads."""
    with pytest.raises(ValueError, match=r"^tensor_parallel: 3 GPUs cannot share 8 KV heads"):
        kernel_table_profile(Path(), name="n", model="m", shape=TINY, gpu="H100", tensor_parallel=3, dtype="bfloat16")


@needs_data
def test_skew_table_sums_its_iterations() -> None:
    """A uniform batch of the skew table, divided by its three iterations, nearly equals the attention table."""
    folder = DATA / "profiles/llmservingsim/perf/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1"
    tables = read_kernel_tables(folder)
    at_64 = tables.attention.where(
        (tables.attention.num_decodes == 64)
        & (tables.attention.decode_longest == 2048)
        & (tables.attention.num_prefills == 0)
    )
    skewed = tables.skewed.where(
        (tables.skewed.num_decodes == 64)
        & (tables.skewed.num_prefills == 0)
        & (np.abs(tables.skewed.decode_context - 64 * 2048) < 64 * 300)
    )
    assert np.median(skewed.seconds / skewed.decode_context) == pytest.approx(
        float(at_64.seconds[0] / at_64.decode_context[0]), rel=0.25
    )
