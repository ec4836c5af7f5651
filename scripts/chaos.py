"""Kills and stops parts of a cluster under load by a seeded plan, and checks afterwards that nothing is lost.

Emulated engines, sidecars, schedulers and gateways run as processes. Every few seconds one fault happens: SIGKILL of an
engine, a sidecar, a scheduler or the tagger; SIGSTOP of one of them for a while; an engine that hangs or is slow; a
state file that is overwritten. Clients stream answers through the gateways. At the end:

- every request was answered once, with the text that one engine alone would have given (the emulated engines' answer
  follows from the prompt), or ended in an error that is counted by reason;
- nothing is running, waiting or reserved anywhere.

The report also says how memory and file descriptors of the processes that were not restarted have grown, from the
second third of the time to the last.

    python -m scripts.chaos --minutes 1                 # a short plan
    python -m scripts.chaos --minutes 30 --every 10     # the long one
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from scripts.report import report
from services.cluster import Child, Cluster, ClusterSettings, running
from services.emulator.answers import AnswerLengths
from services.emulator.openai import COMPLETION, Served, request_from
from services.http.client import ConnectError, HttpClient, Origin, origin_of, request_head
from services.http.sse import DONE, data_of
from services.logs import configure

POLICY, MODEL = "block", "tiny"
MAX_MODEL_LEN = 4096
WORDS = ["tide", "wind", "salt", "gull", "mast", "rope", "sand", "reef", "foam", "keel"]
TIMEOUT_S = 120.0
REST_S = 60.0  # for everything to come to rest after the load
GROWTH_S = 5.0  # between two looks at memory and descriptors
STOPPED_S = 2.0
GARBAGE = b"\xff" * 4096
TABLES = f"""
[engine]
speed = 4.0
served-model-name = "{MODEL}"
max-num-seqs = 32
max-model-len = {MAX_MODEL_LEN}
[predictor]
metrics-port = 0
[scheduler]
sidecar-deadline-ms = 500
metrics-port = 0
[gateway]
schedule-s = 10.0
connect-s = 5.0
idle-s = 5.0
"""
SERVED = Served(model=MODEL, max_model_len=MAX_MODEL_LEN, lengths=AnswerLengths())


@dataclass(slots=True, kw_only=True)
class Tally:
    """What clients saw."""

    ends: Counter[str] = field(default_factory=Counter)
    num_migrations: int = 0
    pauses_s: list[float] = field(default_factory=list)  # the longest one of each answer that moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of the plan."""

    kind: str
    part: str


@dataclass(slots=True, kw_only=True)
class Growth:
    """Memory and open files of a process over time."""

    samples: list[tuple[int, int]] = field(default_factory=list)  # bytes, descriptors


def main() -> None:
    """Run the plan, print a table or one JSON object, and fail where something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between faults")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--schedulers", type=int, default=2)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--tokens", type=int, default=60, help="mean number of tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    configure("error", "text")
    rows, problems = uvloop.run(run(arguments))
    report("chaos", rows, as_json=arguments.json, settings=vars(arguments), problems=problems)
    if problems:
        sys.exit("chaos: " + "; ".join(problems))


async def run(arguments: argparse.Namespace) -> tuple[list[dict[str, object]], list[str]]:
    """Run the cluster, the load and the plan."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tables = folder / "chaos.toml"
        tables.write_text(TABLES, encoding="utf-8")
        settings = ClusterSettings(
            instances=arguments.engines,
            engines_per_sidecar=1,
            schedulers=arguments.schedulers,
            port=0,
            tables_file=str(tables),
            log_level="error",
        )
        cluster = await stack.enter_async_context(running(settings))
        gateways = [cluster.children[f"gateway-{POLICY}"]]
        for number in range(1, arguments.gateways):
            addresses = [f"--scheduler={address}" for address in cluster.scheduler_addresses[POLICY]]
            more = Child(f"gateway-{number}", "gateway", "--config", str(tables), *addresses)
            await more.start()
            stack.push_async_callback(more.stop)
            gateways.append(more)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT_S))
        tally, growth = Tally(), {child.name: Growth() for child in (*cluster.children.values(), *gateways)}
        done = asyncio.Event()
        watching = asyncio.create_task(watch(growth, [*cluster.children.values(), *gateways], done))
        faults = asyncio.create_task(break_things(cluster, client, arguments, done))
        await load(gateways, arguments, tally)
        done.set()
        happened = await faults
        await watching
        left = await at_rest(cluster, client, gateways)
        restarted = {child.name for child in (*cluster.children.values(), *gateways) if child.num_restarts}
        return results(tally, happened, growth, restarted, left)


# The load.


async def load(gateways: Sequence[Child], arguments: argparse.Namespace, tally: Tally) -> None:
    """Send requests at a rate, to the gateways in turn, and wait for all of them."""
    draw = random.Random(arguments.seed)
    http = HttpClient(connect_s=5.0, max_kept=256)
    end_s = time.monotonic() + 60.0 * arguments.minutes
    number = 0
    try:
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < end_s:
                origin = origin_of(f"http://127.0.0.1:{gateways[number % len(gateways)].port}")
                prompt = f"{number} " + " ".join(draw.choices(WORDS, k=draw.randint(4, 200)))
                max_tokens = max(2, min(1000, round(draw.expovariate(1 / arguments.tokens))))
                tasks.create_task(one(http, origin, prompt, max_tokens, tally))
                number += 1
                await asyncio.sleep(draw.expovariate(arguments.rate))
    finally:
        http.close()


async def one(http: HttpClient, origin: Origin, prompt: str, max_tokens: int, tally: Tally) -> None:
    """Stream an answer, and compare it with what one engine would have said."""
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    body = json.dumps(asked).encode()
    headers = [(b"content-type", b"application/json"), (b"x-request-id", uuid4().hex.encode())]
    head = request_head(b"POST", origin, b"/v1/completions", headers, len(body))
    received, times_s = bytearray(), []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            connection = await http.send(origin, head, body, TIMEOUT_S)
            try:
                if connection.status != 200:
                    tally.ends[f"status {connection.status}"] += 1
                    return
                while piece := await connection.read(TIMEOUT_S):
                    received += piece
                    times_s.append(time.monotonic())
            finally:
                connection.release()
    except ConnectError:
        tally.ends["unreachable"] += 1
        return
    except (ConnectionError, TimeoutError) as error:
        tally.ends[type(error).__name__] += 1
        return
    tally.ends[judged(bytes(received), asked)] += 1
    if b": x-block-migrations:" in received:
        tally.num_migrations += received.count(b": x-block-migrations:")
        tally.pauses_s.append(max((later - earlier for earlier, later in pairwise(times_s)), default=0.0))


def judged(received: bytes, asked: dict[str, Any]) -> str:
    """Compare a stream with the answer of one engine."""
    if b'data: {"error"' in received:
        return "error event"
    events = list(data_of(received))
    if not events or events.pop() != DONE:
        return "cut short"
    expected = request_from(COMPLETION, asked, {}, "expected", SERVED).answer
    parsed = [json.loads(event) for event in events]
    text = "".join(event["choices"][0]["text"] for event in parsed if event["choices"])
    if text != expected.text(0, expected.num_tokens):
        return "other text"
    if [event["usage"]["completion_tokens"] for event in parsed if event.get("usage")] != [expected.num_tokens]:
        return "other usage"
    return "complete"


# The faults.


async def break_things(
    cluster: Cluster, client: httpx.AsyncClient, arguments: argparse.Namespace, done: asyncio.Event
) -> Counter[str]:
    """Carry out one fault after the other, until the load has ended."""
    draw = random.Random(arguments.seed + 1)
    happened: Counter[str] = Counter()
    names = {kind: [name for name in cluster.children if name.startswith(kind)] for kind in KINDS}
    while not done.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), arguments.every)
        if done.is_set():
            break
        kind = draw.choices(["kill", "stop", "hang", "slow", "garble"], [6, 2, 1, 1, 1])[0]
        of = draw.choices(list(KINDS), list(KINDS.values()))[0] if kind in ("kill", "stop") else "engine"
        part = draw.choice(names[of])
        if cluster.children[part].serves:
            await FAULTS[kind](cluster, client, part)
            happened[f"{kind} {of}"] += 1
    return happened


async def kill(cluster: Cluster, _: httpx.AsyncClient, part: str) -> None:
    """SIGKILL; the part is restarted."""
    os.kill(cluster.children[part].pid, signal.SIGKILL)


async def stop(cluster: Cluster, _: httpx.AsyncClient, part: str) -> None:
    """SIGSTOP for a while: it accepts connections and does nothing."""
    pid = cluster.children[part].pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def hang(cluster: Cluster, client: httpx.AsyncClient, part: str) -> None:
    """Let an engine do no steps for a while."""
    await order(cluster, client, part, hang=True)
    await asyncio.sleep(STOPPED_S)
    await order(cluster, client, part)


async def slow(cluster: Cluster, client: httpx.AsyncClient, part: str) -> None:
    """Let an engine take ten times as long for a while."""
    await order(cluster, client, part, slow=10.0)
    await asyncio.sleep(STOPPED_S)
    await order(cluster, client, part)


async def garble(cluster: Cluster, _: httpx.AsyncClient, part: str) -> None:
    """Overwrite the state file of an engine, which writes it again at its next steps."""
    path = cluster.folder / f"{part}.state"
    with suppress(OSError), path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(GARBAGE[: path.stat().st_size // 4])


async def order(cluster: Cluster, client: httpx.AsyncClient, part: str, **faults: Any) -> None:
    """Set the faults of an engine; one that was killed meanwhile has none."""
    with suppress(httpx.HTTPError):
        await client.post(f"{cluster.url_of(part)}/admin/fault", json=faults)


KINDS = {"engine": 6.0, "predictor": 3.0, "scheduler": 2.0, "tagger": 1.0}  # with their weights
FAULTS: dict[str, Callable[[Cluster, httpx.AsyncClient, str], Awaitable[None]]] = {
    "kill": kill, "stop": stop, "hang": hang, "slow": slow, "garble": garble,
}  # fmt: skip


# Afterwards.


async def watch(growth: dict[str, Growth], children: Sequence[Child], done: asyncio.Event) -> None:
    """Note memory and descriptors of every process now and then."""
    while not done.is_set():
        for child in children:
            with suppress(OSError, IndexError):
                growth[child.name].samples.append(size_of(child.pid))
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), GROWTH_S)


def size_of(pid: int) -> tuple[int, int]:
    """Return the resident bytes and the open descriptors of a process."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), sum(1 for _ in (process / "fd").iterdir())


async def at_rest(cluster: Cluster, client: httpx.AsyncClient, gateways: Sequence[Child]) -> dict[str, float]:
    """Wait until nothing runs, waits or is reserved; return what is left after a while."""
    asked = [
        (cluster.children[name], "block_reservations") for name in cluster.children if name.startswith("predictor")
    ]
    for name in cluster.children:
        if name.startswith("engine"):
            asked += [(cluster.children[name], f"vllm:num_requests_{state}") for state in ("running", "waiting")]
    for gateway in gateways:
        asked += [(gateway, f"block_gateway_{what}") for what in ("requests_under_way", "releases_waiting")]
    until_s = time.monotonic() + REST_S
    while True:
        left = {}
        for child, name in asked:
            try:
                value = await metric_of(client, child, name)
            except httpx.HTTPError:
                value = -1.0  # it is being restarted
            if value:
                left[f"{child.name} {name}"] = value
        if not left or time.monotonic() > until_s:
            return left
        await asyncio.sleep(0.5)


async def metric_of(client: httpx.AsyncClient, child: Child, name: str) -> float:
    """Sum a metric of a process."""
    text = (await client.get(f"http://127.0.0.1:{child.metrics_port or child.port}/metrics")).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def results(
    tally: Tally,
    happened: Counter[str],
    growth: dict[str, Growth],
    restarted: set[str],
    left: dict[str, float],
) -> tuple[list[dict[str, object]], list[str]]:
    """Return the rows of the report, and what is wrong."""
    num = sum(tally.ends.values())
    rows = [
        {"name": f"requests.{end}", "value": float(count), "unit": "requests", "n": num}
        for end, count in sorted(tally.ends.items())
    ]
    rows += [
        {"name": f"faults.{name}", "value": float(count), "unit": "faults", "n": sum(happened.values())}
        for name, count in sorted(happened.items())
    ]
    rows.append({"name": "migrations", "value": float(tally.num_migrations), "unit": "streams", "n": num})
    if tally.pauses_s:
        rows.append(
            {"name": "migration_pause.median", "value": median(tally.pauses_s), "unit": "s", "n": len(tally.pauses_s)}
        )
    problems = [f"{count} requests: {end}" for end, count in sorted(tally.ends.items()) if end != "complete"]
    problems += [f"left: {name} = {value:g}" for name, value in left.items()]
    for name, one in growth.items():
        third = len(one.samples) // 3
        if name in restarted or third < 3:
            continue
        for column, unit in enumerate(("memory", "descriptors")):
            before, after = (
                median(sample[column] for sample in part)
                for part in (one.samples[third : 2 * third], one.samples[-third:])
            )
            ratio = after / before
            rows.append({"name": f"growth.{name}.{unit}", "value": ratio, "unit": "ratio", "n": third})
    return rows, problems


if __name__ == "__main__":
    main()
