"""Fits a step time to a table of whole steps, by GPU, decode batch, context and prefill chunk."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from predictor.fitting.gpus import Gpu
from predictor.fitting.model_shape import ModelShape
from predictor.fitting.regression import (
    Array,
    Steps,
    StepShape,
    equal_decodes,
    error_of,
    fit,
    held_out,
    predict,
    rounded,
)
from predictor.profile import HeldOutError, ValidRange
from predictor.step_time import StepTime

MS = 1e-3
# Above this the table's contexts need more memory than any GPU has.
MAX_BATCH_CONTEXT = 1_100_000

PREFILL = StepShape(numbers=("prefill_s", "prefill_token_s", "prefill_qq_s"))
REST = StepShape(
    numbers=(),
    by_tokens=(1, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192),
    decode_base=(1, 16, 64, 128, 256, 512),
    decode_slope=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
)


def read_iteration_table(path: Path, gpu: str) -> Steps:
    """Read the rows of one GPU; a row is a batch of equal decodes, the first prefill chunk of a prompt, or both."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["gpu"] == gpu]
    if not rows:
        raise ValueError(f"gpu: no row is for {gpu!r}")
    decodes, context, chunk, ms = (
        np.array([float(row[name]) for row in rows])
        for name in ("decode_batch", "ctx_per_req", "prefill_chunk", "iter_ms")
    )
    context = np.where(decodes > 0, context, 0.0)
    steps = equal_decodes(chunk, np.zeros(len(rows)), decodes, context, ms * MS)
    return steps.where(steps.decode_context <= MAX_BATCH_CONTEXT)


def fit_prefill_attention(chunk_tokens: Array, seconds: Array) -> StepTime:
    """Fit the attention of the first chunks of prompts, given its seconds in all layers.

    A token attends to half of its own chunk on average, but to all tokens before the chunk: l_q·l_kv costs twice as
    much as l_q².
    """
    ones, zeros = np.ones(len(seconds)), np.zeros(len(seconds))
    steps = Steps(
        num_tokens=chunk_tokens,
        num_sampled=ones,
        num_decodes=zeros,
        decode_context=zeros,
        num_prefills=ones,
        prefill_qq=chunk_tokens**2,
        prefill_qkv=zeros,
        decode_longest=zeros,
        seconds=seconds,
    )
    fitted = fit(steps, PREFILL)
    return replace(fitted, prefill_qkv_s=rounded(2 * fitted.prefill_qq_s))


def is_possible(chunk_tokens: Array, seconds: Array, *, model: ModelShape, gpu: Gpu) -> bool:
    """Return whether causal attention can be this fast on the GPU; times of a windowed kernel cannot be."""
    operations = 2 * model.num_heads * model.head_dim * model.num_layers * chunk_tokens**2
    return bool(np.all(operations / seconds <= gpu.flops))


def with_attention(steps: Steps, *, counted: StepTime, actual: StepTime) -> Steps:
    """Replace the prefill attention that is part of a table's rows."""
    return replace(steps, seconds=steps.seconds - predict(counted, steps) + predict(actual, steps))


def fit_iteration_table(steps: Steps, prefill_attention: StepTime) -> tuple[StepTime, HeldOutError, ValidRange]:
    """Fit a step time to four fifths of the rows; return it with its error on the others.

    The attention of prefill chunks is given: this table does not separate it from other costs that grow with tokens.
    """
    unseen = held_out(len(steps))
    rest = replace(steps, seconds=steps.seconds - predict(prefill_attention, steps))
    fitted = fit(rest.where(~unseen), REST, scale=steps.seconds[~unseen])
    step_time = replace(
        fitted, **{name: getattr(prefill_attention, name) for name in (*PREFILL.numbers, "prefill_qkv_s")}
    )
    test = steps.where(unseen)
    valid = ValidRange(
        max_tokens=int(steps.num_tokens.max()),
        max_sequences=int(steps.num_decodes.max()),
        max_context_tokens=int(steps.decode_context.max()),
    )
    return step_time, error_of(predict(step_time, test), test.seconds), valid
