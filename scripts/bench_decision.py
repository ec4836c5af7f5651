"""CPU time of a decision alone: what a scheduler and a simulator both do per request.

From a request to the chosen instance: the look-up in the prefix cache index, the shortlist, the scores, the choice, and
its effect on the table of indicators, which changes as requests are sent. The forecasts are numbers from a table:
making them is the sidecars' work, and `bench_predictor.py` measures it; requesting
them is communication, and `bench_scheduler.py` measures that.

- `decision_cpu_us.{policy}.{instances}`: median over rounds of the mean of a round.
- `decision_cpu_growth.{policy}`: what it costs with the most instances over what it costs with the fewest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from predictor.forecast_result import Forecast
from scheduler.candidate import forecast_columns
from scheduler.candidates import RequestIndicators
from scheduler.instance_table import InstanceTable
from scheduler.policy import policy_from
from scheduler.prefix import PrefixIndex

POLICIES = {
    "lmetric": "lmetric",
    "block-k8": "block: k = 8",
    "block": "block",
    "llumnix": "llumnix",
    "jsq": "jsq",
    "round_robin": "round_robin",
    "expr": "expr: p_tokens * batch_size",
}
INSTANCES = (12, 64, 256)
NUM_TALKS = 400
BLOCK_TOKENS = 16
MOST_BLOCKS = 60  # of a prompt


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="Repeatable; all by default.")
    parser.add_argument("--instances", type=int, action="append", help="Repeatable; 12, 64 and 256 by default.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=2000, help="of a round")
    arguments = parser.parse_args()
    results = list(
        measured(
            arguments.policy or list(POLICIES), arguments.instances or INSTANCES, arguments.rounds, arguments.requests
        )
    )
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        json.dump({"bench": "decision", "machine": machine, "results": results}, sys.stdout)
        print()
        return
    for result in results:
        print(f"{result['name']:40}{result['value']:>10.2f} {result['unit']:6} n={result['n']}")


def measured(
    names: list[str], instances: tuple[int, ...] | list[int], rounds: int, requests: int
) -> Iterator[dict[str, object]]:
    """Take turns, so that a busy moment of the machine falls on all alike."""
    deciders = {(name, num): decider(POLICIES[name], num) for name in names for num in instances}
    times: dict[tuple[str, int], list[float]] = {case: [] for case in deciders}
    for number in range(rounds + 1):
        for case, decide in deciders.items():
            start_s = time.process_time()
            for _ in range(requests):
                decide()
            if number:  # the first round warms up
                times[case].append(1e6 * (time.process_time() - start_s) / requests)
    n = rounds * requests
    medians = {case: statistics.median(values) for case, values in times.items()}
    for (name, num), value in medians.items():
        yield {"name": f"decision_cpu_us.{name}.{num}", "value": value, "unit": "us", "n": n}
    for name in names:
        growth = medians[name, max(instances)] / medians[name, min(instances)]
        yield {"name": f"decision_cpu_growth.{name}", "value": growth, "unit": "ratio", "n": n}


def decider(text: str, num: int) -> Callable[[], int]:
    """Prepare a policy over so many instances, and give what decides about one request after the other."""
    rng = random.Random(num)
    ids = tuple(f"i{number:03}" for number in range(num))
    table, policy = InstanceTable(ids), policy_from(text, seed=1)
    for name in ids:
        table.replace(name, reported(rng), now_s=0.0)
    index = PrefixIndex(dict.fromkeys(ids, 1056))
    talks = [[(talk, block) for block in range(rng.randint(4, MOST_BLOCKS))] for talk in range(NUM_TALKS)]
    for talk in talks:
        index.sent(rng.choice(ids), talk)
    forecasts = np.array([forecast(rng) for _ in ids])
    clock_s = 0.0
    least_s = 1.0 / (3 * num)  # between two requests

    def decide() -> int:
        nonlocal clock_s
        clock_s += least_s
        talk = talks[int(clock_s / least_s) % NUM_TALKS]
        request = RequestIndicators(prompt_tokens=BLOCK_TOKENS * len(talk) + 100)
        if policy.needs_prefix:
            hits = index.look_up(talk, ids)
            request = RequestIndicators(prompt_tokens=request.prompt_tokens, prefix_class=hits.deepest)
            known = table.candidates(request, clock_s)
            known.add({"prefix_hit_tokens": BLOCK_TOKENS * hits.num_blocks})
        else:
            known = table.candidates(request, clock_s)
        looked = policy.shortlist(known)
        if policy.needs_forecast:
            made = forecasts if looked.rows is None else forecasts[looked.rows]
            looked.add(forecast_columns(made.tolist(), policy.forecast_fields))
        chosen = looked.row(policy.choose(looked))
        table.sent(ids[chosen], clock_s, prefill_tokens=100.0)
        if policy.needs_prefix:
            index.sent(ids[chosen], talk)
        if table.known.reported[2, chosen] > 20:  # as many are reserved: it tells of itself
            table.replace(ids[chosen], reported(rng), clock_s)
        return chosen

    return decide


def reported(rng: random.Random) -> dict[str, float]:
    """What a busy instance tells of itself."""
    return {
        "num_running": float(rng.randint(20, 48)),
        "num_waiting": float(rng.randint(0, 5)),
        "num_reserved": 0.0,
        "num_total_blocks": 1056.0,
        "num_free_blocks": float(rng.randint(0, 500)),
        "num_reserved_blocks": 0.0,
        "num_waiting_blocks": float(rng.randint(0, 100)),
        "queued_prefill_tokens": float(rng.randint(0, 2000)),
        "context_tokens": float(rng.randint(3000, 12000)),
        "requests_per_minute": float(rng.randint(100, 200)),
    }


def forecast(rng: random.Random) -> Forecast:
    """What a sidecar might answer."""
    ttft_s = rng.uniform(0.05, 0.5)
    return Forecast(
        request_id="r", ttft_s=ttft_s, e2e_s=ttft_s + rng.uniform(5, 10), tpot_s=0.03, queue_s=0.01, output_tokens=210,
        num_preemptions=0, prefix_hit_tokens=0, delay_sum_s=rng.uniform(0, 3), delay_worst_s=0.1, others_preempted=0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
