"""Random engines with speculative decoding, and the same workloads on the engine model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from random import Random
from typing import Any

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.speculation import METHODS, MTP
from simulator.replay import loaded_engine
from tests.conformance import drafts
from tests.conformance.ours import ONE_SECOND, our_requests
from tests.conformance.workloads import workload


def spec_workload(seed: int, method: str = "", vllm_version: str = "") -> dict[str, Any]:
    """Draw one engine with speculative decoding, and its requests; the same seed always gives the same workload."""
    load = workload(seed, vllm_version)
    rng = Random(f"speculation {seed}")
    engine = load["engine"]
    engine["speculative_method"] = method or rng.choice(tuple(METHODS))
    count = engine["num_speculative_tokens"] = rng.choice((1, 2, 3, rng.randint(4, 8)))
    several = engine["speculative_method"] == MTP and count > 1 and rng.random() < 0.5
    # a drafter with several modules needs a block as long as its look-ahead
    engine["num_prefill_lookahead_tokens"] = count if several and count <= engine["block_size"] else 0
    load["acceptance"] = rng.choice((0.0, 0.3, 0.6, 0.9, 1.0))
    load["proposals"] = rng.choice((1.0, 0.5, 0.0))
    if rng.random() < 0.3:  # short prompts often need one token only
        for request in load["requests"]:
            request["prompt_tokens"] = rng.choice((1, request["prompt_tokens"]))
            size = request["prompt_tokens"] // engine["block_size"]
            request["prefix_hashes"] = request["prefix_hashes"][:size]
    if engine["long_prefill_token_threshold"]:  # vLLM fails an assertion where it cuts a filled-up request
        engine["long_prefill_token_threshold"] = max(engine["long_prefill_token_threshold"], 1 + count)
    slots = METHODS[engine["speculative_method"]].draft_slots
    if not engine["enable_chunked_prefill"]:
        engine["max_num_batched_tokens"] += slots
    # vLLM's own check, and a drafter's slots beside the tokens of each request
    engine["max_num_batched_tokens"] = max(engine["max_num_batched_tokens"], 1 + slots, 2 * count)
    engine["num_gpu_blocks"] += -(-2 * count // engine["block_size"])
    return load


class SpecReplay:
    """Runs the engine model step by step, with the drawn numbers of proposed and accepted draft tokens."""

    def __init__(self, load: dict[str, Any]) -> None:
        self.load = load
        self.engine: Engine = loaded_engine(EngineConfig(**load["engine"]), ONE_SECOND, our_requests(load))
        self.sampled: Counter[str] = Counter()

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield every step."""
        for _ in range(self.load["max_steps"]):
            step = self.engine.next_step()
            if step is None:
                return
            yield {**asdict(step), "drafts": self.settle()}

    def settle(self) -> dict[str, int]:
        """Set what becomes known with the output of the step that was planned last; return its draft tokens."""
        state = self.engine.state
        head = state.engine[0]
        index = (int(head.oldest) + int(head.num_in_flight) - 1) % 2
        counts = {}
        for entry in state.batch[index, : state.steps[index].num_scheduled]:
            name = self.engine.id_of(entry.slot)
            if entry.drafts:
                counts[name] = int(entry.drafts)
            if entry.sampled:
                number = self.sampled[name] = self.sampled[name] + 1
                if entry.accepted != 0:  # it is not filled up
                    entry.accepted = min(int(entry.drafts), drafts.accepted(self.load, name, number))
                entry.proposed = drafts.proposed(self.load, name, number)
        return counts


def our_steps(load: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay a workload on the engine model, every step taking one second."""
    return list(SpecReplay(load).steps())
