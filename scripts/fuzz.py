"""Feeds hostile inputs to everything that reads what it did not write, and keeps those that break it.

Each target reads inputs that a grammar draws and mutations of its seeds (tests/fuzz/seeds/TARGET). An input may be
served or refused in the declared way. It is a finding where it ends in any other exception, in a reply 5xx that is not
an engine's, in a hang, in a crash of the process, or where something stays reserved, memory grows, or the next valid
request is not served. A finding is made smaller and written to build/fuzz; move it to the seeds with its fix.

`--inputs 1000 --seed 3 --target toml` runs one target, `--only 812` one of its inputs, and `--file PATH` a kept one.
Targets run in processes of their own, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from scripts.fuzzing.api_bodies import open_api_bodies
from scripts.fuzzing.engines import open_sse
from scripts.fuzzing.http_bodies import open_http_body
from scripts.fuzzing.http_heads import open_http_head
from scripts.fuzzing.inputs import halves, mutated
from scripts.fuzzing.journals import open_journal
from scripts.fuzzing.mirrored_engines import open_metrics, open_server_info
from scripts.fuzzing.parsers import open_kv_params, open_profile
from scripts.fuzzing.rpc_targets import open_ext_proc, open_grpc
from scripts.fuzzing.state_files import open_state_file
from scripts.fuzzing.targets import ROOT, FoundError, FuzzTarget, Open, kind_of, seeds_of
from scripts.fuzzing.toml_files import open_toml

TARGETS: dict[str, Open] = {
    "http_body": open_http_body,
    "http_head": open_http_head,
    "grpc": open_grpc,
    "ext_proc": open_ext_proc,
    "sse": open_sse,
    "state_file": open_state_file,
    "profile": open_profile,
    "toml": open_toml,
    "kv_params": open_kv_params,
    "api_bodies": open_api_bodies,
    "journal": open_journal,
    "server_info": open_server_info,
    "metrics": open_metrics,
}
FINDINGS = ROOT / "build" / "fuzz"
HANG_S = 30.0  # for one input
AUDIT_EVERY = 1000
WARM_INPUTS = 3000  # after which memory is measured
MAX_GROWTH_MIB = 128
MAX_SHRINKS = 2000
SHRINK_S = 20.0
MAX_CRASHES = 5
PROGRESS = struct.Struct("qq")  # an index, and a number that changes while its input is worked on


@dataclass(kw_only=True)
class Found:
    """One kind of finding, its smallest input, and how to repeat it."""

    kind: str
    file: str
    index: int
    num: int = 1


@dataclass(kw_only=True)
class FuzzOutcome:
    """What a target's inputs showed."""

    target: str
    seed: int
    inputs: int = 0
    seconds: float = 0.0
    grown_mib: float = 0.0
    found: list[Found] = field(default_factory=list)


def main() -> None:
    """Run the targets; exit with 1 where there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=tuple(TARGETS), help="repeatable; by default all")
    parser.add_argument("--inputs", type=int, default=1000, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the index of one input")
    parser.add_argument("--file", type=Path, help="a kept input of one target")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    targets = arguments.target or list(TARGETS)
    if arguments.worker:
        outcome = asyncio.run(
            _worked(targets[0], arguments.seed, range(arguments.first, arguments.inputs), Path(arguments.worker))
        )
        print(json.dumps(asdict(outcome)))
        return
    if arguments.only is not None or arguments.file is not None:
        given = None if arguments.file is None else arguments.file.read_bytes()
        asyncio.run(_once(targets[0], arguments.seed, arguments.only or 0, given))
        return
    outcomes = [supervised(name, arguments.seed, arguments.inputs) for name in targets]
    if arguments.json:
        print(json.dumps({"bench": "fuzz", "results": [asdict(one) for one in outcomes]}))
    sys.exit(any(one.found for one in outcomes))


def supervised(name: str, seed: int, num: int) -> FuzzOutcome:
    """Run a target in a process of its own, which may crash or hang."""
    outcome = FuzzOutcome(target=name, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        first, num_crashes = 0, 0
        while first < num and num_crashes < MAX_CRASHES:
            progress.write_bytes(PROGRESS.pack(first, 0))
            part, index, why = _run(name, seed, first, num, progress)
            if part is not None:
                _add(outcome, part)
                break
            num_crashes += 1
            data = asyncio.run(_input(name, seed, index))
            kept = Found(kind=why, file=str(_keep(name, why, data)), index=index)
            _add(outcome, FuzzOutcome(target=name, seed=seed, inputs=index - first + 1, found=[kept]))
            print(f"{name}: {why}: {kept.file} (--seed {seed} --only {index})", file=sys.stderr)
            first = index + 1
    rate = outcome.inputs / outcome.seconds if outcome.seconds else 0.0
    print(
        f"{name}: {outcome.inputs} inputs in {outcome.seconds:.0f} s ({rate:.0f}/s), "
        f"{len(outcome.found)} kinds of findings, {outcome.grown_mib:+.1f} MiB",
        file=sys.stderr,
    )
    return outcome


def _run(name: str, seed: int, first: int, num: int, progress: Path) -> tuple[FuzzOutcome | None, int, str]:
    """Run one process to its end; return its outcome, or the input that it does not end, and why."""
    command = (
        sys.executable, "-m", "scripts.fuzz", "--worker", str(progress), "--target", name, "--seed", str(seed),
        "--inputs", str(num), "--first", str(first),
    )  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        seen, since_s = b"", time.monotonic()
        while True:
            try:
                output, _ = process.communicate(timeout=1.0)
            except subprocess.TimeoutExpired:
                now = progress.read_bytes()
                if now != seen:
                    seen, since_s = now, time.monotonic()
                elif time.monotonic() - since_s > 4 * HANG_S:
                    process.kill()
                    process.communicate()
                    return None, PROGRESS.unpack(now)[0], "hang"
                continue
            if process.returncode == 0:
                return _outcome_in(output), 0, ""
            return None, PROGRESS.unpack(progress.read_bytes())[0], f"exit {process.returncode}"


def _outcome_in(text: str) -> FuzzOutcome:
    data = json.loads(text.splitlines()[-1])
    return FuzzOutcome(**{**data, "found": [Found(**one) for one in data["found"]]})


def _add(outcome: FuzzOutcome, part: FuzzOutcome) -> None:
    outcome.inputs += part.inputs
    outcome.seconds += part.seconds
    outcome.grown_mib += part.grown_mib
    outcome.found += part.found


async def _worked(name: str, seed: int, indices: range, progress: Path) -> FuzzOutcome:
    """Feed inputs to a target in this process."""
    os.nice(max(0, 10 - os.nice(0)))
    logging.disable(logging.CRITICAL)
    outcome = FuzzOutcome(target=name, seed=seed)
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), PROGRESS.size) as shown:
        async with _opened(name) as target:
            seeds = seeds_of(name)
            start_s = noted_s = time.monotonic()
            if indices.start == 0:
                for data in seeds:
                    await _tried(target, outcome, data, -1)
            rss_mib = _rss_mib()
            for num, index in enumerate(indices, 1):
                shown[:] = PROGRESS.pack(index, num)
                await _tried(target, outcome, await _made(target, name, seed, index, seeds), index)
                if num == WARM_INPUTS:
                    rss_mib = _rss_mib()
                if num % AUDIT_EVERY == 0 or index == indices[-1]:
                    await _audited(target, outcome, index)
                if time.monotonic() - noted_s > 30:
                    noted_s = time.monotonic()
                    rate = num / (noted_s - start_s)
                    print(f"{name}: {index + 1} of {indices.stop}, {rate:.0f}/s", file=sys.stderr)
            outcome.inputs, outcome.seconds = len(indices), time.monotonic() - start_s
            if len(indices) > 2 * WARM_INPUTS:
                outcome.grown_mib = round(_rss_mib() - rss_mib, 1)
                if outcome.grown_mib > MAX_GROWTH_MIB:
                    _note(outcome, f"memory grew by {outcome.grown_mib} MiB", b"", indices[-1])
    return outcome


@contextlib.asynccontextmanager
async def _opened(name: str) -> AsyncIterator[FuzzTarget]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with TARGETS[name](Path(folder)) as target:
            yield target


async def _made(target: FuzzTarget, name: str, seed: int, index: int, seeds: list[bytes]) -> bytes:
    """Make the input of an index: drawn, mutated, or both."""
    draw = Random(f"{seed}/{name}/{index}")
    how = draw.random()
    if how < 0.3 and seeds:
        return mutated(draw, draw.choice(seeds), seeds)
    data = await target.drawn(draw)
    return mutated(draw, data, seeds) if how < 0.5 else data


async def _tried(target: FuzzTarget, outcome: FuzzOutcome, data: bytes, index: int) -> None:
    error = await _error_of(target, data)
    if error is None:
        return
    kind = kind_of(error)
    known = next((one for one in outcome.found if one.kind == kind), None)
    if known is not None:
        known.num += 1
        return
    smallest = await _smaller(target, data, kind)
    _note(outcome, kind, smallest, index)
    print(f"{outcome.target}: {kind} (--seed {outcome.seed} --only {index})", file=sys.stderr)


async def _error_of(target: FuzzTarget, data: bytes) -> BaseException | None:
    try:
        async with asyncio.timeout(HANG_S):
            await target.put(data)
    except TimeoutError:
        return FoundError(f"no end within {HANG_S:g} s")
    except Exception as error:  # noqa: BLE001 - any is a finding
        return error
    return None


async def _smaller(target: FuzzTarget, data: bytes, kind: str) -> bytes:
    """Remove what the finding does not need, within bounds."""
    num, until_s = 0, time.monotonic() + SHRINK_S
    while num < MAX_SHRINKS:
        for one in halves(data):
            num += 1
            error = await _error_of(target, one)
            if error is not None and kind_of(error) == kind:
                data = one
                break
            if num >= MAX_SHRINKS or time.monotonic() > until_s:
                return data
        else:
            break
    return data


async def _audited(target: FuzzTarget, outcome: FuzzOutcome, index: int) -> None:
    try:
        async with asyncio.timeout(HANG_S):
            await target.audit()
    except Exception as error:  # noqa: BLE001 - any is a finding
        kind = f"audit: {kind_of(error)} {str(error)[:200]}"
        if all(one.kind != kind for one in outcome.found):
            _note(outcome, kind, b"", index)
            print(f"{outcome.target}: {kind} (before --only {index})", file=sys.stderr)


def _note(outcome: FuzzOutcome, kind: str, data: bytes, index: int) -> None:
    outcome.found.append(Found(kind=kind, file=str(_keep(outcome.target, kind, data)), index=index))


def _keep(name: str, kind: str, data: bytes) -> Path:
    FINDINGS.mkdir(parents=True, exist_ok=True)
    path = FINDINGS / f"{name}-{hashlib.sha256(kind.encode() + data).hexdigest()[:10]}.bin"
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(f"{kind}\n")
    return path


async def _input(name: str, seed: int, index: int) -> bytes:
    async with _opened(name) as target:
        return await _made(target, name, seed, index, seeds_of(name))


async def _once(name: str, seed: int, index: int, given: bytes | None) -> None:
    """Feed one input, and let its exception be seen."""
    async with _opened(name) as target:
        seeds = seeds_of(name)
        data = await _made(target, name, seed, index, seeds) if given is None else given
        print(data[:4000])
        await target.put(data)
        await target.audit()
    print("served or refused as declared")


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
