"""Calibrates wrong profiles with windows of overloaded engines whose truth is known, and compares later requests.

The truth is a profile that ships with other constants; an engine with few KV blocks serves requests that arrive faster
than it can, so that all requests of the window wait. Calibrations start from the tables alone, or from tables that are
wrong on purpose; the error is that of the requests after the window.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from predictor.config import EngineConfig
from predictor.fitting.calibration import CalibratedConstants, MeasuredLatencies, calibrate
from predictor.fitting.constants import Calibrated, scaled
from predictor.profile import load_profile
from predictor.request import RequestFacts
from predictor.step_time import StepTime
from simulator.measured_runs import latencies_of
from simulator.replay import replay

NUM_REQUESTS, WINDOW = 240, 80
PROFILES = ("llama-3.1-8b-rtxpro6000", "qwen3-32b-rtxpro6000-tp2")
# The truth: CPU time a step and beside chunks, communication a token, and kernels over the tables.
TRUTH: dict[str, Any] = {"constant_s": 2e-3, "prefill_s": 3e-3, "token_s": 5e-6}
WRONG = {"tables": 1.0, "tables_5%_fast": 0.95, "tables_5%_slow": 1.05}
SPREAD = 0.01  # of measured times, log-normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An overloaded engine."""

    name: str
    num_blocks: int
    per_s: float


LOADS = (
    Load(name="few_blocks", num_blocks=3000, per_s=20.0),
    Load(name="high_rate", num_blocks=12_000, per_s=60.0),
)


def main() -> None:
    """Print the errors, as a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    results = []
    for result in compared(arguments.seed):
        results.append(result)
        if not arguments.json:
            print(f"{result['name']:64}{result['value']:>9.2%}  {result.get('note', '')}", flush=True)
    if arguments.json:
        print(json.dumps({"bench": "accuracy_calibration", "machine": {"cpu": platform.machine()}, "results": results}))


def compared(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the median errors of requests after the window, before and after the calibration, without the noise."""
    for name in PROFILES:
        tables = without_constants(load_profile(name).step_time)
        for load in LOADS:
            requests = requests_of(load, seed)
            served = replay(config_of(load), replace(tables, **TRUTH), requests)
            output = np.array([float(request.output_tokens or 0) for request in requests])
            truth = latencies_of(requests, served, output)
            measured = noisy(truth, seed)
            for wrong, factor in WRONG.items():
                start = scaled(tables, factor)

                replayed = partial(replay_of, load, requests, output)
                window = np.arange(NUM_REQUESTS) < WINDOW
                found = calibrate(Calibrated(step_time=start), replayed, measured, compared=window)
                for when, step_time in (("before", start), ("after", found.result.step_time)):
                    yield from errors(f"{name}.{load.name}.{wrong}.{when}", replayed(step_time), truth, ~window, found)


def replay_of(
    load: Load, requests: list[RequestFacts], output_tokens: np.ndarray, step_time: StepTime
) -> MeasuredLatencies:
    """Serve the requests."""
    return latencies_of(requests, replay(config_of(load), step_time, requests), output_tokens)


def errors(
    name: str, replayed: MeasuredLatencies, truth: MeasuredLatencies, chosen: np.ndarray, found: CalibratedConstants
) -> Iterator[dict[str, Any]]:
    """Yield the median relative error of each time."""
    for metric, actual in truth.where(chosen).metrics().items():
        relative = replayed.where(chosen).metrics()[metric] / actual - 1
        note = found.describe() if metric == "ttft" and name.endswith("after") else ""
        value = float(np.median(np.abs(relative)))
        yield {"name": f"{name}.{metric}", "value": value, "unit": "ratio", "n": int(chosen.sum()), "note": note}


def without_constants(step_time: StepTime) -> StepTime:
    """Return what the tables alone say."""
    return replace(step_time, constant_s=0.0, prefill_s=0.0, token_s=0.0)


def requests_of(load: Load, seed: int) -> list[RequestFacts]:
    """Return requests with prompts and answers as in conversations."""
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / load.per_s, NUM_REQUESTS))
    prompts = np.clip(draw.lognormal(5.5, 1.0, NUM_REQUESTS), 8, 4000).astype(int)
    outputs = np.clip(draw.lognormal(5.3, 0.8, NUM_REQUESTS), 4, 1500).astype(int)
    return [
        RequestFacts(request_id=f"r{i:03}", arrival_s=float(at_s), prompt_tokens=int(prompt), output_tokens=int(output))
        for i, (at_s, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]


def noisy(latencies: MeasuredLatencies, seed: int) -> MeasuredLatencies:
    """Return times as a measurement has them."""
    draw = np.random.default_rng(seed + 1)
    first = latencies.first_token_s * np.exp(SPREAD * draw.standard_normal(NUM_REQUESTS))
    decoding = (latencies.last_token_s - latencies.first_token_s) * np.exp(SPREAD * draw.standard_normal(NUM_REQUESTS))
    return replace(latencies, first_token_s=first, last_token_s=first + decoding)


def config_of(load: Load) -> EngineConfig:
    """Return the engine's settings."""
    return EngineConfig(
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        block_size=16,
        num_gpu_blocks=load.num_blocks,
        max_model_len=16_384,
        async_scheduling=True,
        enable_prefix_caching=False,
    )


if __name__ == "__main__":
    main()
