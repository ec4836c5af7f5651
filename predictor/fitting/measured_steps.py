"""Fits a step time to a CSV file of measured engine steps.

A line per step, with these columns:

    num_decodes      sequences that decode one token in the step
    decode_context   sum of their context lengths, the new token included
    num_prefills     prefill chunks in the step
    prefill_tokens   sum of their new tokens l_q
    prefill_qq       sum of l_q²
    prefill_qkv      sum of l_q · l_kv, l_kv being the context before the chunk
    seconds          duration of the step
    num_sampled      sequences that sampled a token; if left out, all of them
    decode_longest   the longest of the decodes' contexts; left out or 0: unknown
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from predictor.fitting.regression import Array, Steps, StepShape, error_of, fit, held_out, predict
from predictor.profile import FITTED, HeldOutError, Profile, ValidRange
from predictor.step_time import StepTime

REQUIRED = ("num_decodes", "decode_context", "num_prefills", "prefill_tokens", "prefill_qq", "prefill_qkv", "seconds")
OPTIONAL = ("num_sampled", "decode_longest")
COUNTS = ("num_decodes", "num_prefills", "prefill_tokens", "num_sampled")
MIN_STEPS = 30
MIN_STEPS_PER_KNOT = 8


def read_measured_steps(path: Path) -> Steps:
    """Read a file of measured steps."""
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        return steps_from_rows(reader, columns=reader.fieldnames or ())


def steps_from_rows(rows: Iterable[Mapping[str, str]], *, columns: Iterable[str]) -> Steps:
    """Check measured steps and return them as columns; errors name the line and the column."""
    columns = list(columns)
    for name in REQUIRED:
        if name not in columns:
            raise ValueError(f"{name}: the column is missing")
    unknown = [name for name in columns if name not in (*REQUIRED, *OPTIONAL)]
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown column")
    numbers = [
        {name: _number(f"line {line}: {name}", name, row[name]) for name in columns}
        for line, row in enumerate(rows, start=2)
    ]
    if len(numbers) < MIN_STEPS:
        raise ValueError(f"seconds: {len(numbers)} steps are too few to fit, {MIN_STEPS} are needed")
    column = {name: np.array([row[name] for row in numbers]) for name in columns}
    decodes, prefills = column["num_decodes"], column["num_prefills"]
    _require_consistent(column)
    return Steps(
        num_tokens=decodes + column["prefill_tokens"],
        num_sampled=column.get("num_sampled", decodes + prefills),
        num_decodes=decodes,
        decode_context=column["decode_context"],
        num_prefills=prefills,
        prefill_qq=column["prefill_qq"],
        prefill_qkv=column["prefill_qkv"],
        decode_longest=column.get("decode_longest", np.zeros(len(numbers))),
        seconds=column["seconds"],
    )


def fit_measured_steps(steps: Steps) -> tuple[StepTime, HeldOutError, ValidRange]:
    """Fit a step time to four fifths of the steps; return it with its error on the others."""
    unseen = held_out(len(steps))
    step_time = fit(steps.where(~unseen), shape_for(steps.where(~unseen)))
    test = steps.where(unseen)
    valid = ValidRange(
        max_tokens=int(steps.num_tokens.max()),
        max_sequences=max(1, int(max(steps.num_decodes.max(), steps.num_sampled.max()))),
        max_context_tokens=max(1, int(steps.decode_context.max())),
    )
    return step_time, error_of(predict(step_time, test), test.seconds), valid


def measured_profile(path: Path, *, name: str, model: str, gpu: str, tensor_parallel: int, dtype: str) -> Profile:
    """Fit a profile to a file of measured steps."""
    steps = read_measured_steps(path)
    step_time, error, valid = fit_measured_steps(steps)
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
        source=f"{len(steps)} measured steps ({path.name})",
    )


def shape_for(steps: Steps) -> StepShape:
    """Return a shape with knots where there are enough steps, and with the coefficients that occur in the data."""
    numbers = [name for name in ("prefill_qq_s", "prefill_qkv_s") if np.any(getattr(steps, name[:-2]) > 0)]
    decoding = steps.num_decodes > 0
    slopes = _knots(steps.num_decodes[decoding], growth=4.0) if np.any(decoding) else ()
    if np.any(steps.num_prefills > 0):
        numbers.append("prefill_s")
    return StepShape(numbers=tuple(numbers), by_tokens=_knots(steps.num_tokens, growth=2.0), decode_slope=slopes)


def _knots(counts: Array, *, growth: float) -> tuple[float, ...]:
    """Return knots from the smallest to the largest count, each `growth` times the last, with enough steps between."""
    smallest, largest = float(counts.min()), float(counts.max())
    knots = [smallest]
    candidate = smallest
    while candidate < largest:
        candidate = min(largest, max(candidate * growth, candidate + 1))
        if np.sum((counts > knots[-1]) & (counts <= candidate)) >= MIN_STEPS_PER_KNOT:
            knots.append(float(math.floor(candidate)))
    return tuple(knots)


def _number(cell: str, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise ValueError(f"{cell}: must be a number, not {text!r}") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{cell}: must be finite and at least 0, not {value}")
    if name in COUNTS and value != int(value):
        raise ValueError(f"{cell}: must be a whole number, not {value}")
    if name == "seconds" and value == 0:
        raise ValueError(f"{cell}: must be above 0")
    return value


def _require_consistent(column: Mapping[str, Array]) -> None:
    """Refuse impossible steps."""
    checks = {
        "prefill_tokens: is less than num_prefills": column["prefill_tokens"] < column["num_prefills"],
        "num_prefills: is 0, but prefill_tokens is not": (column["num_prefills"] == 0) & (column["prefill_tokens"] > 0),
        "num_decodes: is 0, and so is num_prefills": column["num_decodes"] + column["num_prefills"] == 0,
        "decode_context: is less than num_decodes": column["decode_context"] < column["num_decodes"],
    }
    for message, broken in checks.items():
        if np.any(broken):
            name, _, rest = message.partition(": ")
            raise ValueError(f"line {int(np.argmax(broken)) + 2}: {name}: {rest}")
