"""Records golden traces: a few workloads that together use every rule of vLLM's scheduler, with its decisions."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.conformance.leg_workloads import leg_workload  # noqa: E402 - needs the root on the path
from tests.conformance.vllm_side import leg_traces, traces  # noqa: E402
from tests.conformance.workloads import workload  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
KINDS = {"vllm_v1": (workload, traces), "vllm_legs": (leg_workload, leg_traces)}  # by the name of the file
NUM_CANDIDATES = 1000
NUM_TRACES = 24
LONGEST_TRACE = 400
MODES = ("scheduling_policy", "async_scheduling", "enable_prefix_caching", "enable_chunked_prefill")


def main() -> None:
    """Record the kinds that the command line names, or all."""
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or KINDS:
        record(name)


def record(name: str) -> None:
    """Trace many workloads, select a few that cover all rules, and write them with their steps."""
    draw, trace_all = KINDS[name]
    candidates = [draw(seed) for seed in range(NUM_CANDIDATES)]
    recorded = [load | json.loads(trace) for load, trace in zip(candidates, trace_all(candidates), strict=True)]
    kept = covering([record for record in recorded if len(record["steps"]) <= LONGEST_TRACE])
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in kept]
    path = GOLDEN / f"{name}.jsonl.gz"
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as archive:
        archive.write("".join(lines).encode())
    sys.stdout.write(f"{path}: {len(kept)} traces, {sum(len(record['steps']) for record in kept)} steps\n")


def covering(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select greedily the traces with the rules, and their modes, that are covered least so far."""
    shown: Counter[object] = Counter()
    kept: list[dict[str, Any]] = []
    while len(kept) < NUM_TRACES:
        best = max(records, key=lambda record: sum(0.25 ** shown[thing] for thing in covered_rules(record)))
        records.remove(best)
        kept.append(best)
        shown.update(covered_rules(best))
    return sorted(kept, key=lambda record: record["seed"])


def covered_rules(record: dict[str, Any]) -> list[object]:
    """Return the rules that a trace covers, each alone and with its scheduling mode."""
    mode = tuple(record["engine"][name] for name in MODES)
    return [mode, *record["coverage"], *((rule, *mode[:2]) for rule in record["coverage"])]


if __name__ == "__main__":
    main()
