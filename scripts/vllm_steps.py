"""Runs planned batches on vLLM's engine in this process and prints a row for each step, for `accuracy_kernels.py`.

It imports little of Block: vLLM cannot be imported beside numba.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.fitting.measurement_batches import Batch, BatchLimits, mixed, structured

LONGEST, BLOCK_SIZE, NUM_BLOCKS, SEATS, STEP_TOKENS = 1024, 32, 320, 16, 512
WORDS = range(3, 2000)  # of the model's vocabulary


def main() -> None:
    """Run the engine for a processor time, and print its steps."""
    import torch

    torch.set_num_threads(1)
    print(json.dumps(stepped(sys.argv[1], float(sys.argv[2]))))


def stepped(model: str, budget_s: float) -> list[list[float]]:
    """Run planned batches on an engine in this process; return a row for each step, as the fit has its columns."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model, load_format="dummy", max_model_len=LONGEST, block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS + 1, max_num_seqs=SEATS, max_num_batched_tokens=STEP_TOKENS,
            distributed_executor_backend="uni", enable_prefix_caching=False,
        )
    )  # fmt: skip
    core = engine.engine_core.engine_core
    rows, step, schedule = [], core.step_fn, core.scheduler.schedule

    def recorded(*given: Any) -> Any:
        output = schedule(*given)
        requests = [(core.scheduler.requests[one], num) for one, num in output.num_scheduled_tokens.items()]
        rows.append(row_of([(one.num_computed_tokens - num, num, one.num_prompt_tokens) for one, num in requests]))
        return output

    def timed() -> Any:
        begin_s = time.thread_time()
        result = step()
        rows[-1].append(time.thread_time() - begin_s)
        return result

    core.scheduler.schedule, core.step_fn = recorded, timed
    generator, limits = np.random.default_rng(0), BatchLimits(
        sequences=SEATS, blocks=int(0.9 * NUM_BLOCKS), block_size=BLOCK_SIZE, longest=LONGEST - 1,
        step_tokens=STEP_TOKENS,
    )  # fmt: skip
    until_s = time.thread_time() + budget_s
    for number, batch in enumerate(planned(limits, generator)):
        if number == 1:
            rows.clear()  # caches were cold
        if time.thread_time() > until_s:
            break
        for index, item in enumerate(batch.items):
            prompt = generator.integers(WORDS.start, WORDS.stop, item.prompt_tokens).tolist()
            settings = SamplingParams(max_tokens=item.output_tokens, ignore_eos=True, temperature=0, detokenize=False)
            engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, settings)
        while engine.has_unfinished_requests():
            engine.step()
    return [row for row in rows if row[0] > 0]


def row_of(scheduled: Sequence[tuple[int, int, int]]) -> list[float]:
    """Return the columns of a step but for its seconds; each request has computed tokens, new ones, and its prompt."""
    prefills = [(before, num) for before, num, prompt in scheduled if before < prompt]
    contexts = [before + num for before, num, prompt in scheduled if before >= prompt]
    return [
        sum(num for _, num, _ in scheduled),
        sum(before + num >= prompt for before, num, prompt in scheduled),
        len(contexts),
        sum(contexts),
        len(prefills),
        sum(num**2 for _, num in prefills),
        sum(num * before for before, num in prefills),
        max(contexts, default=0),
    ]


def planned(limits: BatchLimits, generator: np.random.Generator) -> Iterator[Batch]:
    """Yield batches of prompts alone and of decodes, with a mixed one after each."""
    yield structured(limits)[0]
    while True:
        for batch in structured(limits):
            yield batch
            while not limits.holds(one := mixed(limits, generator)):
                pass
            yield one


if __name__ == "__main__":
    main()
