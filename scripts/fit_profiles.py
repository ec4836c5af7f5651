"""Fits the shipped latency profiles from the data in BLOCK_DATA."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from predictor.fitting.calibration import MeasuredLatencies, calibrate
from predictor.fitting.constants import Calibrated
from predictor.fitting.gpus import GPUS
from predictor.fitting.iteration_table import (
    fit_iteration_table,
    fit_prefill_attention,
    is_possible,
    read_iteration_table,
    with_attention,
)
from predictor.fitting.kernel_tables import kernel_table_profile
from predictor.fitting.kv_memory import BLOCK_SIZE, num_gpu_blocks
from predictor.fitting.model_config import model_shape
from predictor.fitting.model_shape import ModelShape
from predictor.fitting.vidur_tables import (
    error_of_layers,
    fit_attention,
    fit_vidur_tables,
    read_attention_table,
    read_layer_table,
    scaled_attention,
)
from predictor.profile import FITTED, KvTransferTime, Profile, SuggestedEngine, profile_to_json
from predictor.step_time import StepTime
from predictor.suggestions import unknown_choice
from simulator.measured_runs import MEASURED_RUNS, latencies_of
from simulator.reference_data import data_folder
from simulator.replay import replay

CALIBRATION_REQUESTS = 100  # of 300
# Block's engines are 25 % slower than their kernels at a full batch of the paper's workload, about 36 ms of kernels.
V0_CPU_S = 9e-3
V0_NOTE = (
    "9 ms a step of CPU time are assumed, not measured: by about a quarter the paper's engines (vLLM 0.7.2) are slower "
    "than their kernels. The output embedding is not in the tables and is its bytes at 80 % of the bandwidth."
)

LLAMA_2_7B = model_shape(
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "torch_dtype": "float16",
    }
)
QWEN2_7B = model_shape(
    {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "torch_dtype": "bfloat16",
    }
)
LLAMA_31_8B = model_shape(
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
)
QWEN3_32B = model_shape(
    {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    }
)


def main() -> int:
    """Write the named profiles, by default all, and print one line about each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="profiles to fit (default: all)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "predictor" / "profiles")
    arguments = parser.parse_args()
    try:
        data = data_folder()
    except ValueError as missing:
        sys.stderr.write(f"{missing}\n")
        return 2
    unknown = sorted(set(arguments.names) - set(PROFILES))
    if unknown:
        sys.stderr.write(f"{unknown_choice('names', unknown[0], PROFILES)}\n")
        return 2
    for name in arguments.names or PROFILES:
        profile = PROFILES[name](data)
        (arguments.output / f"{name}.json").write_text(profile_to_json(profile), encoding="utf-8")
        if profile.error:
            error = profile.error
            sys.stdout.write(f"{name}: mape {error.mape:.2%}, p90 {error.p90:.2%} on {error.n} rows held out\n")
    return 0


def llama_2_7b_a30(data: Path) -> Profile:
    """Block's testbed; attention of Llama-2-7B was not profiled there, so it is derived from Qwen2-7B's."""
    gpu, folder = GPUS["A30"], data / "profiles/block/compute/a30"
    layer = read_layer_table(folder / "meta-llama/Llama-2-7b-hf/mlp.csv", model=LLAMA_2_7B, gpu=gpu)
    other = read_layer_table(folder / "Qwen/Qwen-2-7B/mlp.csv", model=QWEN2_7B, gpu=gpu)
    rows = read_attention_table(folder / "Qwen/Qwen-2-7B/attention.csv")
    attention, _, valid = fit_attention(rows, other, model=QWEN2_7B, gpu=gpu)
    scaled = scaled_attention(attention, measured=QWEN2_7B, wanted=LLAMA_2_7B)
    return Profile(
        name="llama-2-7b-a30",
        model="meta-llama/Llama-2-7b-hf",
        gpu="A30",
        tensor_parallel=1,
        dtype="float16",
        kind=FITTED,
        step_time=replace(fit_vidur_tables(layer, scaled, model=LLAMA_2_7B, gpu=gpu), constant_s=V0_CPU_S),
        valid=valid,
        error=error_of_layers(layer, model=LLAMA_2_7B),
        source=(
            "Block's A30 kernel tables (profiles/block, in Vidur's format). Dropped as blank or faster than the GPU's "
            f"bandwidth and peak allow, and bridged from their neighbours: {layer.filtered()}. No attention of this "
            "model was measured: Qwen2-7B's on the same GPU is scaled, decoding by bytes read with 8 times the KV "
            f"heads, prefill by query width; the error is that of the other kernels. {V0_NOTE}"
        ),
        engine=SuggestedEngine(num_gpu_blocks=1056, block_size=16, max_num_seqs=48, max_num_batched_tokens=512),
        transfer=_copied(LLAMA_2_7B),
    )


def qwen2_7b_a30(data: Path) -> Profile:
    """Block's testbed with its other model."""
    gpu, folder = GPUS["A30"], data / "profiles/block/compute/a30/Qwen/Qwen-2-7B"
    layer = read_layer_table(folder / "mlp.csv", model=QWEN2_7B, gpu=gpu)
    rows = read_attention_table(folder / "attention.csv")
    attention, error, valid = fit_attention(rows, layer, model=QWEN2_7B, gpu=gpu)
    return Profile(
        name="qwen2-7b-a30",
        model="Qwen/Qwen2-7B",
        gpu="A30",
        tensor_parallel=1,
        dtype="bfloat16",
        kind=FITTED,
        step_time=replace(fit_vidur_tables(layer, attention, model=QWEN2_7B, gpu=gpu), constant_s=V0_CPU_S),
        valid=valid,
        error=error,
        source=(
            "Block's A30 kernel tables (profiles/block, in Vidur's format). Dropped as blank or faster than the GPU's "
            f"bandwidth and peak allow, and bridged from their neighbours: {layer.filtered()}. {V0_NOTE} The number of "
            "blocks is the memory that the paper's 1056 blocks of Llama-2-7B and its weights take, less these weights."
        ),
        engine=SuggestedEngine(
            num_gpu_blocks=_blocks_in_place_of(LLAMA_2_7B, 1056, QWEN2_7B),
            block_size=16,
            max_num_seqs=48,
            max_num_batched_tokens=512,
        ),
        transfer=_copied(QWEN2_7B),
    )


def llama_31_8b_sxm(data: Path, *, name: str, gpu: str, system: str, vllm: str) -> Profile:
    """Llama-3.1-8B on a data-centre GPU, from steps composed of measured kernels."""
    steps = read_iteration_table(data / "derived/iter_ms_llama31_8b_bf16_tp1.csv", system)
    counted = _prefill_attention(data, system, vllm)
    actual, note = counted, f"attention of prefill chunks from profiles/aiconfigurator/{system}"
    if not _is_possible(data, system, vllm, gpu):
        # Only a windowed kernel was measured; the H100 has the same multiprocessors at the same clock.
        actual = _prefill_attention(data, "h100_sxm", "0.19.0")
        note = (
            f"attention of prefill chunks from profiles/aiconfigurator/h100_sxm, put in the table's rows too, as that "
            f"of {system} is faster than the GPU's peak (a windowed kernel)"
        )
    step_time, error, valid = fit_iteration_table(with_attention(steps, counted=counted, actual=actual), actual)
    return Profile(
        name=name,
        model="meta-llama/Llama-3.1-8B",
        gpu=gpu,
        tensor_parallel=1,
        dtype="bfloat16",
        kind=FITTED,
        step_time=step_time,
        valid=valid,
        error=error,
        source=f"derived/iter_ms_llama31_8b_bf16_tp1.csv, rows of {system}; {note}. Kernels only, no CPU time.",
        engine=_estimated_engine(LLAMA_31_8B, gpu, 1),
        transfer=_copied(LLAMA_31_8B),
    )


def llama_31_8b_rtxpro6000(data: Path) -> Profile:
    """Llama-3.1-8B on the GPU of the measured runs."""
    return _rtxpro6000(
        data,
        name="llama-3.1-8b-rtxpro6000",
        model="meta-llama/Llama-3.1-8B",
        shape=LLAMA_31_8B,
        tensor_parallel=1,
        constants=("constant_s", "prefill_s"),
        meaning="CPU time a step, and more of it where prefill chunks keep the step from being one CUDA graph",
    )


def qwen3_32b_rtxpro6000_tp2(data: Path) -> Profile:
    """Qwen3-32B on two of the GPUs of the measured runs."""
    return _rtxpro6000(
        data,
        name="qwen3-32b-rtxpro6000-tp2",
        model="Qwen/Qwen3-32B",
        shape=QWEN3_32B,
        tensor_parallel=2,
        constants=("constant_s", "token_s"),
        meaning="CPU time a step, and communication a token",
    )


PROFILES: dict[str, Callable[[Path], Profile]] = {
    "llama-2-7b-a30": llama_2_7b_a30,
    "qwen2-7b-a30": qwen2_7b_a30,
    "llama-3.1-8b-a100": lambda data: llama_31_8b_sxm(
        data, name="llama-3.1-8b-a100", gpu="A100", system="a100_sxm", vllm="0.14.0"
    ),
    "llama-3.1-8b-h100": lambda data: llama_31_8b_sxm(
        data, name="llama-3.1-8b-h100", gpu="H100", system="h100_sxm", vllm="0.19.0"
    ),
    "llama-3.1-8b-h200": lambda data: llama_31_8b_sxm(
        data, name="llama-3.1-8b-h200", gpu="H200", system="h200_sxm", vllm="0.19.0"
    ),
    "llama-3.1-8b-rtxpro6000": llama_31_8b_rtxpro6000,
    "qwen3-32b-rtxpro6000-tp2": qwen3_32b_rtxpro6000_tp2,
}


def _rtxpro6000(
    data: Path,
    *,
    name: str,
    model: str,
    shape: ModelShape,
    tensor_parallel: int,
    constants: tuple[str, ...],
    meaning: str,
) -> Profile:
    """Fit from kernel tables; calibrate the remaining constants with the first measured requests."""
    kernels = kernel_table_profile(
        data / f"profiles/llmservingsim/perf/RTXPRO6000/{model}/bf16/tp{tensor_parallel}",
        name=name,
        model=model,
        shape=shape,
        gpu="RTX-PRO-6000",
        tensor_parallel=tensor_parallel,
        dtype="bfloat16",
    )
    engine = replace(kernels.engine, max_num_seqs=128, max_num_batched_tokens=2048)
    run = next(run for run in MEASURED_RUNS.values() if run.profile == name)
    config = run.config(engine.num_gpu_blocks or 0)
    requests, measured = run.requests(data)

    def replayed(step_time: StepTime) -> MeasuredLatencies:
        return latencies_of(requests, replay(config, step_time, requests), measured.output_tokens)

    # the time outside of steps is that of this run's clients, and no part of the profile
    calibrated = calibrate(
        Calibrated(step_time=kernels.step_time),
        replayed,
        replace(measured, arrival_s=np.array([request.arrival_s for request in requests])),
        compared=np.arange(len(requests)) < CALIBRATION_REQUESTS,
        constants=(*constants, "request_s"),
    )
    step_time = calibrated.result.step_time
    found = ", ".join(
        f"{one.name} {one.change:+.3g} ({one.low:+.3g} to {one.high:+.3g})"
        for one in calibrated.constants
        if one.name in constants and not one.why_not
    )
    return replace(
        kernels,
        step_time=step_time,
        engine=engine,
        transfer=_copied(shape, tensor_parallel),
        source=(
            "LLMServingSim's kernel tables (profiles/llmservingsim, vLLM 0.19.0, without communication), "
            "interpolated; the error is that of regions left out. Calibrated by the first "
            f"{CALIBRATION_REQUESTS} requests of the measured run ({meaning}; with intervals of 90 %): {found}."
        ),
    )


def _prefill_attention(data: Path, system: str, vllm: str) -> StepTime:
    chunk, seconds = _context_attention(data, system, vllm)
    return fit_prefill_attention(chunk, seconds)


def _is_possible(data: Path, system: str, vllm: str, gpu: str) -> bool:
    chunk, seconds = _context_attention(data, system, vllm)
    return is_possible(chunk, seconds, model=LLAMA_31_8B, gpu=GPUS[gpu])


def _context_attention(data: Path, system: str, vllm: str) -> tuple[np.ndarray, np.ndarray]:
    """Read Llama-3.1-8B's prefill attention, all layers, by chunk length; the median of repeated measurements."""
    from pyarrow import parquet

    path = data / f"profiles/aiconfigurator/{system}/attention/vllm/{vllm}/context_attention_perf.parquet"
    wanted = {
        "batch_size": 1,
        "num_heads": LLAMA_31_8B.num_heads,
        "num_key_value_heads": LLAMA_31_8B.num_kv_heads,
        "head_dim": LLAMA_31_8B.head_dim,
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "window_size": 0,
    }
    by_length: dict[int, list[float]] = {}
    for row in parquet.read_table(path).to_pylist():
        if all(row.get(column, value) == value for column, value in wanted.items()) and row["isl"] >= BLOCK_SIZE:
            by_length.setdefault(row["isl"], []).append(row["latency"] * 1e-3 * LLAMA_31_8B.num_layers)
    lengths = sorted(by_length)
    return np.array(lengths, dtype=float), np.array([float(np.median(by_length[length])) for length in lengths])


def _blocks_in_place_of(held: ModelShape, num_blocks: int, wanted: ModelShape) -> int:
    """Return the number of blocks that fit into the memory of another model and its blocks."""
    room = held.weight_bytes + num_blocks * BLOCK_SIZE * held.kv_bytes_per_token - wanted.weight_bytes
    return room // (BLOCK_SIZE * wanted.kv_bytes_per_token)


def _copied(shape: ModelShape, tensor_parallel: int = 1) -> KvTransferTime:
    """Return what one rank copies to another engine; how fast, depends on the machines' network."""
    return KvTransferTime(kv_bytes_per_token=shape.kv_bytes_per_token // tensor_parallel)


def _estimated_engine(
    shape: ModelShape,
    gpu: str,
    tensor_parallel: int,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> SuggestedEngine:
    return SuggestedEngine(
        num_gpu_blocks=num_gpu_blocks(shape, GPUS[gpu], tensor_parallel=tensor_parallel),
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


if __name__ == "__main__":
    sys.exit(main())
