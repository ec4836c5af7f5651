"""Random engines with a KV connector, and requests of which one leg is served there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from random import Random
from typing import Any

from predictor.config import FETCHING_ROLES, HOLDING_ROLES, KV_LOAD_FAILURE_POLICIES, EngineConfig
from predictor.engine import Engine
from predictor.request import DECODE, PREFILL, SERVE, RequestFacts
from predictor.state import RUNNING
from tests.conformance.ours import ONE_SECOND
from tests.conformance.workloads import workload

TICK_S = 0.25  # all arrivals, transfers and aborts of a workload are multiples
ENDLESS_S = 1e6


def leg_workload(seed: int, vllm_version: str = "") -> dict[str, Any]:
    """Draw one engine with a connector, and its requests; the same seed always gives the same workload."""
    load = workload(seed, vllm_version)
    rng = Random(f"legs {seed}")
    engine = load["engine"]
    engine["kv_role"] = rng.choice((*FETCHING_ROLES, *HOLDING_ROLES))
    engine["kv_load_failure_policy"] = rng.choice(KV_LOAD_FAILURE_POLICIES)
    legs = [SERVE]
    legs += [PREFILL] * 3 if engine["kv_role"] in HOLDING_ROLES else []
    legs += [DECODE] * 3 if engine["kv_role"] in FETCHING_ROLES else []
    slowest = rng.choice((2, 12, 60))
    failures, departures = rng.choice((0.0, 0.0, 0.4)), rng.choice((0.0, 0.0, 0.3))
    for request in load["requests"]:
        leg = request["leg"] = rng.choice(legs)
        if leg == PREFILL:
            request["output_tokens"] = request["max_tokens"] = 1
        request["held_s"] = rng.randint(1, slowest) * TICK_S
        request["transfer_s"] = rng.randint(1, slowest) * TICK_S
        request["fails"] = leg == DECODE and rng.random() < failures
        request["valid_share"] = rng.choice((0.0, rng.random()))
        leaves = rng.random() < departures
        request["abort_s"] = request["arrival_s"] + rng.randint(1, 80) * TICK_S if leaves else None
    return load


def our_request(request: dict[str, Any]) -> RequestFacts:
    """Return a request of a workload, whose transfer does not fail."""
    return RequestFacts(
        request_id=request["id"],
        arrival_s=request["arrival_s"],
        prompt_tokens=request["prompt_tokens"],
        output_tokens=request["output_tokens"],
        max_tokens=request["max_tokens"],
        priority=request["priority"],
        prefix_hashes=tuple(request["prefix_hashes"]),
        leg=request["leg"],
        held_s=request["held_s"],
        transfer_s=request["transfer_s"],
    )


def our_engine(load: dict[str, Any]) -> Engine:
    """Return the engine model with the same requests; a transfer that fails is ended by the caller."""
    engine = Engine(EngineConfig(**load["engine"], kv_transfer_shared=False), ONE_SECOND)
    by_id = {name: rank for rank, name in enumerate(sorted(request["id"] for request in load["requests"]))}
    for request in load["requests"]:
        facts = our_request(request)
        if request["fails"]:
            facts = replace(facts, transfer_s=ENDLESS_S)
        engine.add(facts, tie_break=by_id[request["id"]])
    return engine


class LegReplay:
    """Runs the engine model from tick to tick: failures and aborts happen in between, before the steps of the tick."""

    def __init__(self, load: dict[str, Any]) -> None:
        self.engine = our_engine(load)
        self.max_steps = load["max_steps"]
        self.failing = {request["id"]: request for request in load["requests"] if request["fails"]}
        self.leaving = {request["id"]: request["abort_s"] for request in load["requests"] if request["abort_s"]}

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield every step."""
        now_s, num_steps = 0.0, 0
        while num_steps < self.max_steps and not self.is_idle():
            self.fail(now_s)
            self.leave(now_s)
            while num_steps < self.max_steps and (step := self.engine.next_step(now_s)) is not None:
                yield asdict(step)
                num_steps += 1
            now_s += TICK_S

    def is_idle(self) -> bool:
        """Return whether no request is left."""
        head = self.engine.state.engine[0]
        return not head.num_running + head.num_waiting + head.num_pending + head.num_in_flight

    def fail(self, now_s: float) -> None:
        """End the transfers that fail now."""
        for name, request in self.failing.items():
            end_s = self.engine.fetch_end_s(name)
            if end_s is None or end_s - ENDLESS_S + request["transfer_s"] > now_s + 1e-6:
                continue
            row = self.engine.state.requests[self.engine.slots[name]]
            size = self.engine.config.block_size
            num_cached, num_blocks = int(row.hit_tokens) // size, int(row.num_blocks)
            num_valid = num_cached + int(request["valid_share"] * (num_blocks - num_cached))
            self.engine.end_fetch(name, ok=False, valid_tokens=num_valid * size, at_s=now_s)

    def leave(self, now_s: float) -> None:
        """Abort the requests whose clients leave now, unless they have been scheduled."""
        for name, abort_s in self.leaving.items():
            row = self.engine.state.requests[self.engine.slots[name]]
            if abort_s == now_s and row.status != RUNNING and row.num_preemptions == 0:
                self.engine.abort(name, at_s=now_s)
