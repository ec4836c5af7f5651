"""Tables of experts, by tokens and by experts touched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from predictor.fitting.expert_table import expert_seconds, read_expert_table
from predictor.fitting.model_shape import Experts

EXPERTS = Experts(num=64, per_token=4, size=1, shared_size=0, num_layers=2)


def written(folder: Path, text: str) -> Path:
    """Write a table."""
    path = folder / "moe.csv"
    path.write_text(text)
    return path


def law(tokens: float, touched: float) -> float:
    """Return µs: linear in both counts."""
    return 10 + 2 * tokens + 3 * touched


def test_experts_are_interpolated_at_the_expected_number_touched(tmp_path: Path) -> None:
    """Between measured counts, and with ragged rows: a token touches at least four experts."""
    rows = [
        f"{tokens},{touched},{law(tokens, touched)}"
        for tokens in (1, 4, 16, 64, 256)
        for touched in (4, 16, 32, 64)
        if touched <= 4 * tokens
    ]
    table = read_expert_table(written(tmp_path, "\n".join(["tokens,activated_experts,time_us", *rows])))
    counts = np.array([1.0, 100.0, 200.0])
    expected = [law(count, EXPERTS.touched(count)) * 1e-6 for count in counts]
    assert expert_seconds(table, EXPERTS, counts) == pytest.approx(expected)
    halves = expert_seconds(table, EXPERTS, counts[1:], ranks=2)
    assert halves == pytest.approx([law(count, EXPERTS.touched(count) / 2) * 1e-6 for count in counts[1:]])


def test_rows_of_other_numbers_of_ranks_are_left_out(tmp_path: Path) -> None:
    """Newer tables have a column for them."""
    path = written(tmp_path, "ep,tokens,activated_experts,time_us\n1,1,4,50\n2,1,2,30\n")
    assert read_expert_table(path, ranks=2).by_touched[0][1].tolist() == pytest.approx([30e-6])
    with pytest.raises(ValueError, match=r"^moe\.csv: has no rows for 4 ranks"):
        read_expert_table(path, ranks=4)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tokens,time_us\n1,2\n", "column activated_experts is missing"),
        ("tokens,activated_experts,time_us\n1,4,fast\n", "line 2: time_us: must be a number, not 'fast'"),
        ("tokens,activated_experts,time_us\n1,4,5\n2,4,-1\n", "line 3: time_us: must be above 0, not -1"),
        ("tokens,activated_experts,time_us\n", "has no rows"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, text: str, error: str) -> None:
    """The error names the line and the column."""
    with pytest.raises(ValueError, match=rf"^moe\.csv: {error}"):
        read_expert_table(written(tmp_path, text))
