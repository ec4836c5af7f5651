"""The steps that an engine can take, as columns: what they serve and how long they take at least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predictor.tabulated_costs import ALONE, BESIDE, CONSTANT, PREFILL, PREFILL_TOKEN, SAMPLED, context_line, tabulate
from simulator.fleet import InstanceSpec

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """Steps with so many decodes and prompt tokens, and with no context to read or all that fits.

    `seconds` leaves out the attention of prefill chunks. All other steps lie between these, or take longer: step times
    are linear in prompt tokens between the knots of the step time, and never below a line in context.
    """

    decodes: Floats
    prompt_tokens: Floats
    context_tokens: Floats
    seconds: Floats

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.seconds)

    def chosen(self, rows: npt.NDArray[np.bool_]) -> StepShapes:
        """Select steps."""
        return StepShapes(
            decodes=self.decodes[rows],
            prompt_tokens=self.prompt_tokens[rows],
            context_tokens=self.context_tokens[rows],
            seconds=self.seconds[rows],
        )


def step_shapes(spec: InstanceSpec, *, max_context: float | None = None, shares_blocks: bool = False) -> StepShapes:
    """Return the steps of an engine whose requests have at most `max_context` tokens, by default what it allows.

    Where requests share KV blocks, memory does not limit the context of a step.
    """
    num_seqs, chunk = spec.config.max_num_seqs, spec.config.max_num_batched_tokens
    costs = tabulate(spec.step_time, chunk, num_seqs)
    knots = {int(edge) for x in spec.step_time.by_tokens.x for edge in (np.floor(x), np.ceil(x))} | {chunk}
    counts = np.arange(min(num_seqs, chunk) + 1)
    beside = np.array([[0, 1, *(knot - num for knot in sorted(knots))] for num in counts])  # prompt tokens
    decodes = np.broadcast_to(counts[:, None], beside.shape)
    exists = (beside >= 0) & (decodes + beside > 0) & (decodes + beside <= chunk)
    decodes, prompts = decodes[exists], beside[exists]
    with_prompt = prompts > 0
    # at least the decodes are sampled; a prompt's last chunk is as well
    sampled = np.minimum.accumulate(costs.by_count[::-1, SAMPLED])[::-1]
    seconds = costs.coefficients[CONSTANT] + costs.by_tokens[decodes + prompts] + sampled[decodes]
    seconds += with_prompt * (costs.coefficients[PREFILL] + costs.coefficients[PREFILL_TOKEN] * prompts)
    some = decodes > 0
    # the longest context is at least the mean
    (alone_s, alone_slope), (beside_s, beside_slope) = (context_line(costs, first) for first in (ALONE, BESIDE))
    seconds += some * np.where(with_prompt, beside_s[decodes], alone_s[decodes])
    per_context_s = np.where(with_prompt, beside_slope[decodes], alone_slope[decodes])
    most = decodes * (spec.config.max_model_len if max_context is None else max_context)
    if not shares_blocks:
        most = np.minimum(most, (spec.config.num_gpu_blocks - 1) * spec.config.block_size)
    both = np.concatenate([np.arange(len(decodes)), np.flatnonzero(some)])
    context = np.concatenate([np.zeros(len(decodes)), most[some].astype(np.float64)])
    return StepShapes(
        decodes=decodes[both].astype(np.float64),
        prompt_tokens=prompts[both].astype(np.float64),
        context_tokens=context,
        seconds=spec.pace * (seconds[both] + per_context_s[both] * context),
    )
