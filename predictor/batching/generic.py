"""An engine of unknown kind: continuous batching, first come, first served, with as many requests at once as it takes.

Prefills interrupt decodes, or share steps with them in chunks, as its option says. Nothing is preempted.
"""

from __future__ import annotations

from predictor.batching import decoding, sarathi
from predictor.compiled import kernel
from predictor.state import State

PREFILL_FIRST = 0  # the option's place


@kernel
def schedule(state: State) -> bool:
    """Fill the step with prompts, and with decodes beside them unless prefills go first."""
    engine = state.engine[0]
    if not engine.options[PREFILL_FIRST]:
        return sarathi.schedule(state)
    before = engine.num_running
    budget = sarathi.continue_prompts(state, engine.max_num_batched_tokens)
    sarathi.admit_prompts(state, budget)
    if budget < engine.max_num_batched_tokens or engine.num_running > before:
        return False
    num_decodes = decoding.decode_all(state)
    is_queue_settled = engine.num_waiting == 0 or engine.num_running >= engine.max_num_seqs
    return is_queue_settled and num_decodes == engine.num_running and decoding.all_sampled_before(state)
