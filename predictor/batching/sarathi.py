"""Sarathi-Serve (OSDI 24, Algorithm 3): stall-free batching; decodes never wait, prefill chunks fill the budget.

Prompts take their blocks as a whole on admission, as in the vLLM of its day, on which it was built.
"""

from __future__ import annotations

from predictor.batching import vllm_v0
from predictor.compiled import kernel
from predictor.state import State


@kernel
def schedule(state: State) -> bool:
    """Decodes, then prompts under way, then new prompts, within the token budget."""
    return vllm_v0.schedule_chunked(state)
