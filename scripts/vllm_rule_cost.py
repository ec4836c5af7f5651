"""Times the plug-in's scheduler classes in vLLM, without a model; `bench_vllm_rules.py` runs it with vLLM's Python.

Arguments: the folder that the plug-in is installed in, then a JSON object with `rules`, `sizes` (running and waiting),
`profile`, `steps`. Prints a JSON list of results.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "conformance"), sys.argv[1]]

import vllm_trace  # type: ignore[import-not-found]  # noqa: E402  # on the path above, like the next
from block_vllm_export import schedulers  # type: ignore[import-not-found]  # noqa: E402
from vllm_trace import ModelRunnerOutput, Request, SamplingParams, Scheduler  # noqa: E402

ENGINE = {
    "max_num_batched_tokens": 2048, "block_size": 16, "max_model_len": 8192, "scheduling_policy": "fcfs",
    "enable_prefix_caching": True, "enable_chunked_prefill": True, "long_prefill_token_threshold": 0, "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
}  # fmt: skip
WARM_UP = 30


class CallTimer:
    """Adds up the time of calls."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds = 0.0

    def around(self, function: Any) -> Any:
        """Return a function whose calls are timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start_s

        return timed


def measure(base: Any, rule: str, num_running: int, num_waiting: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Run steps with this many running and waiting requests; what ends is replaced."""
    inner = CallTimer()

    timed = type("Timed", (Scheduler,), {"schedule": inner.around(Scheduler.schedule)})
    chosen = type(rule, (schedulers.RuleScheduler, timed), {"block_rule": rule})
    config = vllm_trace.copy.copy(base)
    config.additional_config = {"block_rule": {"profile": plan["profile"]}}
    engine = {**ENGINE, "max_num_seqs": num_running, "num_gpu_blocks": 70 * num_running, "async_scheduling": False}
    scheduler = vllm_trace.build_scheduler(config, engine, chosen)
    tokens = vllm_trace.TokenSource()
    hasher = vllm_trace.get_request_block_hasher(16, vllm_trace.sha256)
    number = 0

    def add() -> None:
        nonlocal number
        number += 1
        facts = {"block_ttft_s": 5.0 + number % 7, "block_tpot_s": 0.2, "block_weight": 1.0 + number % 2}
        scheduler.add_request(
            Request(
                request_id=f"r{number}", prompt_token_ids=tokens.fresh(256 + 64 * (number % 5)), pooling_params=None,
                sampling_params=SamplingParams(max_tokens=200 + number % 400, extra_args=facts), block_hasher=hasher,
            )
        )  # fmt: skip

    whole = CallTimer()
    retired = CallTimer()
    schedule = whole.around(scheduler.schedule)
    scheduler.block_planner.retired = retired.around(scheduler.block_planner.retired)
    costs: list[tuple[float, float]] = []
    ordering_s: list[float] = []
    while len(costs) < plan["steps"] + WARM_UP:
        while len(scheduler.requests) < num_running + num_waiting:
            add()
        was_full = len(scheduler.running) == num_running
        if was_full:
            ordering_s.append(ordering(scheduler.block_planner))
        whole.seconds = inner.seconds = retired.seconds = 0.0
        output = schedule()
        finish(scheduler, output, tokens)
        if scheduler.block_planner is None:
            raise SystemExit(f"{rule} has failed")
        if was_full:
            costs.append((whole.seconds - inner.seconds + retired.seconds, inner.seconds))
    own = sorted(cost for cost, _ in costs[WARM_UP:])
    return {
        "rule": rule,
        "running": num_running,
        "waiting": num_waiting,
        "n": len(own),
        "median_s": statistics.median(own),
        "p90_s": own[int(0.9 * len(own))],
        "ordering_s": statistics.median(ordering_s[WARM_UP:]),
        "vllm_s": statistics.median(cost for _, cost in costs[WARM_UP:]),
    }


def ordering(planner: Any) -> float:
    """Return the time of a plan as it is made while a seat is free: all requests are ranked."""
    followed = planner.followed
    followed.follow()
    followed.engine["max_num_seqs"] += 1
    followed.steps["num_scheduled"] = followed.steps["num_preempted"] = followed.engine["num_pending"] = 0
    start_s = time.perf_counter()
    planner.rule(followed.state)
    seconds = time.perf_counter() - start_s
    followed.engine["max_num_seqs"] -= 1
    return seconds


def finish(scheduler: Any, output: Any, tokens: Any) -> None:
    """Process a step's outputs."""
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else tokens.fresh(1) for name in names]
    places = {name: place for place, name in enumerate(names)}
    scheduler.update_from_output(
        output, ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
    )


def main() -> None:
    """Measure all; vLLM's output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    vllm_trace.init_none_hash(vllm_trace.sha256)
    base = vllm_trace.base_config()
    plan = json.loads(sys.argv[2])
    cases = [(rule, *size) for rule in plan["rules"] for size in plan["sizes"]]
    answers.write(json.dumps([measure(base, rule, running, waiting, plan) for rule, running, waiting in cases]))


if __name__ == "__main__":
    main()
