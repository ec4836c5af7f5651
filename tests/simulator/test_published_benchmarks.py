"""Published benchmarks: how they are read, and that the shipped constants predict them as well as is stated."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.fitting.roofline_profile import fitted_roofline
from simulator.published_benchmarks import Benchmark, naive_s, predicted_s, read_benchmarks

DATA = Path(os.environ.get("BLOCK_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="BLOCK_DATA names no data")
ONE = Benchmark(
    engine="vllm",
    version="0.12.0",
    model="Llama-3.1-8B-Instruct",
    family="llama",
    gpu="H100",
    precision="",
    tensor_parallel=1,
    clients=4,
    prompt_tokens=1000,
    output_tokens=100,
    ttft_s=0.05,
    tpot_s=0.008,
)


def test_more_clients_take_longer_each() -> None:
    """TTFT and TPOT grow with the number of clients, and shrink with the number of devices; e2e is made of both."""
    found = fitted_roofline()
    one, many, eight = (
        predicted_s(row, found.constants, found.request_s)
        for row in (ONE, replace(ONE, clients=64), replace(ONE, tensor_parallel=8))
    )
    assert np.all(many > one)
    assert eight[1] < one[1]
    assert one[2] == pytest.approx(one[0] + 99 * one[1])
    later = predicted_s(ONE, found.constants, found.request_s + 1)
    assert later == pytest.approx(one + np.array([1, 0, 1]))


def test_the_naive_formula() -> None:
    """Operations of the prompt at the peak; weights and contexts at the bandwidth."""
    weights = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 128256 * 4096
    all_bytes = 2 * (weights + 128256 * 4096) + 4 * 1050 * 131072
    ttft_s, tpot_s, _ = naive_s(ONE)
    assert ttft_s == pytest.approx(2 * weights * 1000 / 989e12)
    assert tpot_s == pytest.approx(all_bytes / 3350e9)


def test_what_does_not_fit_into_memory_is_known() -> None:
    """64 sequences of 8192 tokens of a 70B model beside 8-bit weights on two GPUs of 80 GB."""
    large = replace(ONE, model="Llama-3.1-70B", precision="fp8", tensor_parallel=2)
    assert large.fits
    assert not replace(large, clients=64, prompt_tokens=8192).fits
    assert not replace(large, precision="", tensor_parallel=1).fits


@needs_data
def test_the_shipped_constants_predict_what_is_published() -> None:
    """Medians of a third of vLLM's rows are about as stated, and below the naive formula's on each kind of GPU."""
    found = fitted_roofline()
    rows = [row for row in read_benchmarks(DATA) if row.fits and row.engine == "vllm"][::3]
    stated = found.error_for("H100", "llama")
    ours, naive = (
        np.abs(np.array(predicted) / [row.measured_s for row in rows] - 1)
        for predicted in (
            [predicted_s(row, found.constants, found.request_s_on(row.gpu)) for row in rows],
            [naive_s(row) for row in rows],
        )
    )
    assert np.median(ours, axis=0) == pytest.approx([stated.ttft_p50, stated.tpot_p50, stated.e2e_p50], rel=0.5)
    for gpu in ("B200", "H100", "H200"):
        chosen = np.array([row.gpu == gpu for row in rows])
        assert np.all(np.median(ours[chosen], axis=0) < 0.5 * np.median(naive[chosen], axis=0))
