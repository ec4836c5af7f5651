"""Random engines with a batching rule and requests with targets, for vLLM with the plug-in and for the engine model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from random import Random
from typing import Any

from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.profile import FITTED, Profile, ValidRange
from predictor.request import RequestFacts, Slo
from predictor.step_time import Curve, StepTime
from tests.conformance.workloads import workload
from tests.strategies import OPTIONS, PLANNED

# Sums of these are exact in binary, whatever their order.
SECONDS = {"empty_s": 2.0**-8, "constant_s": 2.0**-6, "token_s": 2.0**-10, "context_s": 2.0**-16, "square_s": 2.0**-15}
FAR = 2.0**20
STEP_TIME = StepTime(
    constant_s=SECONDS["constant_s"], empty_s=SECONDS["empty_s"], token_s=SECONDS["token_s"],
    prefill_qq_s=SECONDS["square_s"],
    decode_slope=Curve(x=(0.0, FAR), y=(SECONDS["context_s"],) * 2),
    mixed_slope=Curve(x=(0.0, FAR), y=(SECONDS["context_s"],) * 2),
)  # fmt: skip
PROFILE = Profile(
    name="exact", model="any", gpu="any", tensor_parallel=1, dtype="any", kind=FITTED, step_time=STEP_TIME,
    valid=ValidRange(max_tokens=1, max_sequences=1, max_context_tokens=1), error=None, source="for a test",
)  # fmt: skip
TTFT_S = (None, 1 / 64, 1 / 8, 1 / 2, 2.0, 16.0)
TPOT_S = (None, 1 / 64, 1 / 32, 1 / 16, 1 / 4, 1.0)


def ruled_workload(seed: int, profile: str) -> dict[str, Any]:
    """Draw one engine with a rule, and its requests; the same seed always gives the same workload."""
    load = workload(seed)
    rng = Random(f"rule {seed}")
    rule = PLANNED[seed % len(PLANNED)]
    engine = load["engine"]
    engine["enable_chunked_prefill"] = True
    engine["batcher_options"] = {option.name: rng.choice(OPTIONS[option.name]) for option in BATCHERS[rule].options}
    faster = rng.choice((1 / 64, 1 / 16, 1 / 4))  # these steps are shorter than a second
    load["requests"].sort(key=lambda request: request["arrival_s"])
    for place, request in enumerate(load["requests"]):
        request["id"] = f"r{place:03}"  # equal ranks go by id in vLLM's queue, and by arrival in a plan
        request["arrival_s"] *= faster
        facts = {"block_ttft_s": rng.choice(TTFT_S), "block_tpot_s": rng.choice(TPOT_S)}
        facts |= {"block_weight": rng.choice((0.5, 1.0, 2.0)), "block_class": rng.choice(("real-time", "best-effort"))}
        facts["block_tag_tokens"] = request["output_tokens"]
        facts["block_client_id"] = rng.choice(("one", "two", "three"))
        request["xargs"] = {name: value for name, value in facts.items() if value is not None}
    settings = {"profile": profile, "options": engine["batcher_options"], "correction": False}
    return {**load, "rule": rule, "settings": settings, "seconds": SECONDS}


def our_engine(load: dict[str, Any]) -> Engine:
    """Return the engine model with the same rule and requests."""
    engine = Engine(EngineConfig(**load["engine"], batcher=load["rule"]), STEP_TIME)
    for place, spec in enumerate(load["requests"]):
        fields = {name: value for name, value in spec.items() if name not in ("id", "xargs")}
        fields["prefix_hashes"] = tuple(spec["prefix_hashes"])
        targets = spec["xargs"].get("block_ttft_s"), spec["xargs"].get("block_tpot_s")
        engine.add(
            RequestFacts(
                **fields,
                request_id=spec["id"],
                slo=None if targets == (None, None) else Slo(ttft_s=targets[0], tpot_s=targets[1]),
                client_id=spec["xargs"]["block_client_id"],
                weight=spec["xargs"]["block_weight"],
                request_class=spec["xargs"]["block_class"],
            ),
            tie_break=place,
        )
    return engine


def our_steps(load: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a workload on the engine model."""
    steps: Iterator[Any] = iter(our_engine(load).next_step, None)
    return [asdict(step) for step in islice(steps, load["max_steps"])]
