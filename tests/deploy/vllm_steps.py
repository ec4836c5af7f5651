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
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

answers = os.fdopen(os.dup(1), "w", encoding="utf-8")


def short(digest: bytes) -> int:
    """Return the first eight bytes of a hash."""
    return int.from_bytes(digest[:8], "little") or 1


class ReportedRun(vllm_trace.Trace):
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
                "blocks": [block.block_id - 1 for block in blocks],
                "hashes": [short(one) for one in request.block_hashes],
            }

        truth = {
            "running": [described(one) for one in scheduler.running],
            "waiting": [described(one) for one in [*scheduler.kv_holding_waiting, *scheduler.waiting]],
            "steps": [
                {
                    "scheduled": {n: c for n, c in step.output.num_scheduled_tokens.items() if n in scheduler.requests},
                    "sampled": [
                        n for n in step.output.num_scheduled_tokens if n in step.sampled & {*scheduler.requests}
                    ],
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


def main() -> None:
    """Run every workload on standard input, each followed by a line for every publication."""
    os.dup2(2, 1)
    register()
    init_none_hash(sha256)
    base = vllm_trace.base_config()
    while line := sys.stdin.readline():
        run = ReportedRun(base, json.loads(line))
        run.run()
        run.scheduler.block_export("close")
        answers.write('"end"\n')
        answers.flush()


if __name__ == "__main__":
    main()
