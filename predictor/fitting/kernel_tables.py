"""Makes a step time of LLMServingSim's kernel tables: kernels per layer times layers, plus kernels per step."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from predictor.fitting.attention_grids import attention_grids, with_waiting
from predictor.fitting.expert_table import EXPERTS, MLP_KERNELS, with_expert_layers
from predictor.fitting.gpus import gpu_named
from predictor.fitting.kv_memory import BLOCK_SIZE, num_gpu_blocks
from predictor.fitting.model_shape import ModelShape
from predictor.fitting.regression import (
    Array,
    Steps,
    equal_decodes,
    error_of,
    extend_curve,
    predict,
    thin_curve,
)
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
    EXPERTS: 1,
}
OPTIONAL = {"qk_norm", EXPERTS}
PER_STEP = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")

# The range of serving, where the error is stated and what cannot be interpolated is fitted: the table also has 128
# decodes of 16k tokens, which fit into no GPU's memory.
MAX_BATCH_CONTEXT = 200_000
MAX_DECODE_CONTEXT = 8_192
MAX_PREFILL_CONTEXT = 8_192
# Of unequal decodes, batches with at most this share of long ones: in serving few are several times the mean.
LONG_SHARE = 1 / 16
OTHER_UNIT = 30.0  # times the neighbours; thousandths and thousands of a unit are beyond it
LEAST_READ, MOST_READ = 0.3, 100.0  # of the time in which all weights can be read
TILES = (1, 16, 32, 64, 128, 256)  # of tokens in matrix products
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
    """Interpolate a step time; its error is that of whole steps in regions of the tables that were left out."""
    unsplit = _unsplit(kv_heads_per_gpu, num_sms)
    attention = tables.attention
    step_time = _interpolated(tables, num_layers, unsplit)
    whole = _whole_seconds(tables, attention, num_layers)
    most_tokens = max(counts[-1] for counts, _ in tables.dense.values())
    predicted, actual = [], []
    for left_out, without in _regions(tables):
        test = left_out & _serving(attention, most_tokens)
        if np.any(test):
            made = _interpolated(without, num_layers, unsplit)
            predicted.append(predict(made, attention.where(test)))
            actual.append(whole[test])
    if not predicted:
        raise ValueError("attention.csv: has too few batches to leave some out, so the error is unknown")
    alone = attention.num_prefills == 0
    valid = ValidRange(
        max_tokens=int(most_tokens),
        max_sequences=int(attention.num_decodes.max()),
        max_context_tokens=int(attention.decode_context[alone].max()),
        max_sequence_context=int(attention.decode_longest.max()),
    )
    return step_time, error_of(np.concatenate(predicted), np.concatenate(actual)), valid


def kernel_table_profile(
    folder: Path, *, name: str, model: str, shape: ModelShape, gpu: str, tensor_parallel: int, dtype: str
) -> Profile:
    """Fit a profile to a folder of kernel tables that were measured with one GPU's share of the model."""
    if shape.num_kv_heads % tensor_parallel:
        raise ValueError(f"tensor_parallel: {tensor_parallel} GPUs cannot share {shape.num_kv_heads} KV heads evenly")
    tables = read_kernel_tables(folder)
    tables = replace(tables, dense=with_expert_layers(tables.dense, folder, shape, ranks=tensor_parallel))
    _require_microseconds(tables, shape, gpu, tensor_parallel)
    step_time, error, valid = fit_kernel_tables(
        tables,
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
            f"kernel tables ({'/'.join(folder.parts[-4:])}), interpolated; the error is that of regions left out; "
            "neither CPU time nor communication"
        ),
        engine=SuggestedEngine(
            num_gpu_blocks=num_gpu_blocks(shape, gpu_named(gpu), tensor_parallel=tensor_parallel), block_size=BLOCK_SIZE
        ),
    )


def _require_microseconds(tables: KernelTables, shape: ModelShape, gpu: str, tensor_parallel: int) -> None:
    """Refuse tables with which reading the weights would be impossible, or take far too long."""
    tokens, dense = _dense_seconds(tables, shape.num_layers)
    least_s = shape.touched_bytes(int(tokens[0])) / tensor_parallel / gpu_named(gpu).bandwidth
    if not LEAST_READ <= dense[0] / least_s <= MOST_READ:
        raise ValueError(
            f"dense.csv: time_us: a step of few tokens would take {dense[0] * 1e3:.3g} ms, and the weights alone need"
            f" {least_s * 1e3:.3g} ms on {gpu}: are the times in microseconds, and of one layer?"
        )


def _interpolated(tables: KernelTables, num_layers: int, unsplit: tuple[int, int]) -> StepTime:
    """Return the step time that interpolates the tables."""
    tokens, dense = _dense_seconds(tables, num_layers)
    sequences, sampling = _sum_of(tables.per_sequence, dict.fromkeys(PER_SEQUENCE, 1))
    measured = replace(tables.attention, seconds=tables.attention.seconds * num_layers)
    step_time = attention_grids(
        measured, scale=_whole_seconds(tables, tables.attention, num_layers), serving=_serving(measured, tokens[-1])
    )
    unequal = tables.skewed.where(_serving(tables.skewed, tokens[-1]))
    step_time = with_waiting(
        step_time,
        replace(unequal, seconds=unequal.seconds * num_layers),
        scale=_whole_seconds(tables, unequal, num_layers),
        unsplit=unsplit,
    )
    every = np.arange(tokens[0], tokens[-1] + 1)
    padded = _within_tiles(every, tokens, dense, _tile(tokens, dense))
    return replace(
        step_time,
        by_tokens=extend_curve(thin_curve(every, padded, tolerance=TOLERANCE), factor=TAIL),
        by_sequences=thin_curve(sequences, sampling, tolerance=TOLERANCE),
    )


def _tile(tokens: Array, seconds: Array) -> int:
    """Return the number of tokens to which matrix products are padded.

    It is the one with the least error of interpolation within tiles, at counts that are left out.
    """
    errors = {}
    for tile in TILES:
        errors[tile] = 0.0
        for first in (1, 2):
            gone = np.zeros(len(tokens), np.bool_)
            gone[first:-1:2] = True
            found = _within_tiles(tokens[gone], tokens[~gone], seconds[~gone], tile)
            errors[tile] += float(np.sum(np.abs(found / seconds[gone] - 1)))
    return min(TILES, key=lambda tile: errors[tile])


def _within_tiles(counts: Array, tokens: Array, seconds: Array, tile: int) -> Array:
    """Interpolate between counts of the same number of tiles; between all counts where a tile has none."""
    found = np.interp(counts, tokens, seconds)
    if tile == 1:
        return found
    for number in np.unique(np.ceil(tokens / tile)):
        measured, wanted = (np.ceil(values / tile) == number for values in (tokens, counts))
        found[wanted] = np.interp(counts[wanted], tokens[measured], seconds[measured])
    return found


def _whole_seconds(tables: KernelTables, steps: Steps, num_layers: int) -> Array:
    """Return the seconds of whole steps whose attention in one layer was measured."""
    tokens, dense = _dense_seconds(tables, num_layers)
    sequences, sampling = _sum_of(tables.per_sequence, dict.fromkeys(PER_SEQUENCE, 1))
    rest = _within_tiles(steps.num_tokens, tokens, dense, _tile(tokens, dense))
    rest += np.interp(steps.num_sampled, sequences, sampling)
    return np.asarray(steps.seconds * num_layers + rest)


def _serving(steps: Steps, most_tokens: float) -> NDArray[np.bool_]:
    """Choose the batches that occur in serving, and whose dense kernels were measured."""
    return np.asarray(
        (steps.num_tokens <= most_tokens)
        & (steps.decode_context <= MAX_BATCH_CONTEXT)
        & (steps.decode_longest <= MAX_DECODE_CONTEXT)
        & (steps.prefill_qkv <= MAX_PREFILL_CONTEXT * steps.prefill_tokens)
    )


def _regions(tables: KernelTables) -> Iterator[tuple[NDArray[np.bool_], KernelTables]]:
    """Leave out every second measured count, but not the first and the last, of each kind of count in turn.

    What is left out lies in the middle between its neighbours, so this is the error of interpolation over two steps of
    the tables' grid.
    """
    attention = tables.attention
    before = attention.prefill_qkv / np.maximum(1.0, attention.prefill_tokens)
    for values in (attention.num_decodes, attention.decode_longest, attention.prefill_tokens, before):
        counts = np.unique(values[values > 0])
        for first in (1, 2):
            left_out = np.isin(values, counts[first:-1:2])
            yield left_out, replace(tables, attention=attention.where(~left_out))
    tokens = next(iter(tables.dense.values()))[0]
    for first in (1, 2):
        gone = tokens[first:-1:2]
        dense = {
            name: (counts[~np.isin(counts, gone)], seconds[~np.isin(counts, gone)])
            for name, (counts, seconds) in tables.dense.items()
        }
        yield np.isin(attention.num_tokens, gone), replace(tables, dense=dense)


def _unsplit(kv_heads_per_gpu: int, num_sms: int) -> tuple[int, int]:
    """Return the number of decodes from which contexts are not split, and that whose blocks fill the GPU twice.

    With more decodes than the second, the skew table has an effect of 2 to 4 % of a step, measured runs have none:
    there the longest sequences are the oldest, which come first.
    """
    at_once = BLOCKS_PER_SM * num_sms
    return math.ceil(SPLIT_BELOW * at_once / kv_heads_per_gpu), 2 * at_once // kv_heads_per_gpu


def _dense_seconds(tables: KernelTables, num_layers: int) -> tuple[Array, Array]:
    """Sum the dense kernels of a whole step, by token count."""
    times = {name: count * num_layers for name, count in PER_LAYER.items()} | dict.fromkeys(PER_STEP, 1)
    optional = OPTIONAL | set(MLP_KERNELS) if EXPERTS in tables.dense else OPTIONAL
    missing = sorted(set(times) - set(tables.dense) - optional)
    if missing:
        raise ValueError(f"dense.layer: {missing[0]} is missing")
    unknown = sorted(set(tables.dense) - set(times))
    if unknown:
        raise ValueError(f"dense.layer: {unknown[0]} is unknown, and so is how often it runs in a step")
    return _sum_of(tables.dense, {name: count for name, count in times.items() if name in tables.dense})


def _sum_of(kernels: Mapping[str, tuple[Array, Array]], times: Mapping[str, int]) -> tuple[Array, Array]:
    """Sum kernels that were measured at the same counts."""
    first = next(iter(times))
    for name in times:
        if name not in kernels:
            raise ValueError(f"per_sequence.layer: {name} is missing")
    every = np.unique(np.concatenate([kernels[name][0] for name in times]))
    total = np.zeros(len(every))
    for name, often in times.items():
        counts, seconds = kernels[name]
        if len(counts) != len(every):
            hole = int(np.setdiff1d(every, counts)[0])
            raise ValueError(f"layer: {name} has no row with count {hole}, which other kernels such as {first} have")
        total += often * seconds
    return every, total


def _rows(path: Path, counts: Sequence[str], time: str) -> dict[tuple[int, ...], float]:
    """Read the times of a table by its columns of counts; errors name the line and the column."""
    found: dict[tuple[int, ...], float] = {}
    for line, row in _lines(path, (*counts, time)):
        key = tuple(int(_number(path, line, name, row[name])) for name in counts)
        found[key] = _number(path, line, time, row[time])
        if found[key] == 0:
            raise ValueError(f"{path.name} line {line}: {time}: must be above 0")
    return found


def _lines(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the lines of a table, with their numbers."""
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        for name in needed:
            if name not in (reader.fieldnames or ()):
                raise ValueError(f"{path.name}: {name}: the column is missing")
        try:
            yield from enumerate(reader, start=2)
        except csv.Error as error:
            raise ValueError(f"{path.name} line {reader.line_num + 1}: cannot be read: {error}") from None


def _number(path: Path, line: int, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise ValueError(f"{path.name} line {line}: {name}: must be a number, not {text!r}") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"{path.name} line {line}: {name}: must be finite and at least 0, not {value}")
    return value


def _read_by_layer(path: Path, count_name: str) -> dict[str, tuple[Array, Array]]:
    """Read a table of kernel times by layer and count."""
    rows: dict[str, dict[int, float]] = {}
    for line, row in _lines(path, ("layer", count_name, "time_us")):
        seconds = _number(path, line, "time_us", row["time_us"]) * US
        rows.setdefault(row["layer"], {})[int(_number(path, line, count_name, row[count_name]))] = seconds
    tables = {
        layer: (np.array(sorted(times), dtype=float), np.array([times[count] for count in sorted(times)]))
        for layer, times in rows.items()
    }
    for layer, (counts, values) in tables.items():
        _require_smooth(f"{path.name}: layer {layer}, {count_name}", counts, values)
    return tables


def _read_attention(path: Path) -> Steps:
    """Read attention times; each row is a batch of at most one prefill chunk, and of equal decodes if any."""
    rows = _rows(path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"), "time_us")
    if not rows:
        raise ValueError(f"{path.name}: has no rows")
    alone = [key for key in rows if key[0] == 0]
    contexts = sorted({key[3] for key in alone})
    for number in sorted({key[2] for key in alone}):
        own = [context for context in contexts if (0, 0, number, context) in rows]
        hole = next((mine for mine in contexts if mine < own[-1] and mine not in own), None)
        if hole is not None:
            raise ValueError(
                f"{path.name}: n_decode {number}, kv_decode {hole}: there is no row, but of longer contexts"
            )
        seconds = np.array([rows[0, 0, number, context] for context in own]) * US
        _require_smooth(f"{path.name}: n_decode {number}, kv_decode", np.array(own, dtype=float), seconds)
    chunk, before, decodes, context = np.array(sorted(rows), dtype=float).T
    seconds = np.array([rows[key] for key in sorted(rows)]) * US
    return equal_decodes(chunk, before, decodes, context, seconds)


def _require_smooth(cell: str, counts: Array, seconds: Array) -> None:
    """Refuse a time that is many times those of the counts beside it: its unit is wrong."""
    for here in range(1, len(counts) - 1):
        near = seconds[[here - 1, here + 1]]
        if seconds[here] > OTHER_UNIT * near.max() or seconds[here] < near.min() / OTHER_UNIT:
            raise ValueError(
                f"{cell} {int(counts[here])}: {seconds[here] / US:g} us, but {near[0] / US:g} and {near[1] / US:g}"
                " beside it; is it in another unit?"
            )


def _read_skewed_attention(path: Path) -> Steps:
    """Read attention times of batches with unequal decodes, as in serving: few long ones (`nb`) among short ones."""
    rows = [[_number(path, line, name, row[name]) for name in SKEW_COLUMNS] for line, row in _lines(path, SKEW_COLUMNS)]
    column = dict(zip(SKEW_COLUMNS, np.array(rows).reshape(-1, len(SKEW_COLUMNS)).T, strict=True))
    few = column["nb"] <= np.maximum(1, LONG_SHARE * column["n"])
    column = {name: values[few] for name, values in column.items()}
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
