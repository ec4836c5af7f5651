"""A copy of an engine equals it, blocks and the index of their contents included, whatever was in its place before."""

from __future__ import annotations

import numpy as np
import pytest

from predictor import loop
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.request import RequestFacts
from predictor.state import NONE
from predictor.state_copies import copy_into, interpreted_layer, stack_like
from tests.strategies import AFFINE

NUM_ENGINES, NUM_REQUESTS, NUM_PREFIXES = 2, 60, 5


def engine_with_prefixes(seed: int, num_blocks: int) -> Engine:
    """Make an engine whose requests share prefixes, and whose blocks are too few to keep them all."""
    random = np.random.default_rng(seed)
    engine = Engine(EngineConfig(num_gpu_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=64), AFFINE)
    for number in range(NUM_REQUESTS):
        length = int(random.integers(1, 5))
        prefix = int(random.integers(NUM_PREFIXES))
        hashes = (*(100 * prefix + block for block in range(length - 1)), 1000 * (1 + int(random.integers(9))))
        request = RequestFacts(
            request_id=f"{number}", prompt_tokens=16 * length + int(random.integers(1, 20)),
            output_tokens=int(random.integers(1, 40)), arrival_s=0.02 * number, prefix_hashes=hashes,
        )  # fmt: skip
        engine.add(request)
    return engine


@pytest.mark.parametrize("num_blocks", [24, 60, 400])
def test_a_copy_equals_its_engine(num_blocks: int) -> None:
    """Two engines are copied by turns into the same places, where simulations have run on before."""
    engines = [engine_with_prefixes(seed, num_blocks) for seed in range(NUM_ENGINES)]
    shape = max((engine.state for engine in engines), key=lambda state: len(state.cached))
    assert {len(engine.state.cached) for engine in engines} == {len(shape.cached)}
    stack = stack_like(shape, 2)
    num_hits = num_seen = 0
    for turn in range(60):
        engine = engines[turn % NUM_ENGINES]
        loop.drive(engine.state, 0.03 * turn, loop.ANY_NUMBER, NONE)
        place = interpreted_layer(stack, engine.state, turn // 2 % 2)
        copy_into(place, engine.state)
        np.testing.assert_array_equal(place.blocks, engine.state.blocks)
        np.testing.assert_array_equal(place.cached, engine.state.cached)
        num_seen += int((place.cached >= 0).sum())
        loop.drive(place, 0.03 * turn + 0.01 * (turn % 7), loop.ANY_NUMBER, NONE)
        num_hits = max(num_hits, int(place.requests.hit_tokens.max()))
    assert num_hits > 0
    assert num_seen > 0
