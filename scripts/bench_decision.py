"""What a decision costs by itself: processor time per request of what schedulers and the simulator share.

A request goes through the decision core: prefix look-up, shortlist, forecasts as they come from sidecars, scores,
choice, reservation; over a table of indicators that changes as requests are sent. The forecasts are values from a
table: `bench_predictor.py` measures what it takes to make them, `bench_scheduler.py` what it takes to ask for them.

- `decision_cpu_us.{policy}.{instances}`: median over rounds of the mean of a round; forecasts come as columns.
- `decision_served_cpu_us.{policy}.{instances}`: the same as live schedulers need it: forecasts come as one answer for
  each instance, and what an explanation needs is kept.
- `decision_cpu_growth.{policy}`: the cost with the most instances over the cost with the fewest.

With `--deadlines`, decisions of requests with targets by policies that read gains and missed deadlines, beside `block`:

- `decision_cpu_us`, `decision_served_cpu_us`: as above.
- `decision_made_cpu_us.{policy}.{instances}`: with the forecasts, made in this process on engines with requests, which
  have changed since the last decision.
- `decision_cpu_ratio`, `decision_served_cpu_ratio`, `decision_made_cpu_ratio`: over `block` with as many forecasts.

With `--legs`, decisions among 8 prefill and 8 decode instances beside those among 16 that do both:

- `legs_core_cpu_us.{policy}.{cluster}`: the decision alone, as above with one answer for each instance.
- `legs_cpu_us.{policy}.{cluster}`: with the forecasts, made in this process on engines with requests.
- `legs_core_cpu_ratio.{policy}`, `legs_cpu_ratio.{policy}`: of both clusters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from predictor.config import CONSUMER, PRODUCER, PRODUCER_AND_CONSUMER, EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.forecast_result import TO_THE_END, Forecast
from predictor.profile import load_profile
from predictor.request import LEGS, RequestFacts, Slo
from scheduler.candidate import CandidateStatus, forecast_columns
from scheduler.candidates import RequestIndicators
from scheduler.core import DecisionRules, SchedulerCore
from scheduler.instance_table import InstanceTable
from scheduler.instances import InstanceDirectory
from scheduler.intentions import Answer, Ask, AskLegs, Placed, Reserve
from scheduler.objectives import NO_OBJECTIVE, Objective
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
BY_DEADLINE = ("slo", "gorouting", "gain")
WITH_DEADLINES = {
    **{name: name for name in ("block", *BY_DEADLINE)},
    **{f"{name}-k8": f"{name}: k = 8" for name in ("block", *BY_DEADLINE)},
}
KINDS = {"core": "decision_cpu", "served": "decision_served_cpu", "made": "decision_made_cpu"}
TARGETS = Slo(ttft_s=2.0, tpot_s=0.2)
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
    parser.add_argument("--deadlines", action="store_true", help="Requests with targets, by policies that read gains.")
    parser.add_argument("--legs", action="store_true", help="Requests with two legs, among instances with roles.")
    parser.add_argument(
        "--decode-running",
        type=int,
        default=24,
        help="With --legs: requests that a decode instance runs.",
    )
    arguments = parser.parse_args()
    if arguments.legs:
        results = list(measured_legs(arguments.rounds, arguments.requests, arguments.decode_running))
        report("decision", results, as_json=arguments.json)
        return
    instances = arguments.instances or INSTANCES
    if arguments.deadlines:
        results = list(measured_by_deadline(instances, arguments.rounds, arguments.requests))
    else:
        results = list(measured(arguments.policy or list(POLICIES), instances, arguments.rounds, arguments.requests))
    report("decision", results, as_json=arguments.json)


def measured(
    names: list[str], instances: tuple[int, ...] | list[int], rounds: int, requests: int
) -> Iterator[dict[str, object]]:
    """Measure in turns, so that a busy moment of the machine affects all alike."""
    cases = [(name, num, kind) for name in names for num in instances for kind in ("core", "served")]
    medians = timed({case: decider(POLICIES[case[0]], case[1], case[2]) for case in cases}, rounds, requests)
    n = rounds * requests
    yield from rows_of(medians, n)
    for name in names:
        growth = medians[name, max(instances), "core"] / medians[name, min(instances), "core"]
        yield {"name": f"decision_cpu_growth.{name}", "value": growth, "unit": "ratio", "n": n}


def measured_by_deadline(
    instances: tuple[int, ...] | list[int], rounds: int, requests: int
) -> Iterator[dict[str, object]]:
    """Measure decisions of requests with targets."""
    cases = [(name, num, kind) for name in WITH_DEADLINES for num in instances for kind in KINDS]
    deciders = {case: decider(WITH_DEADLINES[case[0]], case[1], case[2], targets=TARGETS) for case in cases}
    medians = timed(deciders, rounds, requests)
    n = rounds * requests
    yield from rows_of(medians, n)
    for (name, num, kind), value in medians.items():
        plain = "block-k8" if name.endswith("-k8") else "block"
        if name != plain:
            ratio = value / medians[plain, num, kind]
            yield {"name": f"{KINDS[kind]}_ratio.{name}.{num}", "value": ratio, "unit": "ratio", "n": n}


Case = tuple[str, int, str]  # policy, instances, kind


def timed(deciders: Mapping[Case, Callable[[], int]], rounds: int, requests: int) -> dict[Case, float]:
    """Return the median over rounds of microseconds a decision; where forecasts are made, a round has fewer."""
    times: dict[Case, list[float]] = {case: [] for case in deciders}
    for number in range(rounds + 1):
        for case, decide in deciders.items():
            num = max(1, requests // (10 * case[1])) if case[2] == "made" else requests
            start_s = time.process_time()
            for _ in range(num):
                decide()
            if number:  # the first round warms up
                times[case].append(1e6 * (time.process_time() - start_s) / num)
    return {case: statistics.median(values) for case, values in times.items()}


def rows_of(medians: Mapping[Case, float], n: int) -> Iterator[dict[str, object]]:
    """Yield what was measured."""
    for (name, num, kind), value in medians.items():
        yield {"name": f"{KINDS[kind]}_us.{name}.{num}", "value": value, "unit": "us", "n": n}


def decider(text: str, num: int, kind: str, *, targets: Slo | None = None) -> Callable[[], int]:
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
        rules=DecisionRules(explains=kind == "served"),
        prefixes=PromptPrefixes(table, dict.fromkeys(ids, 1056)),
        seed=1,
    )
    prompts = [prompt(number, rng.randint(4, MAX_BLOCKS)) for number in range(NUM_PROMPTS)]
    for one in prompts:
        core.prefixes.sent(rng.choice(ids), one)
    forecasts = np.array([forecast(rng) for _ in ids])
    answers = {name: Answer(CandidateStatus.FORECAST, one) for name, one in zip(ids, forecasts, strict=True)}
    forecasters = {name: Forecaster(loaded("both", 24, rng, targets)) for name in ids} if kind == "made" else {}
    names = core.policy.forecast_columns
    objective = NO_OBJECTIVE if targets is None else Objective(slo=targets)
    clock_s, serial = 0.0, 0
    pause_s = 1.0 / (3 * num)  # between two requests

    def decide() -> int:
        nonlocal clock_s, serial
        clock_s += pause_s
        serial += 1
        blocks = prompts[int(clock_s / pause_s) % NUM_PROMPTS]
        prompt_tokens = BLOCK_TOKENS * len(blocks.names) + 100
        indicators = RequestIndicators(prompt_tokens=prompt_tokens)
        if targets is not None:
            indicators.due_s, indicators.tpot_slo_s = clock_s + (targets.ttft_s or 0.0), targets.tpot_s or 0.0
        request = PlacementRequest(indicators=indicators, blocks=blocks, arrived_s=clock_s, objective=objective)
        decision = core.decision(request)
        intention = decision.start(clock_s)
        if isinstance(intention, Ask) and kind == "made":
            intention = decision.answers(made(forecasters, intention, prompt_tokens, targets, serial), clock_s)
        elif isinstance(intention, Ask) and kind == "served":
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


def made(
    forecasters: Mapping[str, Forecaster], ask: Ask, prompt_tokens: int, slo: Slo | None, serial: int
) -> dict[str, Answer]:
    """Make the forecasts that a decision asks for."""
    found = {}
    for name in ask.instance_ids:
        now_s = forecasters[name].engine.now_s
        facts = RequestFacts(request_id="r", prompt_tokens=prompt_tokens, output_tokens=200, arrival_s=now_s, slo=slo)
        (value,) = forecasters[name].forecast(
            [facts],
            now_s,
            delays=ask.with_delays,
            only_deadlines=ask.with_delays and ask.until != TO_THE_END,
            min_slack_s=ask.min_slack_s,
            serial=serial,
        )
        found[name] = Answer(CandidateStatus.FORECAST, value)
    return found


# Requests with two legs.

LEG_POLICIES = {
    "block": "block",
    "block-decode_first": "block: order = 'decode-first'",
    "block-always": "block: disaggregate = 'always'",
    "pd_least": "pd_least",
    "pd_threshold": "pd_threshold",
}
CLUSTERS = {"both16": {"both": 16}, "prefill8_decode8": {"prefill": 8, "decode": 8}}
NUM_RUNNING = {"both": 24, "prefill": 2}
KV_ROLES = {"both": PRODUCER_AND_CONSUMER, "prefill": PRODUCER, "decode": CONSUMER}


def measured_legs(rounds: int, requests: int, decode_running: int) -> Iterator[dict[str, object]]:
    """Measure both clusters in turns."""
    cases = [(name, kind, made) for name in LEG_POLICIES for kind in CLUSTERS for made in (False, True)]
    deciders = {
        case: legs_decider(LEG_POLICIES[case[0]], CLUSTERS[case[1]], decode_running, made=case[2]) for case in cases
    }
    times: dict[tuple[str, str, bool], list[float]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case, decide in deciders.items():
            num = max(1, requests // 20) if case[2] else requests
            start_s = time.process_time()
            for _ in range(num):
                decide()
            if number:  # the first round warms up
                times[case].append(1e6 * (time.process_time() - start_s) / num)
    medians = {case: statistics.median(values) for case, values in times.items()}
    for made, what in ((False, "legs_core"), (True, "legs")):
        n = rounds * (max(1, requests // 20) if made else requests)
        for name in LEG_POLICIES:
            both, apart = (medians[name, kind, made] for kind in CLUSTERS)
            for kind, value in zip(CLUSTERS, (both, apart), strict=True):
                yield {"name": f"{what}_cpu_us.{name}.{kind}", "value": value, "unit": "us", "n": n}
            yield {"name": f"{what}_cpu_ratio.{name}", "value": apart / both, "unit": "ratio", "n": n}


def legs_decider(text: str, cluster: Mapping[str, int], decode_running: int, *, made: bool) -> Callable[[], None]:
    """Prepare a core over instances with roles, and return a function that decides for one request."""
    rng = random.Random(1)
    roles = {f"{role}{number:02}": role for role, num in cluster.items() for number in range(num)}
    directory = InstanceDirectory(InstanceTable(roles), roles)
    for name in roles:
        directory.table.replace(name, reported(rng), now_s=0.0)
    core = SchedulerCore(text, directory, random=rng.random, seed=1)
    num_running = {**NUM_RUNNING, "decode": decode_running}
    forecasters = (
        {name: Forecaster(loaded(role, num_running[role], rng)) for name, role in roles.items()} if made else {}
    )
    known = {leg: {name: Answer(CandidateStatus.FORECAST, forecast(rng)) for name in roles} for leg in LEGS}
    indicators, serial = RequestIndicators(prompt_tokens=800), 0

    def answer(name: str, ask: Ask) -> Answer:
        if not made:
            return known[ask.leg][name]
        forecaster = forecasters[name]
        now_s = forecaster.engine.now_s
        facts = RequestFacts(
            request_id="r", prompt_tokens=800, output_tokens=200, arrival_s=now_s, leg=ask.leg, in_s=ask.in_s
        )
        (value,) = forecaster.forecast([facts], now_s, delays=ask.with_delays, serial=serial)
        return Answer(CandidateStatus.FORECAST, value)

    def decide() -> None:
        nonlocal serial
        serial += 1  # engines report between two decisions, and do not during one
        decision = core.decision(PlacementRequest(indicators=indicators))
        intention = decision.start(0.0)
        while not isinstance(intention, Placed):
            if isinstance(intention, Ask | AskLegs):
                answers = {name: answer(name, ask) for ask in intention.asks for name in ask.instance_ids}
                intention = decision.answers(answers, 0.0)
            elif isinstance(intention, Reserve):
                intention = decision.reserved(10.0, 0.0)
            else:
                raise TypeError(f"{intention} was not expected")

    return decide


def loaded(role: str, num_running: int, rng: random.Random, slo: Slo | None = None) -> Engine:
    """An engine in the middle of requests."""
    config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        num_gpu_blocks=2000,
        max_model_len=2048,
        kv_role=KV_ROLES[role],
        kv_bytes_per_token=524_288,
    )
    engine = Engine(config, load_profile("llama-2-7b-a30").step_time)
    for number in range(num_running):
        prompt_tokens, output_tokens = rng.randint(50, 800), rng.randint(20, 600)
        facts = RequestFacts(request_id=f"r{number}", prompt_tokens=prompt_tokens, output_tokens=output_tokens, slo=slo)
        engine.add(facts)
    engine.advance(5.0)  # all prompts are computed by then
    return engine


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
        "decode_step_s": rng.uniform(0.02, 0.05),
        "queued_prefill_s": rng.uniform(0.0, 0.3),
        "least_tpot_slo_s": 0.1,
        "efficient_step_s": rng.uniform(0.09, 0.11),
        "step_overhead_s": 0.003,
        "prefill_token_s": 1e-4,
    }


def forecast(rng: random.Random) -> Forecast:
    """What a sidecar might answer."""
    ttft_s = rng.uniform(0.05, 0.5)
    return Forecast(
        request_id="r", ttft_s=ttft_s, e2e_s=ttft_s + rng.uniform(5, 10), tpot_s=0.03, queue_s=0.01, output_tokens=210,
        num_preemptions=0, prefix_hit_tokens=0, delay_sum_s=rng.uniform(0, 3), delay_worst_s=0.1, others_preempted=0,
        others_missed=0.0, gain_before=900.0, gain_after=rng.uniform(900, 1100), least_slack_s=0.05,
    )  # fmt: skip


if __name__ == "__main__":
    main()
