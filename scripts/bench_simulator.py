"""Simulated requests per second of processor time: 12 instances at the paper's load and above, and 64 instances.

Engines are Block's testbed, Llama-2-7B on A30 (1056 blocks, 48 sequences, chunks of 512); prompts and responses are
ShareGPT's from `BLOCK_DATA`, or else log-normal ones with similar lengths.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np

from predictor.config import EngineConfig
from predictor.profile import load_profile
from scripts.report import report
from simulator.assembly import simulate
from simulator.fleet import InstanceSpec
from simulator.reference_data import data_folder
from simulator.result import STATUSES
from simulator.traces import trace_from
from simulator.workload import RequestLengths, Workload, at_rate, drawn, fitting, lengths_of, poisson_gaps, workload

PROFILE = "llama-2-7b-a30"
SHAREGPT = "lengths/block_sharegpt_v3_58k_lens.csv"
LONGEST = 2048
HEURISTICS = ("llumnix", "jsq", "lmetric", "round_robin")
FORECASTING = ("block", "block: k = 3")
OVERLOAD = 3.0  # factor of the rate, for queues of hundreds of requests


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rate", type=float, default=32.0, help="requests per second, for 12 instances")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-large", action="store_true", help="skip 64 instances")
    arguments = parser.parse_args()
    results = list(measure(arguments))
    report("simulator", results, as_json=arguments.json)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Time every policy on the same requests."""
    lengths = sharegpt()
    work = requests(lengths, arguments.requests, arguments.rate)
    for policy in (*HEURISTICS, *FORECASTING):
        simulate(cluster(12), requests(lengths, 50, arguments.rate), policy)  # loads the compiled kernels
        rates = [len(work) / processor_seconds(12, work, policy) for _ in range(arguments.rounds)]
        name = f"requests_per_cpu_s.{policy.replace(': k = ', '_k')}"
        yield {"name": name, "value": statistics.median(rates), "unit": "requests/s", "n": len(work)}
    flood = requests(lengths, arguments.requests, OVERLOAD * arguments.rate)
    rate = len(flood) / processor_seconds(12, flood, "block")
    yield {"name": f"requests_per_cpu_s.block_{OVERLOAD:g}x_rate", "value": rate, "unit": "requests/s", "n": len(flood)}
    if not arguments.no_large:
        large = requests(lengths, 300_000, arguments.rate * 64 / 12)
        seconds = processor_seconds(64, large, "llumnix")
        yield {"name": "cpu_s.llumnix.64x300000", "value": seconds, "unit": "s", "n": len(large)}


def processor_seconds(num_instances: int, work: Workload, policy: str) -> float:
    """Time one run, which must finish all requests."""
    start_s = time.process_time()
    result = simulate(cluster(num_instances), work, policy)
    seconds = time.process_time() - start_s
    if not (result.decisions.status == STATUSES.index("finished")).all():
        raise RuntimeError(f"{policy}: not every request finished")
    return seconds


def cluster(num_instances: int) -> list[InstanceSpec]:
    """Return equal instances."""
    config = EngineConfig(
        max_num_seqs=48, max_num_batched_tokens=512, num_gpu_blocks=1057, max_model_len=LONGEST,
        enable_prefix_caching=False,
    )  # fmt: skip
    return [InstanceSpec(config=config, step_time=load_profile(PROFILE).step_time)] * num_instances


def sharegpt() -> RequestLengths:
    """Return the lengths of requests that fit the model's context."""
    path = data_folder() / SHAREGPT
    if path.exists():
        return fitting(lengths_of(trace_from(str(path)).requests), LONGEST)
    print(f"{path} does not exist (BLOCK_DATA): log-normal lengths are used", file=sys.stderr)
    generator = np.random.default_rng(0)
    prompts = np.minimum(1000, 1 + generator.lognormal(3.6, 1.5, 50_000)).astype(np.int64)
    answers = np.minimum(1000, 1 + generator.lognormal(5.5, 0.9, 50_000)).astype(np.int64)
    return RequestLengths(prompt_tokens=prompts, output_tokens=answers)


def requests(lengths: RequestLengths, num: int, rate: float) -> Workload:
    """Draw requests of a Poisson process."""
    generator = np.random.default_rng(1)
    return workload(drawn(lengths, num, generator), at_rate(poisson_gaps(num, generator), rate))


if __name__ == "__main__":
    main()
