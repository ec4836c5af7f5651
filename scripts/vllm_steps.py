"""Runs planned batches on vLLM's engine in this process and prints a row for each step, for `accuracy_kernels.py`.

It imports nothing of Block: vLLM cannot be imported beside numba.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

LONGEST, KV_TOKENS, SEATS = 1024, 10_240, 16
WORDS = range(3, 2000)  # of the model's vocabulary
ALONE = (16, 32, 64, 128, 256, 512, 960)  # tokens of prompts
BESIDE = (16, 64, 256, 512)  # the same, beside decodes
DECODES = ((1, 128), (4, 16), (12, 16), (8, 128), (2, 16), (1, 900), (15, 128), (4, 512), (12, 512))  # and contexts
REPEATS = 3  # of each prompt, so that equal steps can be compared
DECODE_STEPS = 6


def main() -> None:
    """Run the engine for a processor time, and print its steps."""
    import torch

    torch.set_num_threads(1)
    model, budget_s, block_size, step_tokens = sys.argv[1:]
    engine = RecordedEngine(model, int(block_size), int(step_tokens))
    print(json.dumps(stepped(engine, float(budget_s))))


class RecordedEngine:
    """An engine that records each of its steps."""

    def __init__(self, model: str, block_size: int, step_tokens: int) -> None:
        """Start it with random weights."""
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model, load_format="dummy", max_model_len=LONGEST, block_size=block_size,
                num_gpu_blocks_override=KV_TOKENS // block_size + 1, max_num_seqs=SEATS,
                max_num_batched_tokens=step_tokens, distributed_executor_backend="uni", enable_prefix_caching=False,
            )
        )  # fmt: skip
        self._core = self._engine.engine_core.engine_core
        self._step, self._schedule = self._core.step_fn, self._core.scheduler.schedule
        self._core.step_fn, self._core.scheduler.schedule = self._timed, self._scheduled
        self._generator, self._names = np.random.default_rng(0), itertools.count()
        self.rows: list[list[float]] = []

    def _scheduled(self, *given: Any) -> Any:
        output = self._schedule(*given)
        requests = [(self._core.scheduler.requests[one], num) for one, num in output.num_scheduled_tokens.items()]
        self.rows.append(row_of([(one.num_computed_tokens - num, num, one.num_prompt_tokens) for one, num in requests]))
        return output

    def _timed(self) -> Any:
        begin_s = time.thread_time()
        result = self._step()
        self.rows[-1].append(time.thread_time() - begin_s)
        return result

    def add(self, prompt_tokens: int, output_tokens: int) -> str:
        """Add a request; its text is random, so that its tokens go to different experts."""
        from vllm import SamplingParams

        prompt = self._generator.integers(WORDS.start, WORDS.stop, prompt_tokens).tolist()
        settings = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=1, detokenize=False)
        self._engine.add_request(name := str(next(self._names)), {"prompt_token_ids": prompt}, settings)
        return name

    def run(self, prompt_tokens: int, output_tokens: int = 1) -> None:
        """Run a request to its end, beside those that are there."""
        name = self.add(prompt_tokens, output_tokens)
        while not any(one.request_id == name and one.finished for one in self._engine.step()):
            pass

    def decode(self, num: int, context: int) -> list[str]:
        """Add requests, and run until all of them have decoded for some steps."""
        names = [self.add(context, LONGEST - context) for _ in range(num)]
        decoded = 0
        while decoded < DECODE_STEPS:
            self._engine.step()
            decoded += self.rows[-1][2] == num and not self.rows[-1][4]
        return names

    def abort(self, names: list[str]) -> None:
        """End requests."""
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def stepped(engine: RecordedEngine, budget_s: float) -> list[list[float]]:
    """Run prompts alone, decodes, and prompts beside decodes, in turns; return a row for each step, as fits need it."""
    engine.run(LONGEST - 16, 8)
    engine.rows.clear()  # caches were cold
    until_s = time.thread_time() + budget_s
    while time.thread_time() < until_s:
        for prompt_tokens in ALONE * REPEATS:
            engine.run(prompt_tokens)
        for num, context in DECODES:
            if time.thread_time() > until_s:
                break
            names = engine.decode(num, context)
            for prompt_tokens in BESIDE * REPEATS:
                engine.run(prompt_tokens)
            engine.abort(names)
    return [row for row in engine.rows if row[0] > 0]


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


if __name__ == "__main__":
    main()
