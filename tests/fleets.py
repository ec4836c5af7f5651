"""Instances as policies see them, from lists of numbers and at random."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.candidates import ANY_REQUEST, Candidates, RequestIndicators
from scheduler.indicators import INDEX_OF, REPORTED
from scheduler.instance_table import InstanceTable

LETTERS = "abcdefghijklmnop"


def fleet(
    *, now_s: float = 0.0, request: RequestIndicators = ANY_REQUEST, **columns: Sequence[float | None]
) -> Candidates:
    """Instances a, b, c and so on, with these indicators, reported or of the request; None is what is not known."""
    (num,) = {len(values) for values in columns.values()}
    reported = {name: values for name, values in columns.items() if name in INDEX_OF}
    table = InstanceTable(LETTERS[:num])
    for row, letter in enumerate(LETTERS[:num]):
        values = {name: column[row] for name, column in reported.items() if column[row] is not None}
        table.replace(letter, values, now_s)
    candidates = table.candidates(request, now_s)
    candidates.add(
        {
            name: np.array([math.nan if value is None else value for value in values], float)
            for name, values in columns.items()
            if name not in reported
        }
    )
    return candidates


def random_fleet(rng: np.random.Generator, *, unknown: float = 0.1) -> Candidates:
    """Up to sixteen instances in any state, of which anything may not be known; small numbers, so that many tie."""
    num = int(rng.integers(1, 17))
    table = InstanceTable(LETTERS[:num])
    values = rng.integers(0, 6, (len(REPORTED), num)).astype(float)
    values[rng.random(values.shape) < unknown * (rng.random() < 0.5)] = np.nan
    table.known.reported[:] = values
    table.known.reported_s[:] = -rng.integers(0, 90, num)
    prompt_tokens = int(rng.integers(1, 100))
    candidates = table.candidates(
        RequestIndicators(prompt_tokens=prompt_tokens, tag_tokens=float(rng.integers(1, 500)))
    )
    hits = rng.integers(0, prompt_tokens + 1, num).astype(float)
    forecast_fields = rng.choice([0.5, 1.0, 2.0, math.inf, math.nan], (4, num))
    candidates.add({"prefix_hit_tokens": hits})
    names = ("predicted_e2e_s", "predicted_ttft_s", "predicted_tpot_s", "delay_sum_s")
    candidates.add(dict(zip(names, forecast_fields, strict=True)))
    return candidates
