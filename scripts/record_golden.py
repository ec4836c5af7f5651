"""Record golden traces: a few workloads that together make vLLM's scheduler use every rule, with what it decided."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.conformance.vllm_side import traces  # noqa: E402 - found only once the root is on the path
from tests.conformance.workloads import workload  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "vllm_v1.jsonl.gz"
NUM_CANDIDATES = 1000
NUM_TRACES = 24
LONGEST_TRACE = 400
MODES = ("scheduling_policy", "async_scheduling", "enable_prefix_caching", "enable_chunked_prefill")


def main() -> None:
    """Trace many workloads, keep the most telling few, write them with their steps."""
    candidates = [workload(seed) for seed in range(NUM_CANDIDATES)]
    recorded = [load | json.loads(trace) for load, trace in zip(candidates, traces(candidates), strict=True)]
    kept = most_telling([record for record in recorded if len(record["steps"]) <= LONGEST_TRACE])
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in kept]
    GOLDEN.parent.mkdir(exist_ok=True)
    with GOLDEN.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as archive:
        archive.write("".join(lines).encode())
    sys.stdout.write(f"{GOLDEN}: {len(kept)} traces, {sum(len(record['steps']) for record in kept)} steps\n")


def most_telling(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pick greedily what shows the rules, and the modes they combine with, that were shown least so far."""
    shown: Counter[object] = Counter()
    kept: list[dict[str, Any]] = []
    while len(kept) < NUM_TRACES:
        best = max(records, key=lambda record: sum(0.25 ** shown[thing] for thing in things_shown(record)))
        records.remove(best)
        kept.append(best)
        shown.update(things_shown(best))
    return sorted(kept, key=lambda record: record["seed"])


def things_shown(record: dict[str, Any]) -> list[object]:
    """List the rules that a trace shows, each by itself and in the scheduling mode it was shown in."""
    mode = tuple(record["engine"][name] for name in MODES)
    return [mode, *record["coverage"], *((rule, *mode[:2]) for rule in record["coverage"])]


if __name__ == "__main__":
    main()
