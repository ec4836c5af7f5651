"""Whether promises hold: to classes and tenants, under overload, and live as in the simulator.

Two emulated engines (Llama-2-7B on A30, `decode_then_edf`), their sidecars, a scheduler with policy `slo` and a gateway
run as processes of this machine; all traffic is on its loopback. `block bench`'s sender sends the same requests that
the simulator serves: equal arrivals, lengths, mix and seed. In the simulator a decision takes as long as a
live one of a request that need not wait, with the reservation at its start: live ones
are conditional, so that no two decisions take the same room. All attainment is of *all* tokens by their deadlines.

- `mixed.*`: chat (TTFT 1 s, TPOT 60 ms) and agents (3 s, 120 ms), which are shed when late, and best effort, at a load
  below and above capacity: attainment by class, live and simulated.
- `fairness.*`: tenants `calm` and `loud` have equal shares; `loud` sends once as much as `calm`, then five times as
  much. Turns are fair, and each tenant has a limit of waiting requests.
- `overload.*`: chat and best effort at twice the capacity: what is attained of what was admitted, the best-effort share
  of the tokens, and how many requests got no answer.
- `retry_after.*`: how right the `Retry-After` of shed requests is. A scheduler knows the waiting requests, and not
  those that will come. So a time is right if the same request, sent again after it, is admitted without waiting, and
  sent earlier is not, provided that no other request comes after it was shed. Simulated, that moment is found by
  repeating the run up to then with a copy of the request (`simulator/retry_accuracy.py`). Live, it is observed after
  the last request of a run: a request that is shed then would be admitted once the admission queue is empty.
- `machine.*`: how late requests were sent, and the share of the processors that was used. A run is limited by the
  machine (`cpu_limited` 1) where a hundredth of the requests was sent more than 50 ms late.

What a class attains in overload differs much from run to run, live and simulated. With `--seeds N` each load runs N
times, with other requests each time; results are means over the runs, and `*.difference.ci95` is half the width of the
interval of the mean difference.

With `--decision-ms`, the loads are only simulated, once for each of these times of a decision: what a class attains in
overload depends on it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from predictor.gain import ServedRequests
from predictor.request import BEST_EFFORT, CLASSES, REAL_TIME, Slo
from scheduler.objectives import SERVE_LATE
from scripts.report import report
from services.cluster import Cluster, ClusterSettings, running
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from services.logs import configure
from simulator.assembly import simulate
from simulator.capacity import half_width
from simulator.load_plan import Planned, Timing, planned, synthetic
from simulator.load_report import SHED, RequestResult, served_requests
from simulator.metrics import latencies
from simulator.metrics import served_requests as simulated_requests
from simulator.mix import Mix, mix_from, mixed
from simulator.result import STATUSES, RunResult
from simulator.retry_accuracy import Rerun, RetryTime, retry_times
from simulator.scenario import Scenario, scenario_from
from simulator.workload import RequestLengths, Workload, workload

PROFILE, MODEL = "llama-2-7b-a30", "promises"
NUM_ENGINES = 2
# Chats per second that the engines serve in time: just below the 14.6 of `block capacity --mix`.
CAPACITY = 14.0
ENGINE = {"max_num_seqs": 48, "max_num_batched_tokens": 512, "num_gpu_blocks": 1057, "max_model_len": 2048}
BATCHER = "decode_then_edf"
PROMPT_TOKENS, OUTPUT_TOKENS = "lognormal:200:0.6", "lognormal:100:0.5"
TURN, MAX_HELD_OF_TENANT, MARGIN_MS = "fair", 64, 50
POLICY = "slo: backlog = 0.1"
TABLES = """
[scheduler]
sidecar-deadline-ms = 500
[gateway]
schedule-s = 75.0
"""
CHAT = {"name": "chat", "ttft_slo_s": 1.0, "tpot_slo_s": 0.06, "when_late": "shed"}
AGENT = {"name": "agent", "ttft_slo_s": 3.0, "tpot_slo_s": 0.12, "when_late": "shed"}
BATCH = {"name": "batch", "class": BEST_EFFORT, "ttft_slo_s": 30.0}
CALM, LOUD = {**CHAT, "name": "calm", "tenant": "calm"}, {**CHAT, "name": "loud", "tenant": "loud"}
MIXED = mix_from([{**CHAT, "share": 4}, {**AGENT, "share": 4}, {**BATCH, "share": 2}])
OVERLOAD = mix_from([{**CHAT, "share": 8}, {**BATCH, "share": 2}])
PROBED_FROM_S, PROBED_UNTIL_S = 5.0, 12.0  # of a simulated run; before, schedulers do not know the rate of admission
LATE_S = 0.05
NUM_PROBED = 8  # shed requests of a simulated run whose time is checked
NO_SLO = Slo()
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseRun:
    """A load: how many requests of a mix per second of engine time, and for how long."""

    name: str
    mix: Mix
    rate: float
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The results of a live load, and the share of this machine's processor time that was used."""

    results: list[RequestResult]
    cpu_share: float


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load, engine time")
    parser.add_argument("--speed", type=float, default=1.0, help="engine seconds per second")
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument(
        "--only", action="append", help="a load, such as mixed.heavy, or all that start so, such as mixed; repeatable"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each load")
    parser.add_argument(
        "--decision-ms",
        type=float,
        action="append",
        help="simulate only, with decisions that take this long; repeatable",
    )
    arguments = parser.parse_args()
    configure("warning", "text")
    cases = [case for case in cases_of(arguments) if is_among(case.name, arguments.only)]
    if not cases:
        names = dict.fromkeys(case.name for case in cases_of(arguments))
        parser.error(f"--only: no load is named so; there are {', '.join(names)}")
    if arguments.decision_ms:
        rows = means([row for case in cases for row in rows_by_decision_time(case, arguments)])
        report("accuracy_promises", rows, as_json=arguments.json, settings=vars(arguments))
        return
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder, "promises.toml")
        tables.write_text(TABLES, encoding="utf-8")
        live = uvloop.run(run_live(cases, str(tables), arguments))
    decision_s = arguments.speed * min(decision_s_of(run.results) for run in live)
    scenario = scenario_of(arguments, decision_s)
    pairs = zip(cases, live, strict=True)
    rows = means([row for case, run in pairs for row in rows_of(case, run, scenario, arguments.speed)])
    rows.append({"name": "machine.decision_s", "value": decision_s, "unit": "engine s", "n": len(cases)})
    report("accuracy_promises", rows, as_json=arguments.json, settings=vars(arguments))


def is_among(name: str, only: Sequence[str] | None) -> bool:
    """Return whether a load was asked for."""
    return not only or any(name == one or name.startswith(f"{one}.") for one in only)


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means of rows with equal names, and intervals of differences."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for one in rows:
        by_name.setdefault(one["name"], []).append(one)
    found = []
    for name, alike in by_name.items():
        values, num = [one["value"] for one in alike], sum(one["n"] for one in alike)
        found.append({**alike[0], "value": float(np.mean(values)), "n": num})
        if name.endswith(".difference") and len(values) > 1:
            found.append({**alike[0], "name": f"{name}.ci95", "value": half_width(values), "n": len(values)})
    return found


def cases_of(arguments: argparse.Namespace) -> list[PromiseRun]:
    """Return all loads, the lightest first; each as often as there are seeds."""
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    return [case for seed in seeds for case in cases_with(seed, arguments.seconds)]


def cases_with(seed: int, seconds: float) -> list[PromiseRun]:
    """Return all loads, the lightest first."""

    def case(name: str, mix: Mix, rate: float) -> PromiseRun:
        return PromiseRun(name=name, mix=mix, rate=rate, seconds=seconds, seed=seed)

    share = 0.25 * CAPACITY  # of each tenant: half of what the engines can serve
    return [
        case("mixed.light", MIXED, 0.8 * CAPACITY),
        case("fairness.even", mix_from([{**CALM, "share": 1}, {**LOUD, "share": 1}]), 2 * share),
        case("fairness.flood", mix_from([{**CALM, "share": 1}, {**LOUD, "share": 5}]), 6 * share),
        case("mixed.heavy", MIXED, 1.5 * CAPACITY),
        case("overload", OVERLOAD, 2.0 * CAPACITY),
    ]


def plan_of(case: PromiseRun) -> list[Planned]:
    """Draw the requests, and when they are due."""
    generator = np.random.default_rng(case.seed)
    drawn = synthetic(round(case.rate * case.seconds), PROMPT_TOKENS, OUTPUT_TOKENS, generator)
    requests, entries = mixed(drawn, case.mix, case.seed)
    return planned(requests, Timing(kind="poisson", rate=case.rate), generator, mix_entries=entries)


# Live.


async def run_live(cases: Sequence[PromiseRun], tables: str, arguments: argparse.Namespace) -> list[LiveRun]:
    """Start the system, and send it one load after the other."""
    flags = [part for name, value in ENGINE.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    settings = ClusterSettings(
        instances=NUM_ENGINES, schedulers=arguments.schedulers, policies=(POLICY,), port=0, log_level="warning",
        tables_file=tables,
        engine_flags=("--profile", PROFILE, "--speed", str(arguments.speed), "--served-model-name", MODEL,
                      "--batcher", BATCHER, "--no-enable-prefix-caching", *flags),
        scheduler_flags=("--admission-turn", TURN, "--max-held-of-tenant", str(MAX_HELD_OF_TENANT),
                         "--deadline-margin-ms", str(MARGIN_MS)),
    )  # fmt: skip
    async with running(settings) as cluster:
        return [await sent(case, cluster, arguments.speed) for case in cases]


async def sent(case: PromiseRun, cluster: Cluster, speed: float) -> LiveRun:
    """Send one load until its last request has ended."""
    form = RequestFormat(model=MODEL, output="ignore-eos", time_scale=speed, seed=case.seed)
    origin = origin_of(cluster.gateway_urls[POLICY])
    begin_s, used_s = time.monotonic(), busy_s()
    results = await run_plan(plan_of(case), origin, form, LoadLimits(timeout_s=300.0), lambda _: None)
    cpu_share = (busy_s() - used_s) / (time.monotonic() - begin_s) / (os.cpu_count() or 1)
    return LiveRun(results=list(results), cpu_share=cpu_share)


def busy_s() -> float:
    """Return the processor seconds of this machine so far."""
    busy = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    return (sum(map(int, busy)) - int(busy[3]) - int(busy[4])) / TICKS_PER_S


# Simulated.


def scenario_of(arguments: argparse.Namespace, decision_s: float) -> Scenario:
    """Describe the live system."""
    engine = {**ENGINE, "batcher": BATCHER, "enable_prefix_caching": False}
    conditions = {"admission_turn": TURN, "max_held_of_tenant": MAX_HELD_OF_TENANT, "network_s": decision_s,
                  "deadline_margin_s": MARGIN_MS / 1000,
                  "num_schedulers": arguments.schedulers, "sample_s": 0.0}  # fmt: skip
    return scenario_from({
        "instances": {"profile": PROFILE, "count": NUM_ENGINES, "engine": engine}, "conditions": conditions,
    })  # fmt: skip


def workload_of(results: Sequence[RequestResult]) -> Workload:
    """Return the requests, in the order in which they were sent, at these times."""
    plans = [one.plan for one in results]
    lengths = RequestLengths(
        prompt_tokens=np.array([plan.prompt_tokens for plan in plans]),
        output_tokens=np.array([plan.output_tokens for plan in plans]),
    )
    levels = served_requests(results, NO_SLO).levels
    service = replace(levels, when_late=np.array([plan.when_late or SERVE_LATE for plan in plans]))
    return replace(workload(lengths, np.array([sent_at(one) for one in results])), service=service)


def sent_at(one: RequestResult) -> float:
    """Return when a request was sent, from the start of the run on."""
    return one.plan.due_s + one.sent_s


def simulated(work: Workload, scenario: Scenario, seed: int) -> RunResult:
    """Serve the requests in the simulator."""
    return simulate(scenario.instance_specs(), work, POLICY, scenario.conditions, seed=seed)


# Results.


def decision_s_of(results: Sequence[RequestResult]) -> float:
    """Return the time of a decision without waiting, which the times in replies include: that of the fastest tenth."""
    return float(np.percentile([one.decision_s for one in results if one.decision_s is not None], 10))


def rows_of(case: PromiseRun, live: LiveRun, scenario: Scenario, speed: float) -> list[dict[str, Any]]:
    """Return the results of a case, live and simulated."""
    results = sorted(live.results, key=sent_at)
    work = workload_of(results)
    run = simulated(work, scenario, case.seed)
    outcomes = {"live": outcomes_live(results), "simulated": outcomes_simulated(run)}
    rows = class_rows(case, results, outcomes)

    def add(name: str, value: float, unit: str, n: int) -> None:
        rows.append({"name": f"{case.name}.{name}", "value": value, "unit": unit, "n": n})

    failures = [one for one in results if one.failure not in (None, SHED)]
    add("unanswered", len(failures), "requests", len(results))
    no_time = [one for one in results if one.failure == SHED and (one.retry_after_s is None or not one.shed_reason)]
    add("shed_without_time_or_reason", len(no_time), "requests", len(results))
    if case.mix is OVERLOAD:
        errors_of = {"live": retry_errors_live(results), "simulated": retry_errors(run, scenario, case.seed)}
        for name, errors in errors_of.items():
            if errors:
                add(f"retry_after.error.{name}.median", float(np.median(errors)), "ratio", len(errors))
    late_s = float(np.percentile([one.sent_s for one in results], 99))
    add("machine.sent_late_s.p99", late_s, "engine s", len(results))
    add("machine.cpu_share", live.cpu_share, "of all", 1)
    add("machine.cpu_limited", float(late_s > LATE_S * speed), "yes or no", 1)
    return rows


Outcomes = tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.int64]]


def class_rows(
    case: PromiseRun, results: Sequence[RequestResult], outcomes: Mapping[str, Outcomes]
) -> list[dict[str, Any]]:
    """Return what each class and tenant attains in each of several runs of the same requests."""
    rows: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, n: int) -> None:
        rows.append({"name": f"{case.name}.{name}", "value": value, "unit": unit, "n": n})

    levels = served_requests(results, NO_SLO).levels
    groups = {CLASSES[number]: levels.request_class == number for number in (0, 1)}
    if levels.tenant is not None:
        groups |= {f"tenant.{name}": levels.tenant == name for name in np.unique(levels.tenant).tolist()}
    for name, rows_in in groups.items():
        if not rows_in.any():
            continue
        shares = {}
        for kind, (attained, shed, tokens) in outcomes.items():
            admitted = rows_in & ~shed
            shares[kind] = float(attained[rows_in].mean())
            add(f"{name}.attained.{kind}", shares[kind], "ratio", int(rows_in.sum()))
            if admitted.any():
                of_admitted = float(attained[admitted].mean())
                add(f"{name}.attained_of_admitted.{kind}", of_admitted, "ratio", int(admitted.sum()))
            add(f"{name}.token_share.{kind}", float(tokens[rows_in].sum() / tokens.sum()), "ratio", int(rows_in.sum()))
            add(f"{name}.shed.{kind}", int(shed[rows_in].sum()), "requests", int(rows_in.sum()))
        if "live" in shares:
            add(f"{name}.attained.difference", shares["live"] - shares["simulated"], "ratio", int(rows_in.sum()))
    return rows


def rows_by_decision_time(case: PromiseRun, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the same of simulated runs alone, in which all requests are sent on time, by the time of a decision."""
    results = sorted((RequestResult(plan=plan) for plan in plan_of(case)), key=sent_at)
    work = workload_of(results)
    outcomes = {
        f"{ms:g}ms": outcomes_simulated(simulated(work, scenario_of(arguments, ms / 1000), case.seed))
        for ms in arguments.decision_ms
    }
    return class_rows(case, results, outcomes)


def outcomes_live(results: Sequence[RequestResult]) -> Outcomes:
    """Return which requests attained all deadlines, which were shed, and their tokens if they were served."""
    served = served_requests(results, NO_SLO)
    shed = np.array([one.failure == SHED for one in results])
    return whole(served), shed, np.where(served.finished, served.prompt_tokens + served.output_tokens, 0)


def outcomes_simulated(run: RunResult) -> Outcomes:
    """Return the same of a simulated run."""
    served = simulated_requests(run, latencies(run))
    shed = run.decisions.status == STATUSES.index(SHED)
    return whole(served), shed, np.where(served.finished, served.prompt_tokens + served.output_tokens, 0)


def whole(served: ServedRequests) -> npt.NDArray[np.bool_]:
    """Return which requests got all tokens that have a deadline by then."""
    num_due = np.where(np.isnan(served.levels.tpot_slo_s), 1, np.maximum(1, served.output_tokens))
    attained: npt.NDArray[np.bool_] = served.finished & (served.tokens_on_time >= num_due)
    return attained


def retry_errors(run: RunResult, scenario: Scenario, seed: int) -> list[float]:
    """Return the errors of `Retry-After` of a sample of the shed requests, in the simulator."""
    decisions = run.decisions
    in_time = (decisions.decided_s > PROBED_FROM_S) & (decisions.decided_s < PROBED_UNTIL_S)
    shed = np.flatnonzero((decisions.status == STATUSES.index(SHED)) & in_time)
    if len(shed) < NUM_PROBED:
        return []
    sample = shed[np.linspace(0, len(shed) - 1, NUM_PROBED).astype(np.int64)].tolist()
    again = Rerun(specs=scenario.instance_specs(), policy=POLICY, conditions=scenario.conditions, seed=seed)
    return [one.error for one in retry_times(run, again, sample)]


def retry_errors_live(results: Sequence[RequestResult]) -> list[float]:
    """Return the errors of `Retry-After` of real-time requests that were shed after the last request had come."""
    real_time = [one for one in results if one.plan.request_class == REAL_TIME and one.answered_s is not None]
    if not real_time:
        return []
    last_sent_s = max(sent_at(one) for one in results)
    emptied_s = max(answered_at(one) for one in real_time)
    times = [
        RetryTime(number=0, stated_s=one.retry_after_s, actual_s=emptied_s - answered_at(one))
        for one in real_time
        if one.failure == SHED and one.retry_after_s is not None and answered_at(one) > last_sent_s
    ]
    return [one.error for one in times]


def answered_at(one: RequestResult) -> float:
    """Return when a request was placed or shed, from the start of the run on."""
    return one.plan.due_s + (one.answered_s or 0.0)


if __name__ == "__main__":
    main()
