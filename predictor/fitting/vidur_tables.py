"""Fits a step time to Vidur's kernel tables, and to Block's in their format, without rows that no GPU can reach."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from predictor.fitting.gpus import Gpu
from predictor.fitting.model_shape import ModelShape
from predictor.fitting.regression import (
    Array,
    Steps,
    StepShape,
    error_of,
    extend_curve,
    fit,
    held_out,
    joined,
    predict,
    rounded,
    thin_curve,
)
from predictor.profile import HeldOutError, ValidRange
from predictor.step_time import Curve, StepTime

MS = 1e-3
# How often each kernel runs in a layer: residuals are added twice.
PER_LAYER = {
    "input_layernorm": 1,
    "attn_pre_proj": 1,
    "attn_rope": 1,
    "attn_post_proj": 1,
    "post_attention_layernorm": 1,
    "mlp_up_proj": 1,
    "mlp_act": 1,
    "mlp_down_proj": 1,
    "add": 2,
}
PER_STEP = "emb"
TOLERANCE = 0.03
TAIL = 4.0
# The share of the memory's bandwidth that a matrix product of one token reaches in these tables: it gives the cost of
# the output embedding, which they do not contain.
HEAD_BANDWIDTH_SHARE = 0.8

ATTENTION = StepShape(
    numbers=("prefill_s", "prefill_token_s", "prefill_qq_s", "prefill_qkv_s", "prefill_kv_s"),
    decode_base=(1, 2, 4, 8, 16, 32, 48),
    decode_slope=(1, 2, 4, 8, 16, 32, 48),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """The seconds of one layer's kernels by tokens, and the dropped rows with the reasons."""

    tokens: Array
    seconds: dict[str, Array]
    num_impossible: dict[str, int]
    num_blank: dict[str, int]

    def filtered(self) -> str:
        """A text about the dropped rows."""
        parts = [f"{name} {count} too fast" for name, count in self.num_impossible.items() if count]
        parts += [f"{name} {count} blank" for name, count in self.num_blank.items() if count]
        return ", ".join(parts) or "none"


def read_layer_table(path: Path, *, model: ModelShape, gpu: Gpu) -> LayerTable:
    """Read `mlp.csv` for one GPU; blank values, and those faster than the GPU can be, are interpolated."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["num_tensor_parallel_workers"] == "1"]
    rows.sort(key=lambda row: int(row["num_tokens"]))
    all_tokens = np.array([float(row["num_tokens"]) for row in rows])
    tokens = np.unique(all_tokens)
    seconds, impossible, blank = {}, {}, {}
    for name in (*PER_LAYER, PER_STEP):
        values = np.array([float(row[f"time_stats.{name}.median"] or "nan") for row in rows]) * MS
        missing = np.isnan(values)
        too_fast = ~missing & (values < _floor_s(name, all_tokens, model, gpu))
        good = ~missing & ~too_fast
        seconds[name] = np.interp(tokens, all_tokens[good], values[good])
        impossible[name], blank[name] = int(too_fast.sum()), int(missing.sum())
    return LayerTable(tokens=tokens, seconds=seconds, num_impossible=impossible, num_blank=blank)


def read_attention_table(path: Path) -> Steps:
    """Read `attention.csv`: rows of one prefill chunk or of equal decodes, in one layer, KV writes included."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return joined(_prefill_rows(rows), _decode_rows(rows))


def fit_vidur_tables(layer: LayerTable, attention: StepTime, *, model: ModelShape, gpu: Gpu) -> StepTime:
    """Compose a step time from a layer's kernels and the attention of all layers."""
    return replace(attention, by_tokens=_layers_curve(layer, model), by_sequences=Curve(y=(head_s(model, gpu),)))


def error_of_layers(layer: LayerTable, *, model: ModelShape) -> HeldOutError:
    """Return the error of all kernels except attention, on held-out token counts."""
    unseen = held_out(len(layer.tokens))
    curve = _layers_curve(layer, model)
    predicted = curve.table(int(layer.tokens[-1]))[layer.tokens[unseen].astype(int)]
    return error_of(predicted, _layers_s(layer, model)[unseen])


def fit_attention(
    steps: Steps, layer: LayerTable, *, model: ModelShape, gpu: Gpu
) -> tuple[StepTime, HeldOutError, ValidRange]:
    """Fit attention together with the other kernels; return it with the error of whole steps on held-out rows."""
    rest = np.interp(steps.num_tokens, layer.tokens, _layers_s(layer, model)) + head_s(model, gpu)
    layered = replace(steps, seconds=steps.seconds * model.num_layers)
    whole = replace(layered, seconds=layered.seconds + rest)
    unseen = held_out(len(steps))
    attention = fit(layered.where(~unseen), ATTENTION, scale=whole.seconds[~unseen])
    test = whole.where(unseen)
    predicted = predict(fit_vidur_tables(layer, attention, model=model, gpu=gpu), test)
    valid = ValidRange(
        max_tokens=int(layer.tokens[-1]),
        max_sequences=int(steps.num_decodes.max()),
        max_context_tokens=int(steps.decode_context.max()),
    )
    return attention, error_of(predicted, test.seconds), valid


def scaled_attention(attention: StepTime, *, measured: ModelShape, wanted: ModelShape) -> StepTime:
    """Scale attention to another model on the same GPU.

    Decoding is bound by memory reads: n sequences of a model with k times as many KV heads are as much work as k·n
    sequences of the measured one, so the curves are read there, and a token has as many more bytes. Prefill is bound by
    computation, and scales with the query width.
    """
    layers = wanted.num_layers / measured.num_layers
    heads = wanted.num_kv_heads * wanted.head_dim / (measured.num_kv_heads * measured.head_dim)
    width = wanted.num_heads * wanted.head_dim / (measured.num_heads * measured.head_dim)
    base = _looked_up(attention.decode_base, by=heads, times=layers)
    slope = _looked_up(attention.decode_slope, by=heads, times=layers * heads)
    return replace(
        attention,
        prefill_s=rounded(attention.prefill_s * layers),
        prefill_token_s=rounded(attention.prefill_token_s * layers * width),
        prefill_qq_s=rounded(attention.prefill_qq_s * layers * width),
        prefill_qkv_s=rounded(attention.prefill_qkv_s * layers * width),
        prefill_kv_s=rounded(attention.prefill_kv_s * layers * heads),
        decode_base=base,
        decode_slope=slope,
        mixed_base=base,
        mixed_slope=slope,
    )


def head_s(model: ModelShape, gpu: Gpu) -> float:
    """Estimate the seconds of the output embedding: its weights are read once per step."""
    return rounded(model.head_weights * model.number_bytes / (gpu.bandwidth * HEAD_BANDWIDTH_SHARE))


def _layers_s(layer: LayerTable, model: ModelShape) -> Array:
    """Sum the kernels of all layers, and the embedding, by token count."""
    kernels = [count * layer.seconds[name] for name, count in PER_LAYER.items()]
    total: Array = model.num_layers * np.sum(kernels, axis=0) + layer.seconds[PER_STEP]
    return total


def _layers_curve(layer: LayerTable, model: ModelShape) -> Curve:
    seen = ~held_out(len(layer.tokens)) | np.isin(layer.tokens, (layer.tokens[0], layer.tokens[-1]))
    curve = thin_curve(layer.tokens[seen], _layers_s(layer, model)[seen], tolerance=TOLERANCE)
    return extend_curve(curve, factor=TAIL)


def _looked_up(curve: Curve, *, by: float, times: float) -> Curve:
    """Return a curve read at `by` times the number of sequences, within its measured range."""
    counts = [x for x in curve.x if x * by <= curve.x[-1]] or [curve.x[0]]
    counts.append(max(counts[-1] + 1, curve.x[-1] / by))
    values = np.interp(np.array(counts) * by, curve.x, curve.y)
    # Another knot of the same value prevents an extrapolation of the last two.
    return Curve(
        x=(*(float(x) for x in counts), float(counts[-1] + 1)),
        y=(*(rounded(value * times) for value in values), rounded(values[-1] * times)),
    )


def _floor_s(name: str, tokens: Array, model: ModelShape, gpu: Gpu) -> Array:
    """Return the shortest possible time of a kernel: weights read at full bandwidth, products at peak."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    weights = {
        "attn_pre_proj": model.hidden_size * (queries + 2 * keys),
        "attn_post_proj": model.hidden_size * queries,
        "mlp_up_proj": 2 * model.hidden_size * model.intermediate_size,
        "mlp_down_proj": model.hidden_size * model.intermediate_size,
    }.get(name, 0)
    return np.maximum(weights * model.number_bytes / gpu.bandwidth, 2 * weights * tokens / gpu.flops)


def _prefill_rows(rows: Sequence[dict[str, str]]) -> Steps:
    chosen = [row for row in rows if row["is_prefill"] == "True"]
    chunk, before = _column(chosen, "prefill_chunk_size"), _column(chosen, "kv_cache_size")
    zeros, ones = np.zeros(len(chosen)), np.ones(len(chosen))
    return Steps(
        num_tokens=chunk,
        num_sampled=ones,
        num_decodes=zeros,
        decode_context=zeros,
        num_prefills=ones,
        prefill_qq=chunk**2,
        prefill_qkv=chunk * before,
        decode_longest=zeros,
        seconds=_kernel_s(chosen, "attn_prefill"),
    )


def _decode_rows(rows: Sequence[dict[str, str]]) -> Steps:
    chosen = [row for row in rows if row["is_prefill"] == "False"]
    decodes, context = _column(chosen, "batch_size"), _column(chosen, "kv_cache_size")
    zeros = np.zeros(len(chosen))
    return Steps(
        num_tokens=decodes,
        num_sampled=decodes,
        num_decodes=decodes,
        decode_context=decodes * context,
        num_prefills=zeros,
        prefill_qq=zeros,
        prefill_qkv=zeros,
        decode_longest=context,
        seconds=_kernel_s(chosen, "attn_decode"),
    )


def _kernel_s(rows: Sequence[dict[str, str]], name: str) -> Array:
    return (_column(rows, f"time_stats.{name}.median") + _column(rows, "time_stats.attn_kv_cache_save.median")) * MS


def _column(rows: Sequence[dict[str, str]], name: str) -> Array:
    return np.array([float(row[name]) for row in rows])
