"""Compares policies on requests of many LoRA adapters with Zipf popularity, in the simulator."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from predictor.config import EngineConfig
from predictor.profile import load_profile
from scripts.report import report
from simulator.assembly import simulate
from simulator.fleet import InstanceSpec
from simulator.workload import RequestLengths, Workload, at_rate, poisson_gaps, workload

POLICIES = ("jsq", "lmetric", "block", "adapter_affinity")
PROFILE = "llama-2-7b-a30"
LONGEST = 2048


def main() -> None:
    """Simulate, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--policy", action="append", help="policies to compare; repeatable")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--rate", type=float, default=16.0, help="requests per second of all instances")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the popularity")
    parser.add_argument("--max-loras", type=int, default=4)
    parser.add_argument("--max-cpu-loras", type=int, default=16)
    parser.add_argument("--load-s", type=float, default=0.4, help="seconds to load an adapter from disk")
    parser.add_argument("--activate-s", type=float, default=0.03, help="seconds to copy one to the GPU")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report("adapters", list(measure(arguments)), as_json=arguments.json)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Run every policy on the same requests; the first tenth is not counted."""
    work = requests(arguments)
    for policy in arguments.policy or POLICIES:
        result = simulate([instance(arguments)] * arguments.instances, work, policy)
        outcomes = result.outcomes[len(work) // 10 :].view(np.recarray)
        arrival_s = work.arrival_s[len(work) // 10 :]
        for name, times in (("ttft", outcomes.first_token_s), ("e2e", outcomes.finished_s)):
            if (times < 0).any():
                raise RuntimeError(f"{policy}: not every request finished")
            seconds = np.sort(times - arrival_s)
            for which, value in (("mean", seconds.mean()), ("p99", seconds[int(0.99 * len(seconds))])):
                yield {"name": f"{policy}.{name}_{which}", "value": float(value), "unit": "s", "n": len(seconds)}


def instance(arguments: argparse.Namespace) -> InstanceSpec:
    """Return an instance that serves adapters."""
    config = EngineConfig(
        max_num_seqs=48, max_num_batched_tokens=512, num_gpu_blocks=1057, max_model_len=LONGEST,
        enable_prefix_caching=False, max_loras=arguments.max_loras, max_cpu_loras=arguments.max_cpu_loras,
        lora_load_s=arguments.load_s, lora_activate_s=arguments.activate_s,
    )  # fmt: skip
    return InstanceSpec(config=config, step_time=load_profile(PROFILE).step_time)


def requests(arguments: argparse.Namespace) -> Workload:
    """Draw requests of a Poisson process, with log-normal lengths, each of one adapter."""
    generator = np.random.default_rng(arguments.seed)
    num = arguments.requests
    lengths = RequestLengths(
        prompt_tokens=np.minimum(1000, 1 + generator.lognormal(4.6, 1.0, num)).astype(np.int64),
        output_tokens=np.minimum(600, 1 + generator.lognormal(4.4, 0.8, num)).astype(np.int64),
    )
    weights = 1.0 / np.arange(1, arguments.adapters + 1) ** arguments.zipf
    adapters = 1 + generator.choice(arguments.adapters, num, p=weights / weights.sum())
    work = workload(lengths, at_rate(poisson_gaps(num, generator), arguments.rate))
    return replace(work, adapter=adapters.astype(np.int64))


if __name__ == "__main__":
    main()
