"""The fit of transfer times finds what the transfers were made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.config import EngineConfig
from predictor.fitting.kv_transfers import MeasuredTransfer, fit_transfers

BLOCK_SIZE, BLOCK_BYTES = 32, 2**19
BASE_S, BYTES_PER_S, DESCRIPTOR_S = 0.004, 3e9, 2e-5


def transfers(
    generator: np.random.Generator, *, scattered: bool = False, noise: float = 0.02, descriptor_s: float = DESCRIPTOR_S
) -> list[MeasuredTransfer]:
    """Draw transfers; where blocks lie scattered, the number of descriptors per block is random."""
    drawn = []
    for blocks in (1, 2, 4, 8, 12, 16, 24, 32) * 4:
        descriptors = 16 * (int(generator.integers(1, blocks + 1)) if scattered else blocks)
        seconds = BASE_S + blocks * BLOCK_BYTES / BYTES_PER_S + descriptors * descriptor_s
        drawn.append(
            MeasuredTransfer(
                blocks=blocks,
                bytes=blocks * BLOCK_BYTES,
                descriptors=descriptors,
                seconds=seconds * float(generator.lognormal(0, noise)),
            )
        )
    return drawn


def test_base_and_bandwidth_are_found() -> None:
    """Where descriptors grow with the bytes, what they cost is a part of the bandwidth."""
    drawn = transfers(np.random.default_rng(1), descriptor_s=0.0)
    fitted = fit_transfers(drawn, BLOCK_SIZE)
    assert fitted.time.kv_transfer_base_s == pytest.approx(BASE_S, rel=0.05)
    assert fitted.time.kv_transfer_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.05)
    assert fitted.time.kv_transfer_block_s == 0
    assert fitted.time.kv_bytes_per_token == BLOCK_BYTES // BLOCK_SIZE
    assert fitted.num_transfers == len(drawn)
    assert fitted.median_error < 0.03


def test_the_cost_of_descriptors_is_found_where_their_number_varies() -> None:
    """It is counted per block, with as many descriptors as a block usually needs."""
    drawn = transfers(np.random.default_rng(2), scattered=True)
    fitted = fit_transfers(drawn, BLOCK_SIZE)
    per_block = float(np.median([one.descriptors / one.blocks for one in drawn]))
    assert fitted.time.kv_transfer_block_s == pytest.approx(DESCRIPTOR_S * per_block, rel=0.3)
    assert fitted.time.kv_transfer_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.3)
    assert fitted.median_error < 0.03


def test_an_engine_with_the_fit_predicts_the_transfers() -> None:
    """The fitted settings are EngineConfig's own."""
    fitted = fit_transfers(transfers(np.random.default_rng(3), noise=0.0), BLOCK_SIZE).time
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        kv_bytes_per_token=fitted.kv_bytes_per_token or 0,
        kv_transfer_base_s=fitted.kv_transfer_base_s or 0.0,
        kv_transfer_bytes_per_s=fitted.kv_transfer_bytes_per_s or 1.0,
        kv_transfer_block_s=fitted.kv_transfer_block_s or 0.0,
    )
    expected = BASE_S + 10 * BLOCK_BYTES / BYTES_PER_S + 160 * DESCRIPTOR_S
    assert config.transfer_s(10 * BLOCK_SIZE, 10) == pytest.approx(expected, rel=0.01)


def test_too_little_is_refused() -> None:
    """Few transfers, and transfers of one size, tell nothing."""
    drawn = transfers(np.random.default_rng(4))
    with pytest.raises(ValueError, match="^transfers: 5 are too few; 6 are needed"):
        fit_transfers(drawn[:5], BLOCK_SIZE)
    with pytest.raises(ValueError, match="^transfers: all are about equally large"):
        fit_transfers([one for one in drawn if one.blocks in (24, 32)], BLOCK_SIZE)
    with pytest.raises(ValueError, match="^transfers: some have no bytes; give kv_bytes_per_token"):
        fit_transfers([replace(one, bytes=0.0) for one in drawn], BLOCK_SIZE)
