"""Fits a step time to LLMServingSim's kernel tables: kernels per layer times layers, plus kernels per step."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from predictor.fitting.regression import (
    Array,
    Steps,
    StepShape,
    equal_decodes,
    error_of,
    extend_curve,
    fit,
    held_out,
    joined,
    predict,
    thin_curve,
)
from predictor.fitting.roofline import BLOCK_SIZE, ModelShape, gpu_named, num_gpu_blocks
from predictor.profile import FITTED, HeldOutError, Profile, SuggestedEngine, ValidRange
from predictor.step_time import StepTime

US = 1e-6

# How often each dense kernel runs: in every layer (the two norms are one kernel, measured once), or once per step.
PER_LAYER = {
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "layernorm": 2,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
OPTIONAL = {"qk_norm"}
PER_STEP = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")

# The range of serving: the table also has 128 decodes of 16k tokens, which fit into no GPU's memory.
MAX_BATCH_CONTEXT = 200_000
MAX_DECODE_CONTEXT = 6_000
MAX_PREFILL_CONTEXT = 6_000
SKEW_COLUMNS = ("pc", "kp", "n", "nb", "kvs", "kv_big", "t_skew_us")
# The skew table sums its three iterations: its `t_max_us` is thrice what the attention table has for the same batch.
SKEW_ITERATIONS = 3
TOLERANCE = 0.004
TAIL = 8.0

# FlashAttention splits the decodes' contexts while its blocks, one per sequence and KV head, fill less than this share
# of what the GPU runs at once, two a multiprocessor (its `num_splits_heuristic`).
SPLIT_BELOW = 0.8
BLOCKS_PER_SM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTables:
    """One model's kernel times on one GPU: dense kernels by tokens, sampling by sequences, attention by batch."""

    dense: Mapping[str, tuple[Array, Array]]
    per_sequence: Mapping[str, tuple[Array, Array]]
    attention: Steps
    skewed: Steps


def read_kernel_tables(folder: Path) -> KernelTables:
    """Read `dense.csv`, `per_sequence.csv` and `attention.csv`."""
    return KernelTables(
        dense=_read_by_layer(folder / "dense.csv", "tokens"),
        per_sequence=_read_by_layer(folder / "per_sequence.csv", "sequences"),
        attention=_read_attention(folder / "attention.csv"),
        skewed=_read_skewed_attention(folder / "skew.csv"),
    )


def fit_kernel_tables(
    tables: KernelTables, *, num_layers: int, kv_heads_per_gpu: int, num_sms: int
) -> tuple[StepTime, HeldOutError, ValidRange]:
    """Fit a step time; its error is that of whole steps composed from attention rows held out of the fit."""
    one_wave, two_waves = _straggling(kv_heads_per_gpu, num_sms)
    attention = _visited(tables, one_wave, two_waves)
    unseen = held_out(len(attention))
    tokens, dense = _dense_seconds(tables, num_layers)
    sequences, sampling = _sum_of(tables.per_sequence, dict.fromkeys(PER_SEQUENCE, 1))
    rest = np.interp(attention.num_tokens, tokens, dense) + np.interp(attention.num_sampled, sequences, sampling)
    layered = replace(attention, seconds=attention.seconds * num_layers)
    whole = replace(layered, seconds=layered.seconds + rest)

    seen_tokens = ~held_out(len(tokens)) | np.isin(tokens, (tokens[0], tokens[-1]))
    by_attention = fit(layered.where(~unseen), _attention_shape(one_wave, two_waves), scale=whole.seconds[~unseen])
    step_time = replace(
        by_attention,
        by_tokens=extend_curve(thin_curve(tokens[seen_tokens], dense[seen_tokens], tolerance=TOLERANCE), factor=TAIL),
        by_sequences=thin_curve(sequences, sampling, tolerance=TOLERANCE),
    )
    test = whole.where(unseen)
    valid = ValidRange(
        max_tokens=int(tokens[-1]),
        max_sequences=int(attention.num_decodes.max()),
        max_context_tokens=MAX_BATCH_CONTEXT,
    )
    return step_time, error_of(predict(step_time, test), test.seconds), valid


def kernel_table_profile(
    folder: Path, *, name: str, model: str, shape: ModelShape, gpu: str, tensor_parallel: int, dtype: str
) -> Profile:
    """Fit a profile to a folder of kernel tables that were measured with one GPU's share of the model."""
    if shape.num_kv_heads % tensor_parallel:
        raise ValueError(f"tensor_parallel: {tensor_parallel} GPUs cannot share {shape.num_kv_heads} KV heads evenly")
    step_time, error, valid = fit_kernel_tables(
        read_kernel_tables(folder),
        num_layers=shape.num_layers,
        kv_heads_per_gpu=shape.num_kv_heads // tensor_parallel,
        num_sms=gpu_named(gpu).num_sms,
    )
    return Profile(
        name=name,
        model=model,
        gpu=gpu,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        kind=FITTED,
        step_time=step_time,
        valid=valid,
        error=error,
        source=(
            f"kernel tables ({'/'.join(folder.parts[-4:])}), batches of up to {MAX_BATCH_CONTEXT:,} tokens of context; "
            "neither CPU time nor communication"
        ),
        engine=SuggestedEngine(
            num_gpu_blocks=num_gpu_blocks(shape, gpu_named(gpu), tensor_parallel=tensor_parallel), block_size=BLOCK_SIZE
        ),
    )


def _straggling(kv_heads_per_gpu: int, num_sms: int) -> tuple[int, int]:
    """Return the number of decodes from which contexts are not split, and that whose blocks fill the GPU twice."""
    at_once = BLOCKS_PER_SM * num_sms
    return math.ceil(SPLIT_BELOW * at_once / kv_heads_per_gpu), 2 * at_once // kv_heads_per_gpu


def _attention_shape(one_wave: int, two_waves: int) -> StepShape:
    """Return the shape of the cost of attention.

    Decodes alone wait for their longest sequence where no sequence is split and all run at once; the more of them run,
    the smaller is this effect. Beside prefill chunks no sequence is split, and decodes always wait.
    """
    return StepShape(
        numbers=("prefill_s", "prefill_token_s", "prefill_qq_s", "prefill_qkv_s", "prefill_kv_s", "mixed_grid_s"),
        decode_base=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        decode_slope=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        decode_longest=(one_wave - 1, one_wave, two_waves),
        mixed_base=(1, 2, 4, 8, 16, 32, 64, 128),
        mixed_slope=(1, 2, 4, 8, 16, 32, 64, 128),
        mixed_longest=(64, 128),
        zeros={"decode_longest": (one_wave - 1, two_waves)},
    )


def _visited(tables: KernelTables, one_wave: int, two_waves: int) -> Steps:
    """Choose the batches that occur in serving.

    Batches of unequal decodes alone are used only where the shape has a coefficient for their waiting. Elsewhere the
    table has an effect of 2 to 10 % with one long sequence in sixteen; measured runs, with one in a hundred, have none.
    """
    skewed = tables.skewed
    explained = (skewed.num_decodes >= one_wave) & (skewed.num_decodes < two_waves)
    steps = joined(tables.attention, skewed.where((skewed.num_prefills > 0) | explained))
    return steps.where(
        (steps.decode_context <= MAX_BATCH_CONTEXT)
        & (steps.decode_longest <= MAX_DECODE_CONTEXT)
        & (steps.prefill_qkv <= MAX_PREFILL_CONTEXT * steps.prefill_tokens)
    )


def _dense_seconds(tables: KernelTables, num_layers: int) -> tuple[Array, Array]:
    """Sum the dense kernels of a whole step, by token count."""
    times = {name: count * num_layers for name, count in PER_LAYER.items()} | dict.fromkeys(PER_STEP, 1)
    missing = sorted(set(times) - set(tables.dense) - OPTIONAL)
    if missing:
        raise ValueError(f"dense.layer: {missing[0]} is missing")
    unknown = sorted(set(tables.dense) - set(times))
    if unknown:
        raise ValueError(f"dense.layer: {unknown[0]} is unknown, and so is how often it runs in a step")
    return _sum_of(tables.dense, {name: count for name, count in times.items() if name in tables.dense})


def _sum_of(kernels: Mapping[str, tuple[Array, Array]], times: Mapping[str, int]) -> tuple[Array, Array]:
    """Sum kernels that were measured at the same counts."""
    first = next(iter(times))
    counts = kernels[first][0]
    total = np.zeros(len(counts))
    for name, count in times.items():
        if name not in kernels:
            raise ValueError(f"per_sequence.layer: {name} is missing")
        if not np.array_equal(kernels[name][0], counts):
            raise ValueError(f"layer: {name} was measured at other counts than {first}")
        total += count * kernels[name][1]
    return counts, total


def _read_by_layer(path: Path, count_name: str) -> dict[str, tuple[Array, Array]]:
    """Read a table of kernel times by layer and count."""
    rows: dict[str, dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            rows.setdefault(row["layer"], {})[int(row[count_name])] = float(row["time_us"]) * US
    return {
        layer: (np.array(sorted(times), dtype=float), np.array([times[count] for count in sorted(times)]))
        for layer, times in rows.items()
    }


def _read_attention(path: Path) -> Steps:
    """Read attention times; each row is a batch of at most one prefill chunk, and of equal decodes if any."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = {
            (int(r["prefill_chunk"]), int(r["kv_prefill"]), int(r["n_decode"]), int(r["kv_decode"])): float(
                r["time_us"]
            )
            for r in csv.DictReader(lines)
        }
    chunk, before, decodes, context = np.array(sorted(rows), dtype=float).T
    seconds = np.array([rows[key] for key in sorted(rows)]) * US
    return equal_decodes(chunk, before, decodes, context, seconds)


def _read_skewed_attention(path: Path) -> Steps:
    """Read attention times of batches with unequal decodes, as in serving: `nb` long ones among short ones."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    column = {name: np.array([float(row[name]) for row in rows]) for name in SKEW_COLUMNS}
    chunk, decodes, long_decodes = column["pc"], column["n"], column["nb"]
    prefills = (chunk > 0).astype(float)
    return Steps(
        num_tokens=chunk + decodes,
        num_sampled=prefills + decodes,
        num_decodes=decodes,
        decode_context=long_decodes * column["kv_big"] + (decodes - long_decodes) * column["kvs"],
        num_prefills=prefills,
        prefill_qq=chunk**2,
        prefill_qkv=chunk * column["kp"],
        decode_longest=column["kv_big"],
        seconds=column["t_skew_us"] / SKEW_ITERATIONS * US,
    )
