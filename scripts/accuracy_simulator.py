"""Compares the cluster simulator with the live system: both serve the same requests.

Emulated engines (Llama-2-7B on A30), their sidecars, a scheduler and a gateway run as processes of this machine, as in
`bench_live`. Simulated requests arrive at the times at which they came to the live gateway, and a simulated decision
takes as long as the median live one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import uvloop

from predictor.config import EngineConfig
from predictor.profile import load_profile
from services.cluster import ClusterSettings, running
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from services.logs import configure
from simulator.assembly import simulate
from simulator.conditions import Conditions
from simulator.fleet import InstanceSpec
from simulator.load_plan import Planned, Timing, by_arrival, planned
from simulator.load_report import RequestResult
from simulator.metrics import Latencies, latencies
from simulator.reference_data import data_folder
from simulator.traces import trace_from
from simulator.workload import RequestLengths, workload

PROFILE = "llama-2-7b-a30"
MODEL = "parity"
LENGTHS = "lengths/block_sharegpt_v3_58k_lens.csv"
ENGINE = {"max_num_seqs": 48, "max_num_batched_tokens": 512, "num_gpu_blocks": 1057, "max_model_len": 2048}


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second of engine time")
    parser.add_argument("--speed", type=float, default=1.0, help="engine seconds per second")
    parser.add_argument("--policy", action="append", help="repeatable; block, llumnix and round_robin by default")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    configure("warning", "text")
    rows = [row for policy in arguments.policy or ["block", "llumnix", "round_robin"]
            for row in compare(policy, arguments)]  # fmt: skip
    if arguments.json:
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        json.dump({"bench": "accuracy_simulator", "machine": machine, "results": rows}, sys.stdout)
        print()
        return
    for row in rows:
        print(f"{row['name']:36} {row['value']:12.4f} {row['unit']:9} n={row['n']}")


def compare(policy: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both, and return the results."""
    plan = plan_of(arguments)
    results = uvloop.run(live(policy, plan, arguments))
    good = [one for one in results if one.failure is None and one.ttft_s is not None and one.e2e_s is not None]
    decision_s = statistics.median(one.decision_s or 0.0 for one in good) * arguments.speed
    took = simulated(policy, good, decision_s, arguments)
    rows = [{"name": f"{policy}.failed_requests", "value": len(results) - len(good), "unit": "requests",
             "n": len(results)}]  # fmt: skip
    for name in ("ttft_s", "e2e_s"):
        live_s = np.array([getattr(one, name) - one.sent_s for one in good])
        simulated_s = getattr(took, name)
        for kind, value in (("live", live_s.mean()), ("simulated", simulated_s.mean())):
            rows.append({"name": f"{policy}.{name}.mean.{kind}", "value": float(value), "unit": "engine s",
                         "n": len(good)})  # fmt: skip
        difference = float(simulated_s.mean() / live_s.mean() - 1)
        rows.append({"name": f"{policy}.{name}.mean.difference", "value": difference, "unit": "ratio", "n": len(good)})
    return rows


def plan_of(arguments: argparse.Namespace) -> list[Planned]:
    """Draw ShareGPT requests that fit, and their arrival times."""
    generator = np.random.default_rng(arguments.seed)
    requests = trace_from(str(data_folder() / LENGTHS)).requests
    fitting = [one for one in requests if one.prompt_tokens + (one.output_tokens or 1) <= ENGINE["max_model_len"]]
    chosen = [fitting[place] for place in generator.integers(0, len(fitting), arguments.requests)]
    named = [replace(request, request_id=str(number)) for number, request in enumerate(chosen)]
    return planned(by_arrival(named, None), Timing(kind="poisson", rate=arguments.rate), generator)


async def live(policy: str, plan: list[Planned], arguments: argparse.Namespace) -> list[RequestResult]:
    """Send the requests to a gateway."""
    flags = [part for name, value in ENGINE.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    settings = ClusterSettings(
        instances=arguments.instances, policies=(policy,), port=0, log_level="warning",
        engine_flags=("--profile", PROFILE, "--speed", str(arguments.speed), "--served-model-name", MODEL,
                      "--no-enable-prefix-caching", *flags),
    )  # fmt: skip
    form = RequestFormat(model=MODEL, output="ignore-eos", time_scale=arguments.speed)
    ended: list[RequestResult] = []
    async with running(settings, lambda _: None) as cluster:
        return list(
            await run_plan(
                plan, origin_of(cluster.gateway_urls[policy]), form, LoadLimits(timeout_s=3600.0), ended.append
            )
        )


def simulated(policy: str, results: list[RequestResult], decision_s: float, arguments: argparse.Namespace) -> Latencies:
    """Simulate the same requests with the times at which they were sent."""
    times_s = np.array([one.plan.due_s + one.sent_s for one in results])
    order = np.argsort(times_s, kind="stable")
    work = workload(
        RequestLengths(
            prompt_tokens=np.array([results[place].plan.prompt_tokens for place in order]),
            output_tokens=np.array([results[place].plan.output_tokens for place in order]),
        ),
        times_s[order],
    )
    config = EngineConfig(**ENGINE, enable_prefix_caching=False)  # type: ignore[arg-type]  # all values are integers
    specs = [InstanceSpec(config=config, step_time=load_profile(PROFILE).step_time)] * arguments.instances
    took = latencies(simulate(specs, work, policy, Conditions(decision_s=decision_s)))
    back = np.argsort(order)
    return Latencies(ttft_s=took.ttft_s[back], tpot_s=took.tpot_s[back], e2e_s=took.e2e_s[back])


if __name__ == "__main__":
    main()
