"""Kernel tables of mixtures of experts: `moe.csv` has a layer's experts by tokens and by distinct experts touched.

It is measured with routing of its own choice, so times are taken where the expected number of experts is touched.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from predictor.fitting.model_shape import Experts, ModelShape
from predictor.fitting.regression import Array

FILE = "moe.csv"
COLUMNS = ("tokens", "activated_experts", "time_us")
RANKS = "ep"  # a column of newer tables
EXPERTS = "experts"  # what they are called among the dense kernels
MLP_KERNELS = ("gate_up_proj", "act_fn", "down_proj")
US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTable:
    """Seconds of a layer's experts on one rank: for each number of tokens, by the number of experts touched."""

    tokens: Array
    by_touched: tuple[tuple[Array, Array], ...]

    def seconds(self, num_tokens: Array, touched: Array) -> Array:
        """Interpolate between the measured counts."""
        # At each measured count of tokens, what as many experts cost; then between these counts.
        rows = np.array([np.interp(touched, experts, seconds) for experts, seconds in self.by_touched])
        return np.array([np.interp(count, self.tokens, rows[:, index]) for index, count in enumerate(num_tokens)])


def read_expert_table(path: Path, *, ranks: int = 1) -> ExpertTable:
    """Read `moe.csv`; of a table with several numbers of ranks, the rows of this one."""
    found: dict[int, dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            tokens, touched, seconds = (_number(row, column, number) for column in COLUMNS)
            if row.get(RANKS) and _number(row, RANKS, number) != ranks:
                continue
            found.setdefault(int(tokens), {})[int(touched)] = seconds * US
    if not found:
        raise ValueError(f"{FILE}: has no rows for {ranks} ranks")
    counts = sorted(found)
    return ExpertTable(
        tokens=np.array(counts, dtype=float),
        by_touched=tuple(
            (np.array(sorted(found[count]), dtype=float), np.array([found[count][one] for one in sorted(found[count])]))
            for count in counts
        ),
    )


def expert_seconds(table: ExpertTable, experts: Experts, num_tokens: Array, *, ranks: int = 1) -> Array:
    """Return the seconds of a layer's experts, of which tokens touch as many as is expected."""
    touched = np.array([experts.touched(count) for count in num_tokens]) / ranks
    return table.seconds(num_tokens, touched)


def with_expert_layers(
    dense: Mapping[str, tuple[Array, Array]], folder: Path, model: ModelShape, *, ranks: int = 1
) -> dict[str, tuple[Array, Array]]:
    """Add a model's experts to its dense kernels, all by tokens and as the mean of the layers.

    Kernels of a dense MLP are those of the layers without experts, or else of shared experts.
    """
    path, experts = folder / FILE, model.experts
    if experts is None:
        if path.exists():
            raise ValueError(f"num_experts: missing, and the folder has {FILE}")
        return dict(dense)
    if not path.exists():
        raise ValueError(f"{FILE}: missing, and the model has {experts.num} experts")
    mlp_layers = model.num_dense_layers or (experts.num_layers if experts.shared_size else 0)
    shares = dict.fromkeys(MLP_KERNELS, mlp_layers / model.num_layers)
    made = {name: (counts, seconds * shares.get(name, 1.0)) for name, (counts, seconds) in dense.items()}
    counts = next(iter(made.values()))[0]
    layer = expert_seconds(read_expert_table(path, ranks=ranks), experts, counts, ranks=ranks)
    return made | {EXPERTS: (counts, layer * (experts.num_layers / model.num_layers))}


def _number(row: dict[str, str], column: str, line: int) -> float:
    value = row.get(column)
    if value is None:
        raise ValueError(f"{FILE}: column {column} is missing")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{FILE}: line {line}: {column}: must be a number, not {value!r}") from None
    if not 0 < number < np.inf:
        raise ValueError(f"{FILE}: line {line}: {column}: must be above 0, not {value}")
    return number
