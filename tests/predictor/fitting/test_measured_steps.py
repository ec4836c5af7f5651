"""A valid file of measured steps gives a good fit; the error for an invalid cell names it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from predictor.fitting.measured_steps import (
    OPTIONAL,
    REQUIRED,
    fit_measured_steps,
    measured_profile,
    steps_from_rows,
)
from predictor.fitting.regression import predict
from predictor.profile import load_profile, profile_from_json, profile_to_json

COLUMNS = (*REQUIRED, *OPTIONAL)


def rows_of_an_engine(count: int) -> list[dict[str, str]]:
    """Return steps as an engine logs them, timed by a shipped profile with 1 % of noise."""
    draw = np.random.default_rng(7)
    rows = []
    for _ in range(count):
        decodes = int(draw.integers(0, 100))
        chunk = int(draw.integers(16, 1024)) if decodes == 0 or draw.random() < 0.3 else 0
        contexts = draw.integers(200, 2000, decodes)
        before = int(draw.choice([0, 0, 512]))
        rows.append(
            {
                "num_decodes": str(decodes),
                "decode_context": str(int(contexts.sum())),
                "num_prefills": str(int(chunk > 0)),
                "prefill_tokens": str(chunk),
                "prefill_qq": str(chunk**2),
                "prefill_qkv": str(chunk * before),
                "seconds": "1",
                "num_sampled": str(decodes + int(chunk > 0)),
                "decode_longest": str(int(contexts.max(initial=0))),
            }
        )
    steps = steps_from_rows(rows, columns=COLUMNS)
    seconds = predict(load_profile("llama-3.1-8b-h100").step_time, steps) * draw.normal(1.0, 0.01, count)
    for row, value in zip(rows, seconds, strict=True):
        row["seconds"] = f"{value:.9f}"
    return rows


def test_fits_what_an_engine_logs(tmp_path: Path) -> None:
    """From 1,500 logged steps, the time of held-out steps is predicted within 4 %."""
    path = tmp_path / "steps.csv"
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, fieldnames=COLUMNS)
        writer.writeheader()
        writer.writerows(rows_of_an_engine(1500))
    profile = measured_profile(path, name="mine", model="m", gpu="g", tensor_parallel=1, dtype="bfloat16")
    assert profile.error is not None
    assert profile.error.n == pytest.approx(300, abs=3)
    assert profile.error.mape < 0.04
    assert profile.valid.max_tokens > 1000
    assert profile.step_time.empty_s == 0.0
    assert profile_from_json(profile_to_json(profile)) == profile


def test_only_decodes_are_enough() -> None:
    """A log without prefills is enough for a step time."""
    rows = [row for row in rows_of_an_engine(600) if row["num_prefills"] == "0"]
    _, error, _ = fit_measured_steps(steps_from_rows(rows, columns=COLUMNS))
    assert error.mape < 0.03


@pytest.mark.parametrize(
    ("column", "text", "error"),
    [
        ("seconds", "nan", "line 5: seconds: must be finite"),
        ("seconds", "0", "line 5: seconds: must be above 0"),
        ("seconds", "soon", "line 5: seconds: must be a number"),
        ("seconds", "", "line 5: seconds: must be a number"),
        ("num_decodes", "-1", "line 5: num_decodes: must be finite and at least 0"),
        ("num_decodes", "1.5", "line 5: num_decodes: must be a whole number"),
        ("decode_context", "inf", "line 5: decode_context: must be finite"),
    ],
)
def test_a_bad_cell_is_named(column: str, text: str, error: str) -> None:
    """The error for an invalid cell has its line and column."""
    rows = rows_of_an_engine(40)
    rows[3][column] = text
    with pytest.raises(ValueError, match=r"^.+$") as refusal:
        steps_from_rows(rows, columns=COLUMNS)
    assert str(refusal.value).startswith(error)


def test_an_impossible_step_is_named() -> None:
    """A step with more chunks than tokens, or with nothing in it, is refused."""
    rows = rows_of_an_engine(40)
    rows[0].update(num_prefills="3", prefill_tokens="2")
    with pytest.raises(ValueError, match=r"^line 2: prefill_tokens: "):
        steps_from_rows(rows, columns=COLUMNS)
    rows = rows_of_an_engine(40)
    rows[1].update(num_prefills="0", prefill_tokens="0", num_decodes="0", decode_context="0")
    with pytest.raises(ValueError, match=r"^line 3: num_decodes: "):
        steps_from_rows(rows, columns=COLUMNS)


def test_missing_and_unknown_columns_are_named() -> None:
    """The columns must be those that are documented."""
    with pytest.raises(ValueError, match=r"^seconds: the column is missing"):
        steps_from_rows([], columns=REQUIRED[:-1])
    with pytest.raises(ValueError, match=r"^temperature: unknown column"):
        steps_from_rows([], columns=(*REQUIRED, "temperature"))


def test_too_few_steps_are_refused() -> None:
    """A few steps are not enough for a fit."""
    with pytest.raises(ValueError, match=r"^seconds: 5 steps are too few"):
        steps_from_rows(rows_of_an_engine(40)[:5], columns=COLUMNS)
