"""FasterTransformer: static batches; no request joins before the last one of a batch has finished."""

from __future__ import annotations

from predictor.batching import decoding, reserving
from predictor.compiled import kernel
from predictor.state import State


@kernel
def schedule(state: State) -> bool:
    """Decode the current batch, or else form the next one."""
    if state.engine[0].num_running == 0:
        reserving.admit_reserved(state, state.engine[0].max_num_batched_tokens)
        return False
    decoding.decode_all(state)
    return decoding.all_sampled_before(state)
