"""Runs vLLM's real scheduler with the plug-in, and reports the scheduler's own state after each change.

It runs with the interpreter that has vLLM and the plug-in, and imports nothing else of this project except the tracer.
It reads workloads like the tracer, writes a line of JSON per publication, and continues after a line on its input.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import vllm_trace
from block_vllm_export import register
from legs_trace import LegsTrace
from spec_trace import SpecTrace
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

answers = os.fdopen(os.dup(1), "w", encoding="utf-8")


def short(digest: bytes) -> int:
    """Return the first eight bytes of a hash."""
    return int.from_bytes(digest[:8], "little") or 1


class Reported:
    """A run that waits after every change for the comparison."""

    def __init__(self, base: Any, workload: dict[str, Any]) -> None:
        self.under_way: deque[Any] = deque()
        super().__init__(base, workload)
        self.report()

    def schedule(self, start_s: float) -> Any:
        """Plan a step, and report."""
        launched = super().schedule(start_s)
        if launched.output.num_scheduled_tokens:
            self.under_way.append(launched)
        self.report()
        return launched

    def update(self, launched: Any) -> None:
        """Process a step's outputs, and report where no request is left; else the next step publishes it."""
        if launched.output.num_scheduled_tokens:
            assert self.under_way.popleft() is launched
        super().update(launched)
        if not self.scheduler.has_unfinished_requests():
            self.report()

    def report(self) -> None:
        """Report the scheduler's state, and wait."""
        scheduler = self.scheduler
        manager = scheduler.kv_cache_manager
        (kind,) = manager.coordinator.single_type_managers
        pool = manager.block_pool
        unfinished = {name for name, request in scheduler.requests.items() if not request.is_finished()}

        def described(request: Any) -> dict[str, Any]:
            blocks = kind.req_to_blocks.get(request.request_id, [])
            return {
                "id": request.request_id,
                "prompt": request.num_prompt_tokens,
                "output": request.num_output_tokens,
                "computed": request.num_computed_tokens,
                "placeholders": request.num_output_placeholders,
                "in_flight": request.num_in_flight_tokens,
                "stale": request.num_stale_output_tokens,
                "preemptions": request.num_preemptions,
                "priority": request.priority,
                "drafts": len(request.spec_token_ids),
                "blocks": [block.block_id - 1 for block in blocks],
                "hashes": [short(one) for one in request.block_hashes],
                "leg": self.specs[request.request_id].get("leg", "serve"),
                "stage": self.stage_of(request),
            }

        truth = {
            "running": [described(one) for one in scheduler.running],
            "waiting": [described(one) for one in vllm_trace.waiting_in_order(scheduler)],
            "ended": [described(one) for one in scheduler.requests.values() if one.is_finished()],
            "steps": [
                {
                    "scheduled": {n: c for n, c in step.output.num_scheduled_tokens.items() if n in unfinished},
                    "sampled": [n for n in step.output.num_scheduled_tokens if n in step.sampled & unfinished],
                    "drafts": {
                        name: len(tokens)
                        for name, tokens in step.output.scheduled_spec_decode_tokens.items()
                        if tokens and name in unfinished
                    },
                }
                for step in self.under_way
            ],
            "free": [block.block_id - 1 for block in pool.free_block_queue.get_all_free_blocks()],
            "contents": {block.block_id - 1: short(block.block_hash) for block in pool.blocks if block.block_hash},
        }
        answers.write(json.dumps(truth) + "\n")
        answers.flush()
        if not sys.stdin.readline():
            raise SystemExit

    def stage_of(self, request: Any) -> str:
        """Return where the transfer of a request's blocks stands."""
        scheduler, name = self.scheduler, request.request_id
        if request.is_finished():
            return "held" if request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED") else "fetching"
        if request.status.name == "WAITING_FOR_REMOTE_KVS":
            if name not in scheduler.finished_recving_kv_req_ids:
                return "fetching"
            return "failed" if name in scheduler.failed_recving_kv_req_ids else "fetched"
        waits = request in list(scheduler.waiting)
        return "to_fetch" if waits and (request.kv_transfer_params or {}).get("do_remote_prefill") else ""


class ReportedTrace(Reported, vllm_trace.Trace):
    """A run of an engine without a connector."""


class ReportedLegs(Reported, LegsTrace):
    """A run of an engine with a connector."""

    def params_of(self, spec: dict[str, Any]) -> Any:
        """Add what is left of a router's parameters when a fetch has begun."""
        params = super().params_of(spec)
        if spec["leg"] == "decode":
            params.extra_args["kv_transfer_params"]["remote_request_id"] = spec["id"]
        return params


class ReportedDrafts(Reported, SpecTrace):
    """A run of an engine with speculative decoding."""


def kind_of(engine: dict[str, Any]) -> type[Reported]:
    """Return the kind of run for an engine."""
    if engine.get("speculative_method"):
        return ReportedDrafts
    return ReportedLegs if engine.get("kv_role") else ReportedTrace


def main() -> None:
    """Run every workload on standard input, each followed by a line for every publication."""
    os.dup2(2, 1)
    register()
    init_none_hash(sha256)
    KVConnectorFactory.register_connector(vllm_trace.STAND_IN, "legs_trace", "StandIn")
    base = vllm_trace.base_config()
    while line := sys.stdin.readline():
        workload = json.loads(line)
        run: Any = kind_of(workload["engine"])(base, workload)
        run.run()
        run.scheduler.block_export("close")
        answers.write('"end"\n')
        answers.flush()


if __name__ == "__main__":
    main()
