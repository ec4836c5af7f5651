"""Measured runs of a real vLLM in the reference data: requests, and when their tokens came."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predictor.config import EngineConfig
from predictor.fitting.calibration import Array, MeasuredLatencies
from predictor.outcome import Outcome
from predictor.prefix import block_hashes
from predictor.request import RequestFacts

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One measured run: its engine, its requests and their latencies."""

    name: str
    profile: str
    max_model_len: int
    trace: str | None = None  # a file with the prompts' tokens, if they are known

    def requests(self, data: Path) -> tuple[list[RequestFacts], MeasuredLatencies]:
        """Read the requests and their measured latencies."""
        rows = _lines(data / f"measured/vllm_RTXPRO6000_{self.name}_requests.jsonl")
        # Arrivals and events are on two clocks; the request that waited least gives the offset between them.
        offset_s = min(row["queued_ts"] - row["arrival_time"] for row in rows)
        arrivals_s = np.array([row["arrival_time"] for row in rows]) + offset_s
        prompts = [row["input_tok_ids"] for row in _lines(data / self.trace)] if self.trace else [[]] * len(rows)
        requests = [
            RequestFacts(
                request_id=row["request_id"],
                arrival_s=float(arrival_s - arrivals_s.min()),
                prompt_tokens=row["input_toks"],
                output_tokens=row["output_toks"],
                prefix_hashes=block_hashes(prompt, BLOCK_SIZE),
            )
            for row, arrival_s, prompt in zip(rows, arrivals_s, prompts, strict=True)
        ]
        return requests, MeasuredLatencies(
            first_token_s=np.array([row["first_token_ts"] for row in rows]) - arrivals_s,
            last_token_s=np.array([row["last_token_ts"] for row in rows]) - arrivals_s,
            output_tokens=np.array([float(row["output_toks"]) for row in rows]),
        )

    def config(self, num_gpu_blocks: int) -> EngineConfig:
        """The engine's settings from the run's metadata."""
        return EngineConfig(
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            block_size=BLOCK_SIZE,
            num_gpu_blocks=num_gpu_blocks,
            max_model_len=self.max_model_len,
            async_scheduling=True,
        )


MEASURED_RUNS = {
    "llama": MeasuredRun(
        name="Llama-3.1-8B",
        profile="llama-3.1-8b-rtxpro6000",
        max_model_len=131072,
        trace="traces/llmservingsim_sharegpt300_llama3.1-8b.jsonl",
    ),
    "qwen": MeasuredRun(name="Qwen3-32B", profile="qwen3-32b-rtxpro6000-tp2", max_model_len=40960),
}


def latencies_of(
    requests: Sequence[RequestFacts], outcomes: Sequence[Outcome], output_tokens: Array
) -> MeasuredLatencies:
    """Return what requests experienced in a replay, to be compared with what was measured."""
    return MeasuredLatencies(
        first_token_s=np.array([outcome.ttft_s for outcome in outcomes], np.float64),
        last_token_s=np.array([outcome.e2e_s for outcome in outcomes], np.float64),
        output_tokens=output_tokens,
        arrival_s=np.array([request.arrival_s for request in requests]),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
