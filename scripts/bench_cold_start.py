"""Cold start of each server process: from its command to the log line that it serves, with compiled kernels cached.

- `cpu_s.{server}`: processor time until then, all threads, median over the rounds.
- `wall_s.{server}`: the time that passed.
- `resident_mib.{server}`: its memory then.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from scripts.bench_requests import PLACE
from scripts.processes import block_serving
from scripts.report import report

# What each server must be given; nothing needs to listen at these addresses.
ARGUMENTS = {
    "scheduler": ["--instance", f"a=http://{PLACE}:9,{PLACE}:9"],
    "gateway": ["--scheduler", f"{PLACE}:9"],
    "tagger": [],
    "provisioner": ["--folder", "{folder}", "--model", "m", "--min-instances", "0", "--max-instances", "1"],
    "predictor": ["--state-file", "{folder}/none", "--profile", "llama-2-7b-a30"],
    "engine": ["--profile", "llama-2-7b-a30"],
}


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", action="append", choices=list(ARGUMENTS), help="Repeatable; all by default.")
    arguments = parser.parse_args()
    results: list[dict[str, object]] = []
    for server in arguments.server or ARGUMENTS:
        started(server)  # reads the files into the page cache, and compiles the kernels
        rounds = [started(server) for _ in range(arguments.rounds)]
        for column, (name, unit) in enumerate((("cpu_s", "s"), ("wall_s", "s"), ("resident_mib", "MiB"))):
            value = statistics.median(one[column] for one in rounds)
            results.append({"name": f"{name}.{server}", "value": value, "unit": unit, "n": len(rounds)})
    report("cold_start", results, as_json=arguments.json)


def started(server: str) -> tuple[float, float, float]:
    """Start a server; return processor time, time and memory when it serves."""
    with tempfile.TemporaryDirectory() as folder:
        before_s = time.perf_counter()
        with block_serving(server, *(word.format(folder=folder) for word in ARGUMENTS[server])) as running:
            wall_s, cpu_s = time.perf_counter() - before_s, running.cpu_s()
            status = Path(f"/proc/{running.process.pid}/status").read_text(encoding="ascii")
            resident_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
            return cpu_s, wall_s, int(resident_kib) / 1024


if __name__ == "__main__":
    main()
