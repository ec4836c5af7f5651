"""A running cluster that several tests share, and how they observe it and inject faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from services.cluster import Child, Cluster, ClusterSettings, running
from tests.services.waiting import PATIENCE_S, until

MODEL = "tiny"
LIMIT_S = 480.0  # of one test
NUM_ENGINES, NUM_SEATS = 3, 8
ENGINES = [f"engine-{number}" for number in range(NUM_ENGINES)]
SIDECARS = [f"predictor-{number}" for number in range(NUM_ENGINES)]
SCHEDULERS = ["scheduler-block-0", "scheduler-block-1"]

ENGINE_TABLE = """
[engine]
profile = "llama-2-7b-a30"
served-model-name = "tiny"
speed = 4.0
max-num-seqs = 8
max-model-len = 512
num-gpu-blocks = 49
"""  # its cache holds 768 tokens
# Deadlines are long, for slow machines, except those that tests wait for: of engines that hang.
TABLES = f"""
[cluster]
instances = 3
schedulers = 2
port = 0
{ENGINE_TABLE}[predictor]
metrics-port = 0
stall-s = 2.0
forget-s = 2.0
[tagger]
metrics-port = 0
[scheduler]
metrics-port = 0
poll-s = 0.1
sidecar-deadline-ms = 5000
tagger-deadline-ms = 5000
reservation-s = 30
[gateway]
schedule-s = 20.0
connect-s = 10.0
first-byte-s = 40.0
idle-s = 10.0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """The cluster, the event loop that supervises it, and an HTTP client."""

    cluster: Cluster
    runner: asyncio.Runner
    client: httpx.AsyncClient

    def run(self, test: Coroutine[Any, Any, None], *, may_expire: bool = False) -> None:
        """Run a test on the cluster's event loop; a test that hangs, or leaves anything behind, fails.

        Reservations are to be used or released, unless they `may_expire`.
        """

        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                before = await self.num_expired()
                await test
                await until(self.is_at_rest)
                assert may_expire or await self.num_expired() <= before

        self.runner.run(limited())

    @property
    def gateway(self) -> str:
        """The URL of the gateway."""
        return self.cluster.gateway_urls["block"]

    async def kill(self, name: str) -> Callable[[], bool]:
        """Kill a part by SIGKILL; the returned function reports whether it has been restarted since."""
        child = self.cluster.children[name]
        num_restarts = child.num_restarts
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: not child.serves)
        return lambda: child.num_restarts > num_restarts and child.serves

    async def order(self, engine: str, **faults: Any) -> None:
        """Set the faults of an engine; without any it is healthy again."""
        answer = await self.client.post(f"{self.cluster.url_of(engine)}/admin/fault", json=faults)
        assert answer.status_code == 200, answer.text

    async def metric(self, part: str, name: str, **labels: str) -> float:
        """Sum a metric of a part over the series with these labels."""
        return await metric_of(self.client, self.cluster.children[part], name, **labels)

    async def until_metric(self, part: str, name: str, holds: Callable[[float], bool], **labels: str) -> None:
        """Wait until a metric of a part satisfies a condition."""

        async def is_so() -> bool:
            return holds(await self.metric(part, name, **labels))

        await until(is_so)

    async def num_expired(self) -> float:
        """The number of reservations that have neither been used nor released."""
        return sum([await self.metric(name, "block_reservations_ended_total", how="expired") for name in SIDECARS])

    async def is_at_rest(self) -> bool:
        """Return whether no request is in progress and nothing is reserved."""
        parts = [(name, "block_reservations") for name in SIDECARS]
        parts += [(name, f"vllm:num_requests_{state}") for name in ENGINES for state in ("running", "waiting")]
        parts += [("gateway-block", f"block_gateway_{what}") for what in ("requests_under_way", "releases_waiting")]
        return not any([await self.metric(part, name) for part, name in parts])

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stop a process by SIGSTOP while the block runs: it accepts connections, and does nothing."""
        pid = self.cluster.children[name].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @asynccontextmanager
    async def another_gateway(self, *flags: str) -> AsyncIterator[Child]:
        """Run one more gateway in front of the same schedulers while the block runs."""
        schedulers = [f"--scheduler={self.cluster.address_of(name)}" for name in SCHEDULERS]
        gateway = Child("gateway-more", "gateway", *schedulers, *flags)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.stop()

    @contextmanager
    def also_listed(self, sidecars: Mapping[str, int], *, without: Collection[str] = ()) -> Iterator[None]:
        """Add instances with these sidecars and the first engine to the list while the block runs.

        Meanwhile the list has none of the instances in `without`.
        """
        file = self.cluster.instances_file
        before = json.loads(file.read_text(encoding="utf-8"))
        kept = [one for one in before["instances"] if one["instance_id"] not in without]
        more = [
            {
                "instance_id": name,
                "engine_url": self.cluster.url_of(ENGINES[0]),
                "sidecar_address": f"127.0.0.1:{port}",
            }
            for name, port in sidecars.items()
        ]
        replace_text(file, json.dumps({"instances": kept + more}))
        try:
            yield
        finally:
            replace_text(file, json.dumps(before))


async def metric_of(client: httpx.AsyncClient, child: Child, name: str, **labels: str) -> float:
    """Sum a metric of a process over the series with these labels."""
    text = (await client.get(f"http://127.0.0.1:{child.metrics_port or child.port}/metrics")).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def replace_text(file: Path, text: str) -> None:
    """Replace a file as a whole."""
    new = file.with_suffix(".test")
    new.write_text(text, encoding="utf-8")
    new.rename(file)


@contextmanager
def living(folder: Path) -> Iterator[Living]:
    """Run a cluster while the block runs: three engines and their sidecars, a tagger, two schedulers, a gateway."""
    file = folder / "cluster.toml"
    file.write_text(TABLES, encoding="utf-8")
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def start() -> Living:
            settings = ClusterSettings(
                instances=NUM_ENGINES, engines_per_sidecar=1, schedulers=2, port=0, tables_file=str(file)
            )
            cluster = await stack.enter_async_context(running(settings))
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))
            return Living(cluster=cluster, runner=runner, client=client)

        try:
            yield runner.run(start())
        finally:
            runner.run(stack.aclose())


def is_some(number: float) -> bool:
    """Return whether a value is above 0."""
    return number > 0


def is_none(number: float) -> bool:
    """Return whether a value is 0."""
    return number == 0
