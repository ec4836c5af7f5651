"""Replays measured vLLM runs and compares latencies per request, without the requests that constants were fitted to."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from predictor.profile import load_profile
from scripts.report import row
from simulator.measured_runs import MEASURED_RUNS, MeasuredRun, latencies_of
from simulator.reference_data import data_folder
from simulator.replay import replay

CALIBRATED = 100  # the first requests, to which two constants of the profile were fitted


def main() -> None:
    """Print the errors, as a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        results = [result for name, run in MEASURED_RUNS.items() for result in compare(name, run)]
    except (ValueError, OSError) as error:
        sys.exit(f"accuracy_replay: {error}")
    if arguments.json:
        print(json.dumps({"bench": "accuracy_replay", "machine": {"cpu": platform.machine()}, "results": results}))
        return
    for result in results:
        print(f"{result['name']:32}{result['value']:>9.2%}  n={result['n']}")


def compare(name: str, run: MeasuredRun) -> Iterator[dict[str, Any]]:
    """Yield the distribution of the relative errors of one run."""
    profile = load_profile(run.profile)
    requests, measured = run.requests(data_folder())
    outcomes = replay(run.config(profile.engine.num_gpu_blocks or 0), profile.step_time, requests)
    replayed = latencies_of(requests, outcomes, measured.output_tokens)
    for metric, actual in measured.metrics().items():
        signed = (replayed.metrics()[metric][CALIBRATED:] - actual[CALIBRATED:]) / actual[CALIBRATED:]
        errors = np.abs(signed)
        figures = {f"p{p}": np.percentile(errors, p) for p in (10, 25, 75, 90, 99)}
        figures = {"median": np.median(errors), "bias": np.median(signed), "mean": errors.mean(), **figures}
        for figure, value in figures.items():
            yield row(f"{name}.{metric}_error.{figure}", float(value), "ratio", len(errors))
    ends = [float((latencies.last_token_s + arrivals(requests)).max()) for latencies in (replayed, measured)]
    yield row(f"{name}.makespan_error", ends[0] / ends[1] - 1, "ratio", len(requests))


def arrivals(requests: list[Any]) -> np.ndarray:
    """Return the arrival times of requests."""
    return np.array([request.arrival_s for request in requests])


if __name__ == "__main__":
    main()
