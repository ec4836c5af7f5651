"""Breaks parts of a cluster under load by a seeded plan, and checks afterwards that nothing is lost.

Emulated engines, sidecars, a tagger, a provisioner, schedulers and gateways run as processes. Every few seconds one of
them is killed, and between two kills something else happens: a process is stopped or slow, a gateway is restarted, an
engine hangs, a file is damaged, a link is slow, stalled or reset, the disk is full, a clock jumps. Clients send
completions and chats, streamed and whole, and gRPC streams; some leave in the middle. At the end:

- every request was answered once, with the text that one engine alone gives; streams that cannot continue on another
  engine are counted by reason;
- nothing is running, waiting or reserved anywhere; counters agree; every complete answer has its outcome in a
  recording, or a counted reason why not;
- open files do not grow, and after 25 minutes or more neither does memory: 2 % over the last two thirds of the time.

Each violated rule is a line, and the exit status is then 1.

    python -m scripts.chaos --minutes 1                                                    # a short run
    python -m scripts.chaos --minutes 30 --engines 8 --schedulers 3 --gateways 2 --every 10 --rate 12
    python -m scripts.chaos --minutes 30 --seed 7 --print-plan
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import httpx
import uvloop

from scripts.chaos.clients import ClientRecord, Clients
from scripts.chaos.cluster import ChaosCluster, cluster_running
from scripts.chaos.conservation import (
    count_problems,
    end_problems,
    left_at_rest,
    pairing,
    reported_counts,
    with_reasons,
)
from scripts.chaos.faults import FaultInjector
from scripts.chaos.growth import MEBIBYTE, GrowthWatch, growth_problems
from scripts.chaos.plan import ChaosSettings, kind_of, plan_of
from scripts.report import machine, report
from services.cluster.child import StartError
from services.logs import configure

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - where processes share memory
PROGRESS_S = 30.0
Row = dict[str, object]


@dataclass(slots=True, kw_only=True)
class ChaosRun:
    """One run: the plan, the load and the checks."""

    settings: ChaosSettings
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sizes: dict[str, list[tuple[int, int, float, int]]] = field(default_factory=dict)  # of processes over time

    async def run(self) -> None:
        """Run the cluster, the load and the plan, and check what has to hold."""
        with tempfile.TemporaryDirectory(prefix="block-chaos-", dir=MEMORY) as folder:
            progress("starting the cluster")
            async with (
                cluster_running(self.settings, Path(folder)) as cluster,
                httpx.AsyncClient(timeout=10.0) as client,
            ):
                await self._run(cluster, client)

    async def _run(self, cluster: ChaosCluster, client: httpx.AsyncClient) -> None:
        record, watch, done = ClientRecord(), GrowthWatch(), asyncio.Event()
        faults = FaultInjector(cluster=cluster, client=client)
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(faults.run(plan_of(self.settings), done))
            tasks.create_task(watch.run(cluster.children, done))
            tasks.create_task(self._show_progress(record, faults, watch, done))
            try:
                await Clients(cluster=cluster, settings=self.settings, record=record).run()
            finally:
                done.set()
        run_s = time.monotonic() - start_s
        progress("the load has ended; waiting until nothing is left")
        left = await left_at_rest(cluster, client)
        counts = with_reasons(record.ends, faults.windows)
        paired, unpaired = await asyncio.to_thread(pairing, cluster, record.ends, faults.windows)
        grown, self.sizes = watch.fitted(), watch.series()
        self.problems += end_problems(counts, record.samples)
        self.problems += [f"left: {name} = {value:g}" for name, value in left.items()]
        self.problems += await count_problems(cluster, client, record.ends)
        self.problems += unpaired + growth_problems(grown, run_s)
        self._count("requests", counts, "requests")
        self._count("faults", Counter(f"{one.kind} {kind_of(one.part)}" for one in faults.windows))
        self._count("skipped", faults.skipped)
        self._count("outcomes", paired, "requests")
        self._count("counted", await reported_counts(cluster, client), "events")
        self._count("restarts", {name: child.num_restarts for name, child in cluster.children.items()}, "restarts")
        moved = [end for end in record.ends if end.num_migrations]
        self._add("migrations", sum(end.num_migrations for end in moved), "streams", len(moved))
        if moved:
            self._add("migration_pause.median", median(end.longest_pause_s for end in moved), "s", len(moved))
        for one in grown:
            self._add(f"memory.{one.part}", one.resident_bytes / MEBIBYTE, "MiB", 1)
            self._add(f"growth.{one.part}.memory", one.memory_ratio, "ratio", 1)
            self._add(f"growth.{one.part}.files", one.more_files, "files", 1)

    async def _show_progress(
        self, record: ClientRecord, faults: FaultInjector, watch: GrowthWatch, done: asyncio.Event
    ) -> None:
        start_s = time.monotonic()
        while not done.is_set():
            try:
                await asyncio.wait_for(done.wait(), PROGRESS_S)
            except TimeoutError:
                ends = ", ".join(f"{num} {end}" for end, num in sorted(record.counts.items()))
                progress(
                    f"{time.monotonic() - start_s:5.0f} of {60 * self.settings.minutes:.0f} s: {ends or 'no answers'}; "
                    f"{record.num_under_way} under way; {len(faults.windows)} faults; "
                    f"{watch.resident_bytes / MEBIBYTE:.0f} MiB"
                )

    def _count(self, group: str, counts: Mapping[str, int], unit: str = "faults") -> None:
        num = sum(counts.values())
        for name, count in sorted(counts.items()):
            self._add(f"{group}.{name}", count, unit, num)

    def _add(self, name: str, value: float, unit: str, num: int) -> None:
        self.rows.append({"name": name, "value": float(value), "unit": unit, "n": num})


def progress(text: str) -> None:
    """Write a line about the progress, which is no result."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run the plan, report what happened, and fail where a rule is violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ChaosSettings()
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--every", type=float, default=default.every_s, dest="every_s", help="seconds between kills")
    parser.add_argument("--engines", type=int, default=default.engines)
    parser.add_argument("--schedulers", type=int, default=default.schedulers)
    parser.add_argument("--gateways", type=int, default=default.gateways)
    parser.add_argument("--rate", type=float, default=default.rate, help="requests per second")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="mean number of tokens of an answer")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--print-plan", action="store_true", help="print the faults of the plan, and run nothing")
    parser.add_argument("--report", default="build/chaos.json", metavar="FILE", help="file for the report as JSON")
    arguments = vars(parser.parse_args())
    as_json, prints_plan, file = (arguments.pop(name) for name in ("json", "print_plan", "report"))
    try:
        settings = ChaosSettings(**arguments)
    except ValueError as error:
        parser.error(str(error))
    if prints_plan:
        for fault in plan_of(settings):
            print(json.dumps(asdict(fault)))
        return
    configure("critical", "text")
    chaos = ChaosRun(settings=settings)
    try:
        uvloop.run(chaos.run())
    except StartError as error:
        sys.exit(f"chaos: {error}")
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {"settings": asdict(settings), "problems": chaos.problems, "results": chaos.rows, "sizes": chaos.sizes}
    path.write_text(json.dumps({"bench": "chaos", "machine": machine(), **results}, indent=1) + "\n", encoding="utf-8")
    report("chaos", chaos.rows, as_json=as_json, settings=asdict(settings), problems=chaos.problems)
    for problem in chaos.problems:
        print(f"chaos: {problem}", file=sys.stderr)
    sys.exit(bool(chaos.problems))


if __name__ == "__main__":
    main()
