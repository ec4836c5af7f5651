"""The time of a forecast, and the throughput of a replay, on one core, with ShareGPT-like lengths.

Engines are Block's testbed: Llama-2-7B on an A30, 1056 blocks of 16, chunks of 512.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.profile import load_profile
from predictor.request import RequestFacts, Slo
from scripts.report import report
from simulator.experiments.experiment_file import experiment_named
from simulator.experiments.findings import slug
from simulator.hybrid_load import serve_hybrid
from simulator.replay import loaded_engine

PROFILE = "llama-2-7b-a30"
CASES = ((4, 0), (24, 0), (46, 0), (48, 10), (48, 20), (48, 50), (48, 100), (256, 200))
ENGINES = 10  # random engines of each size
BY_DEADLINE = ("slide_batching", "density", "edf")  # local schedulers measured with deadlines
DEADLINE_CASES = ((24, 0), (48, 20))
REPLAY_RATE = 2.9  # requests per second, a tenth more than the engine serves
HYBRID_VARIANTS = ("vllm_v1", "bros recompute", "bros swap", "bros two-ended")
SLOS = (Slo(ttft_s=1.0, tpot_s=0.1), Slo(ttft_s=3.0, tpot_s=0.1))


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=200, help="forecasts per case")
    parser.add_argument("--only-forecasts", action="store_true", help="neither replays nor steps of other engines")
    arguments = parser.parse_args()
    results = list(measure_forecasts(arguments.rounds))
    if not arguments.only_forecasts:
        results += [*measure_replay(), *measure_hybrid_steps()]
    report("predictor", results, as_json=arguments.json)


def measure_forecasts(rounds: int) -> Iterator[dict[str, object]]:
    """Time forecasts in each case: to the candidate's last token, with all delays, or deadlines only; and repeated."""
    for caching in (False, True):
        for running, waiting in CASES:
            for what in ("", "delays", "deadlines", "again"):
                times_us = [
                    microseconds(running, waiting, what, caching=caching, seed=seed, rounds=max(1, rounds // ENGINES))
                    for seed in range(ENGINES)
                ]
                name = f"forecast_us.r{running}.w{waiting}"
                name += ".caching" if caching else ""
                name += f".{what}" if what else ""
                yield {"name": name, "value": statistics.median(times_us), "unit": "us", "n": rounds}
    for batcher in BY_DEADLINE:
        for running, waiting in DEADLINE_CASES:
            times_us = [
                microseconds(running, waiting, "", batcher=batcher, seed=seed, rounds=max(1, rounds // ENGINES))
                for seed in range(ENGINES)
            ]
            name = f"forecast_us.r{running}.w{waiting}.{batcher}"
            yield {"name": name, "value": statistics.median(times_us), "unit": "us", "n": rounds}


def microseconds(
    running: int, waiting: int, what: str, *, seed: int, rounds: int, caching: bool = False, batcher: str = "vllm_v1"
) -> float:
    """Return the median time of a forecast on random engines; `again` repeats it on an unchanged engine."""
    rng = random.Random(seed)
    engine = engine_with(running, waiting, rng, caching=caching, batcher=batcher)
    candidate = sharegpt_like("candidate", rng, arrival_s=engine.now_s, slo=SLOS[seed % 2])
    forecaster = Forecaster(engine)
    now_s, serial = engine.now_s, 1 if what == "again" else None
    times = []
    for _ in range(rounds):
        start_ns = time.perf_counter_ns()
        forecaster.forecast(
            [candidate],
            now_s,
            delays=what in ("delays", "deadlines"),
            only_deadlines=what == "deadlines",
            serial=serial,
        )
        times.append((time.perf_counter_ns() - start_ns) / 1000)
    return statistics.median(times)


def engine_with(running: int, waiting: int, rng: random.Random, *, caching: bool, batcher: str) -> Engine:
    """Return an engine with `running` requests in the middle of their responses, and `waiting` ones."""
    config = EngineConfig(
        max_num_seqs=max(48, running),
        max_num_batched_tokens=512,
        num_gpu_blocks=1057 if running <= 48 else 6000,
        max_model_len=2048,
        enable_prefix_caching=caching,
        batcher=batcher,
    )
    engine = Engine(config, load_profile(PROFILE).step_time)
    for number in range(running):
        engine.add(sharegpt_like(f"r{number}", rng, slo=SLOS[number % 2]))
    engine.advance(0.12 * math.sqrt(running))  # all are admitted, and few have finished
    for number in range(waiting):
        engine.add(sharegpt_like(f"w{number}", rng, arrival_s=engine.now_s, slo=SLOS[number % 2]))
    return engine


def sharegpt_like(name: str, rng: random.Random, *, arrival_s: float = 0.0, slo: Slo | None = None) -> RequestFacts:
    """Draw lengths like ShareGPT's (medians 36 and 283 tokens, heavy tails)."""
    prompt = min(1000, 1 + int(rng.lognormvariate(3.6, 1.5)))
    answer = min(1000, 1 + int(rng.lognormvariate(5.5, 0.9)))
    return RequestFacts(request_id=name, prompt_tokens=prompt, output_tokens=answer, arrival_s=arrival_s, slo=slo)


def measure_replay(num_requests: int = 20_000) -> Iterator[dict[str, object]]:
    """Time one saturated engine over many requests."""
    cases = [
        ("vllm_v1", False, ""),
        ("vllm_v1", True, ".caching"),
        *((name, False, f".{name}") for name in BY_DEADLINE),
    ]
    for batcher, caching, suffix in cases:
        rates = []
        for seed in range(5):
            rng = random.Random(seed)
            config = EngineConfig(
                max_num_seqs=48,
                max_num_batched_tokens=512,
                num_gpu_blocks=1057,
                max_model_len=2048,
                enable_prefix_caching=caching,
                batcher=batcher,
            )
            requests = [sharegpt_like(f"r{number}", rng) for number in range(num_requests)]
            if batcher in BY_DEADLINE:
                requests = with_deadlines(requests)
            start_s = time.process_time()
            engine = loaded_engine(config, load_profile(PROFILE).step_time, requests)
            engine.advance()
            outcomes = [engine.outcome(request.request_id) for request in requests]
            rates.append(len(outcomes) / (time.process_time() - start_s))
        name = f"replay_requests_per_cpu_s{suffix}"
        yield {"name": name, "value": statistics.median(rates), "unit": "requests/s", "n": num_requests}


def with_deadlines(requests: list[RequestFacts]) -> list[RequestFacts]:
    """Return the requests with targets, and arriving a tenth faster than this engine can serve them."""
    return [
        replace(request, arrival_s=number / REPLAY_RATE, slo=SLOS[number % 2])
        for number, request in enumerate(requests)
    ]


def measure_hybrid_steps() -> Iterator[dict[str, object]]:
    """Time the steps of the BROS experiment, one of which is planned and carried out by the model.

    The share is that of the engine's own step time (BROS, figure 14: 9 % on OPT-13B).
    """
    experiment = experiment_named("bros-fig10-13")
    setting = experiment.settings[0]
    rate = setting.rates[-1]
    for variant, scenario in experiment.cases(setting):
        if variant.name not in HYBRID_VARIANTS:
            continue
        serve_hybrid(scenario, rate, 0)  # compiled
        start_s = time.process_time()
        num_steps = serve_hybrid(scenario, rate, 1)["num_steps"]
        seconds = (time.process_time() - start_s) / num_steps
        name = f"hybrid_step_us.{slug(variant.name)}.{setting.name}.{rate:g}"
        yield {"name": name, "value": 1e6 * seconds, "unit": "us", "n": int(num_steps)}
        share = seconds / (scenario.best_effort.for_s / num_steps)
        yield {"name": f"{name}.share_of_step", "value": share, "unit": "ratio", "n": int(num_steps)}


if __name__ == "__main__":
    main()
