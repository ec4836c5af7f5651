"""Orca (OSDI 22): iteration-level batching, first come first served, memory reserved for the longest response.

Each iteration mixes one token of every running request with the whole prompts of new ones (Algorithm 1).
"""

from __future__ import annotations

from predictor.batching import decoding, reserving
from predictor.compiled import kernel
from predictor.state import State


@kernel
def schedule(state: State) -> bool:
    """Decode all running requests, and admit those whose memory can be reserved."""
    num_decodes = decoding.decode_all(state)
    steady = num_decodes > 0 and decoding.all_sampled_before(state)
    num_admitted = reserving.admit_reserved(state, state.engine[0].max_num_batched_tokens - num_decodes)
    return steady and num_admitted == 0
