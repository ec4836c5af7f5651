"""Tables of experts, by tokens and by experts touched."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.fitting.expert_table import EXPERTS as KERNEL
from predictor.fitting.expert_table import expert_seconds, read_expert_table, with_expert_layers
from predictor.fitting.kernel_tables import kernel_table_profile
from predictor.fitting.model_config import model_shape
from predictor.fitting.model_shape import Experts
from tests.predictor.fitting.model_configs import LLAMA_31_8B

DATA = Path(os.environ.get("BLOCK_DATA", Path(__file__).parents[4] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="BLOCK_DATA names no data")

HEADER = "tokens,activated_experts,time_us"
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
    table = read_expert_table(written(tmp_path, "\n".join([HEADER, *rows])))
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
        (HEADER + "\n1,4,fast\n", "line 2: time_us: must be a number, not 'fast'"),
        (HEADER + "\n1,4,5\n2,4,-1\n", "line 3: time_us: must be above 0, not -1"),
        (HEADER + "\n", "has no rows"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, text: str, error: str) -> None:
    """The error names the line and the column."""
    with pytest.raises(ValueError, match=rf"^moe\.csv: {error}"):
        read_expert_table(written(tmp_path, text))


def test_dense_kernels_are_those_of_layers_without_experts(tmp_path: Path) -> None:
    """With one of four layers dense, a quarter of its MLP and three quarters of the experts are the mean layer's."""
    model = replace(model_shape(LLAMA_31_8B), num_layers=4, experts=replace(EXPERTS, num_layers=3))
    counts, seconds = np.array([1.0, 8.0]), np.array([4e-6, 8e-6])
    dense = {"qkv_proj": (counts, seconds), "down_proj": (counts, seconds)}
    written(tmp_path, f"{HEADER}\n1,4,40\n1,64,40\n8,4,80\n8,64,80\n")
    found = with_expert_layers(dense, tmp_path, model)
    assert found["qkv_proj"][1] == pytest.approx(seconds)
    assert found["down_proj"][1] == pytest.approx(seconds / 4)
    assert found[KERNEL][1] == pytest.approx([30e-6, 60e-6])
    with pytest.raises(ValueError, match=r"^num_experts: missing, and the folder has moe\.csv"):
        with_expert_layers(dense, tmp_path, replace(model, experts=None))
    (tmp_path / "moe.csv").unlink()
    with pytest.raises(ValueError, match=r"^moe\.csv: missing, and the model has 64 experts"):
        with_expert_layers(dense, tmp_path, model)


@pytest.mark.slow
@needs_data
def test_tables_with_experts_instead_of_an_mlp(tmp_path: Path) -> None:
    """A step is that of the tables without an MLP, and the experts of all layers; nothing else changes."""
    source = DATA / "profiles/llmservingsim/perf/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1"
    for name in ("attention.csv", "per_sequence.csv", "skew.csv"):
        shutil.copy(source / name, tmp_path / name)
    lines = (source / "dense.csv").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("gate_up_proj", "act_fn", "down_proj"))]
    (tmp_path / "dense.csv").write_text("\n".join(kept))
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    touched = [4, 8, 16, 32, 48, 64]
    rows = [f"{tokens},{one},{law(tokens, one)}" for tokens in counts for one in touched if one <= 4 * tokens]
    written(tmp_path, "\n".join([HEADER, *rows]))
    shape = replace(model_shape(LLAMA_31_8B), experts=replace(EXPERTS, num_layers=32))
    described = {"name": "n", "model": "m", "gpu": "RTX-PRO-6000", "tensor_parallel": 1, "dtype": "bfloat16"}
    made = kernel_table_profile(tmp_path, shape=shape, **described)
    table = made.step_time.by_tokens.table(2048)
    rest = {}
    for line in kept[1:]:
        layer, tokens, microseconds = line.split(",")
        often = {"layernorm": 64, "embedding": 1, "final_layernorm": 1}.get(layer, 32)
        rest[int(tokens)] = rest.get(int(tokens), 0.0) + often * float(microseconds) * 1e-6
    for tokens in (16, 256, 2048):
        experts_s = 32 * law(tokens, EXPERTS.touched(tokens)) * 1e-6
        assert table[tokens] == pytest.approx(rest[tokens] + experts_s, rel=0.01)
    assert made.error is not None
    assert made.error.mape < 0.1
