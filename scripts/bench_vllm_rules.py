"""What a batching rule costs a real vLLM per step: its scheduler classes with the plug-in, without a model.

The time is that of planning, following vLLM's requests, and putting its queues into the plan's order; vLLM's own
scheduling of the same steps stands beside it. Requests that end are replaced, so that their numbers stay the same.

- `rule_ms_per_step.{rule}.{running}.{waiting}`: the median, and `rule_ms_per_step_p90`;
- `ordering_ms_per_step.{rule}.{running}.{waiting}`: the median of a plan alone while a seat is free, so that all
  requests are ranked; with all seats taken and all decoding, as in most of the steps above, nothing is;
- `vllm_ms_per_step.{rule}.{running}.{waiting}`: the median of vLLM's own `schedule()`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.batching import BATCHERS
from scripts.report import report
from tests.conformance.vllm_side import interpreter
from tests.deploy.installing import PLUGIN, pip_install

SCRIPT = Path(__file__).with_name("vllm_rule_cost.py")
RULES = tuple(name for name, batcher in BATCHERS.items() if batcher.plans)
SIZES = ((64, 64), (256, 2000))


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--profile", default="llama-3.1-8b-h100")
    arguments = parser.parse_args()
    if not interpreter().exists():
        parser.error(f"no vLLM at {interpreter()}: make vllm, or set BLOCK_VLLM_PYTHON")
    measured = measure(
        {"rules": arguments.rules, "sizes": SIZES, "steps": arguments.steps, "profile": arguments.profile}
    )
    results = [one for row in measured for one in results_of(row)]
    report("vllm_rules", results, as_json=arguments.json, load=os.getloadavg()[0])


def measure(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Install the plug-in into a folder, and run the measurement with vLLM's interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        pip_install(PLUGIN, Path(folder))
        command = [str(interpreter()), "-I", str(SCRIPT), folder, json.dumps(plan)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{SCRIPT.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def results_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of one rule and size."""
    case = f"{row['rule']}.{row['running']}.{row['waiting']}"
    return [
        {"name": f"rule_ms_per_step.{case}", "value": 1000 * row["median_s"], "unit": "ms", "n": row["n"]},
        {"name": f"rule_ms_per_step_p90.{case}", "value": 1000 * row["p90_s"], "unit": "ms", "n": row["n"]},
        {"name": f"ordering_ms_per_step.{case}", "value": 1000 * row["ordering_s"], "unit": "ms", "n": row["n"]},
        {"name": f"vllm_ms_per_step.{case}", "value": 1000 * row["vllm_s"], "unit": "ms", "n": row["n"]},
    ]


if __name__ == "__main__":
    main()
