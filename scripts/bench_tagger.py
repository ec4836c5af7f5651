"""The speed of length estimators: each alone, on one core, without a server.

- `prompts_per_s.{estimator}`: prompts in batches of 64, per second of the processor.
- `p99_ms.{estimator}`: one prompt after the other, 99th percentile of the processor time; also `p50_ms`.
- `roberta` only with --encoder: `prompts_per_s` in batches of 16, and `offered_p99_ms.roberta`: the callers' wait, in
  real time, for the server's micro-batches at --offered requests per second; `offered_cpu_ms.roberta`: the processor
  time per request, with the caller's.

Prompts are CASTILLO's from BLOCK_DATA, or else random words of the same lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from threadpoolctl import threadpool_limits

from length_tagger import TAGGERS
from length_tagger.estimate import LengthOutcome, Query
from length_tagger.keys import prompt_keys
from length_tagger.settings import TaggerSettings
from scripts.report import report, row
from services.tagger_server.batches import Batched, Batches
from services.tagger_server.settings import EncoderSettings

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--encoder", default="", help="Folder of a checkpoint of `roberta`; small: the shipped one.")
    parser.add_argument("--runtime", choices=("auto", "onnx", "torch"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="Threads per batch.")
    parser.add_argument("--offered", type=float, default=64.0, help="Requests per second.")
    arguments = parser.parse_args()
    threadpool_limits(1)  # as in the server
    queries = [
        Query(prompt=prompt, model=MODEL, keys=prompt_keys(MODEL, prompt)) for prompt in prompts(arguments.prompts)
    ]
    results = list(measured(queries))
    if arguments.encoder:
        encoder = EncoderSettings(
            folder=arguments.encoder, threads=arguments.threads, runtime=arguments.runtime, deadline_s=10.0
        ).loaded()
        results.extend(encoder_measured(queries, encoder, arguments.offered))
    report("tagger", results, as_json=arguments.json)


def prompts(num: int) -> list[str]:
    """Return prompts, real ones if available."""
    from length_tagger.samples import read_castillo
    from simulator.reference_data import data_folder

    rng = random.Random(7)
    try:
        real = sorted({sample.prompt for sample in read_castillo(data_folder() / "text")})
    except ValueError:
        words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 10))) for _ in range(5000)]
        real = [" ".join(rng.choices(words, k=round(rng.lognormvariate(4.3, 0.9)))) for _ in range(num)]
    rng.shuffle(real)
    return (real * (1 + num // len(real)))[:num]


def measured(queries: Sequence[Query]) -> Iterator[dict[str, Any]]:
    """Measure the estimators that need no extra."""
    for name in ("client", "cached", "linear", "history", "constant"):
        tagger: Any = TAGGERS[name](TaggerSettings(history_enough=1))
        for query in queries[::2]:
            tagger.observe(LengthOutcome(output_tokens=100, model=MODEL, keys=query.keys))
        for query in queries[:50]:
            tagger.estimate(query)
        times = []
        for query in queries:
            start = time.process_time_ns()
            tagger.estimate(query)
            times.append((time.process_time_ns() - start) / 1e6)
        start_s = time.process_time()
        if hasattr(tagger, "estimate_many"):
            for first in range(0, len(queries), 64):
                tagger.estimate_many(queries[first : first + 64])
        else:
            for query in queries:
                tagger.estimate(query)
        yield row(f"prompts_per_s.{name}", len(queries) / (time.process_time() - start_s), "1/s", len(queries))
        yield from percentiles("", name, times)


def percentiles(prefix: str, name: str, times: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the median and the 99th percentile of times."""
    for share in (50, 99):
        yield row(f"{prefix}p{share}_ms.{name}", float(np.percentile(times, share)), "ms", len(times))


def encoder_measured(queries: Sequence[Query], encoder: Batched, offered: float) -> Iterator[dict[str, Any]]:
    """Measure the encoder alone, and with the server's batches."""
    some = queries[:800]
    encoder.estimate_many(some[:16])
    start_s = time.process_time()
    for first in range(0, len(some), 16):
        encoder.estimate_many(some[first : first + 16])
    yield row("prompts_per_s.roberta", len(some) / (time.process_time() - start_s), "1/s", len(some))
    times = []
    for query in some[:200]:
        start = time.process_time_ns()
        encoder.estimate_many([query])
        times.append((time.process_time_ns() - start) / 1e6)
    yield from percentiles("", "roberta", times)
    batches = Batches(encoder, CollectorRegistry(), deadline_s=10.0)
    batches.warm_up()
    start_s = time.process_time()
    waits = asyncio.run(offer(batches, some, offered))
    yield row("offered_cpu_ms.roberta", 1e3 * (time.process_time() - start_s) / len(some), "ms", len(some))
    yield from percentiles("offered_", "roberta", waits)


async def offer(batches: Any, queries: Sequence[Query], rate: float) -> list[float]:
    """Send queries as a Poisson process; return the wait of each."""
    rng = random.Random(3)
    waits: list[float] = []

    async def ask(query: Query) -> None:
        start = time.perf_counter()
        if await batches.estimate(query) is not None:
            waits.append(1e3 * (time.perf_counter() - start))

    async with asyncio.TaskGroup() as tasks:
        for query in queries:
            await asyncio.sleep(rng.expovariate(rate))
            tasks.create_task(ask(query))
    return waits


if __name__ == "__main__":
    main()
