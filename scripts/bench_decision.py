"""What a decision costs by itself: processor time per request of what schedulers and the simulator share.

A request goes through the decision core: prefix look-up, shortlist, forecasts as they come from sidecars, scores,
choice, reservation; over a table of indicators that changes as requests are sent. The forecasts are values from a
table: `bench_predictor.py` measures what it takes to make them, `bench_scheduler.py` what it takes to ask for them.

- `decision_cpu_us.{policy}.{instances}`: median over rounds of the mean of a round; forecasts come as columns.
- `decision_served_cpu_us.{policy}.{instances}`: the same as live schedulers need it: forecasts come as one answer for
  each instance, and what an explanation needs is kept.
- `decision_cpu_growth.{policy}`: the cost with the most instances over the cost with the fewest.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from predictor.forecast_result import Forecast
from scheduler.candidate import CandidateStatus, forecast_columns
from scheduler.candidates import RequestIndicators
from scheduler.core import DecisionRules, SchedulerCore
from scheduler.decision import Answer, Ask, Reserve
from scheduler.instance_table import InstanceTable
from scheduler.instances import InstanceDirectory
from scheduler.placement import PlacementRequest
from scheduler.prefix import PromptPrefixes
from scheduler.prefix.prompt import PromptBlocks
from scripts.report import report

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
NUM_PROMPTS = 400
BLOCK_TOKENS = 16
MAX_BLOCKS = 60  # of a prompt


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
    report("decision", results, as_json=arguments.json)


def measured(
    names: list[str], instances: tuple[int, ...] | list[int], rounds: int, requests: int
) -> Iterator[dict[str, object]]:
    """Measure in turns, so that a busy moment of the machine affects all alike."""
    cases = [(name, num, served) for name in names for num in instances for served in (False, True)]
    deciders = {case: decider(POLICIES[case[0]], case[1], served=case[2]) for case in cases}
    times: dict[tuple[str, int, bool], list[float]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case, decide in deciders.items():
            start_s = time.process_time()
            for _ in range(requests):
                decide()
            if number:  # the first round warms up
                times[case].append(1e6 * (time.process_time() - start_s) / requests)
    n = rounds * requests
    medians = {case: statistics.median(values) for case, values in times.items()}
    for (name, num, served), value in medians.items():
        kind = "decision_served_cpu_us" if served else "decision_cpu_us"
        yield {"name": f"{kind}.{name}.{num}", "value": value, "unit": "us", "n": n}
    for name in names:
        growth = medians[name, max(instances), False] / medians[name, min(instances), False]
        yield {"name": f"decision_cpu_growth.{name}", "value": growth, "unit": "ratio", "n": n}


def decider(text: str, num: int, *, served: bool) -> Callable[[], int]:
    """Prepare a core over instances, and return a function that decides for one request after the other."""
    rng = random.Random(num)
    ids = tuple(f"i{number:03}" for number in range(num))
    table = InstanceTable(ids)
    for name in ids:
        table.replace(name, reported(rng), now_s=0.0)
    core = SchedulerCore(
        text,
        InstanceDirectory(table),
        random=rng.random,
        rules=DecisionRules(explains=served),
        prefixes=PromptPrefixes(table, dict.fromkeys(ids, 1056)),
        seed=1,
    )
    prompts = [prompt(number, rng.randint(4, MAX_BLOCKS)) for number in range(NUM_PROMPTS)]
    for one in prompts:
        core.prefixes.sent(rng.choice(ids), one)
    forecasts = np.array([forecast(rng) for _ in ids])
    answers = {name: Answer(CandidateStatus.FORECAST, one) for name, one in zip(ids, forecasts, strict=True)}
    names = {*core.policy.forecast_fields, "predicted_e2e_s"}
    clock_s = 0.0
    pause_s = 1.0 / (3 * num)  # between two requests

    def decide() -> int:
        nonlocal clock_s
        clock_s += pause_s
        blocks = prompts[int(clock_s / pause_s) % NUM_PROMPTS]
        indicators = RequestIndicators(prompt_tokens=BLOCK_TOKENS * len(blocks.names) + 100)
        decision = core.decision(PlacementRequest(indicators=indicators, blocks=blocks, arrived_s=clock_s))
        intention = decision.start(clock_s)
        if isinstance(intention, Ask) and served:
            intention = decision.answers(answers, clock_s)
        elif isinstance(intention, Ask):
            rows = intention.candidates.rows
            asked = forecasts if rows is None else forecasts[rows]
            columns = forecast_columns(asked.tolist(), names)
            intention = decision.answers_in_columns((columns,), clock_s)
        if not isinstance(intention, Reserve):
            raise TypeError(f"{intention} is no reservation")
        decision.reserved(10.0, clock_s)
        name, row = intention.instance_id, intention.row
        table.sent(name, clock_s, prefill_tokens=100.0)
        if table.known.reported[2, row] > 20:  # that many are reserved: it reports
            table.replace(name, reported(rng), clock_s)
        return row

    return decide


def prompt(number: int, num_blocks: int) -> PromptBlocks:
    """Name the blocks of a prompt that shares nothing with others."""
    return PromptBlocks(names=tuple((number, block) for block in range(num_blocks)), block_tokens=BLOCK_TOKENS)


def reported(rng: random.Random) -> dict[str, float]:
    """What a busy instance reports."""
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
