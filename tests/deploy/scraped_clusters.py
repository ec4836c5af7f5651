"""Two small clusters under load and faults, with a Prometheus that scrapes all of their processes.

One has a provisioner with tiers, a scheduler, an endpoint picker beside it, and requests that wait or are refused; the
other has a prefill and two decode engines and a gateway that decides in its own process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from services.cluster import Cluster, ClusterSettings, running
from services.cluster.child import Child
from services.cluster.settings import settings_from_file
from tests.deploy.prometheus_programs import RULE_FILES, RULES, program
from tests.deploy.scraped_picker import asked, picker_over
from tests.ports import free_port
from tests.services.waiting import PATIENCE_S, bound, until

MODEL = "tiny"
CLIENTS = 12  # of each cluster, each with one request after the other
SCRAPE_S = 1
STOPPED_S = 1.0
COMMON = """
[engine]
profile = "llama-2-7b-a30"
served-model-name = "tiny"
speed = 4.0
max-num-seqs = 4
max-model-len = 512
num-gpu-blocks = 257
[predictor]
metrics-port = 0
stall-s = 60.0
profile-check-s = 15.0
profile-check-window-s = 5.0
[tagger]
metrics-port = 0
[scheduler]
metrics-port = 0
poll-s = 0.2
sidecar-deadline-ms = 2000
tagger-deadline-ms = 2000
[gateway]
schedule-s = 20.0
connect-s = 20.0
first-byte-s = 60.0
"""
PROVISIONED = """
[cluster]
port = 0
schedulers = 1
policies = ["slo"]
provision = "1-2"
[provisioner]
metrics-port = 0
cold-start-s = 120.0
tick-s = 0.5
tiers = "{tiers}"
"""
TIERS = "[[tier]]\nname = 'fast'\ntpot_slo_s = 0.05\n"
POOLED = """
[cluster]
port = 0
prefill = 1
decode = 2
policies = ["block"]
"""
HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"x-slo-ttft-ms": "2000", "x-slo-tpot-ms": "200", "x-llm-d-inference-fairness-id": "alice"},
    {"x-slo-tpot-ms": "60", "x-block-class": "best-effort", "x-llm-d-inference-fairness-id": "bob"},
    {"x-slo-ttft-ms": "1", "x-block-when-late": "shed"},
    {"x-slo-ttft-ms": "1", "x-block-when-late": "demote"},
    {"x-slo-ttft-ms": "1", "x-block-when-late": "serve"},
)


@dataclass(slots=True, kw_only=True)
class Scraped:
    """The clusters, and what Prometheus says."""

    provisioned: Cluster
    pooled: Cluster
    picker: Child
    client: httpx.AsyncClient
    url: str  # of Prometheus
    targets: Path
    faults: Iterator[str] = field(
        default_factory=lambda: itertools.cycle(("prefill", "scheduler", "tagger", "sidecar", "engine"))
    )

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate an expression now; its series."""
        reply = await self.client.get(f"{self.url}/api/v1/query", params={"query": expression})
        assert reply.status_code == 200, f"{expression}: {reply.text}"
        result: list[dict[str, Any]] = reply.json()["data"]["result"]
        return result

    async def rules(self) -> list[dict[str, Any]]:
        """All rules as they were evaluated last."""
        groups = (await self.client.get(f"{self.url}/api/v1/rules")).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def kill_next(self) -> None:
        """Kill a part, each time another one; its cluster starts it again."""
        cluster, name = {
            "scheduler": (self.provisioned, "scheduler-slo-0"),
            "tagger": (self.pooled, "tagger"),
            "sidecar": (self.pooled, "predictor-0"),
            "prefill": (self.pooled, "prefill-0"),
            "engine": (self.pooled, "decode-0"),
        }[next(self.faults)]
        child = cluster.children[name]
        if not child.serves:
            return
        if name == "prefill-0":  # prefill legs are short: stopped first, it has one in progress when it is killed
            os.kill(child.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(STOPPED_S, kill_child, child.pid)
        else:
            kill_child(child.pid)

    def write_targets(self) -> None:
        """Write the lists of targets that the shipped configuration follows."""
        jobs: dict[str, list[tuple[str, str]]] = {}
        for cluster in (self.provisioned, self.pooled):
            for name, child in cluster.children.items():
                part, port = name.split("-")[0], child.metrics_port or child.port
                job = {"predictor": "block-sidecar", "prefill": "vllm", "decode": "vllm", "engine": "vllm"}.get(
                    part, f"block-{part}"
                )
                jobs.setdefault(job, []).append((f"{cluster.folder.name}/{name}" if job != "vllm" else name, str(port)))
        jobs["block-picker"] = [("picker", str(self.picker.metrics_port))]
        for instance, engine, sidecar in self._started_by_the_provisioner():
            jobs.setdefault("vllm", []).append((instance, engine))
            jobs.setdefault("block-sidecar", []).append((f"{instance}/sidecar", sidecar))
        for job, found in jobs.items():
            listed = [{"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in found]
            file = self.targets / f"{job}.yml"
            new = file.with_suffix(".new")
            new.write_text(yaml.safe_dump(listed))
            new.rename(file)

    def _started_by_the_provisioner(self) -> Iterator[tuple[str, str, str]]:
        """Each instance with the ports of its engine and of its sidecar's metrics."""
        for file in self.provisioned.instances_file.parent.glob("**/instance.json"):
            port = re.search(r"metrics_port=(\d+)", (file.parent / "sidecar.log").read_text(errors="replace"))
            if port is not None:
                yield file.parent.name, str(json.loads(file.read_text())["engine_port"]), port[1]


def kill_child(pid: int) -> None:
    """Kill a part that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def scraped(folder: Path) -> AsyncIterator[Scraped]:
    """Run clusters, load and Prometheus while the block runs."""
    (folder / "tiers.toml").write_text(TIERS)
    async with AsyncExitStack() as stack:
        clusters = []
        for name, tables in (
            ("provisioned", PROVISIONED.format(tiers=folder / "tiers.toml")),
            ("pooled", POOLED),
        ):
            file = folder / f"{name}.toml"
            file.write_text(tables + COMMON)
            settings = ClusterSettings(**settings_from_file(str(file)), tables_file=str(file))
            clusters.append(await stack.enter_async_context(running(settings)))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))
        home = folder / "prometheus"
        (home / "targets").mkdir(parents=True)
        url = await stack.enter_async_context(prometheus(home, client))
        picker = await stack.enter_async_context(picker_over(clusters[0].instances_file))
        found = Scraped(
            provisioned=clusters[0], pooled=clusters[1], picker=picker, client=client, url=url, targets=home / "targets"
        )
        found.write_targets()
        for cluster in clusters:
            (gateway,) = cluster.gateway_urls.values()
            await stack.enter_async_context(loaded(gateway, client))
        await stack.enter_async_context(asked(picker, client))
        yield found


@asynccontextmanager
async def prometheus(home: Path, client: httpx.AsyncClient) -> AsyncIterator[str]:
    """Run Prometheus with the shipped configuration, at a shorter interval; the context value is its URL."""
    config = (RULES / "prometheus.yml").read_text(encoding="utf-8")
    (home / "prometheus.yml").write_text(config.replace("_interval: 15s", f"_interval: {SCRAPE_S}s"))
    for file in RULE_FILES:
        shutil.copy(file, home)

    async def start() -> tuple[asyncio.subprocess.Process, str]:
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            program("prometheus"), f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"

        async def is_ready() -> bool:
            if process.returncode is not None:
                raise OSError("Prometheus ended")
            with suppress(httpx.HTTPError):
                return (await client.get(f"{url}/-/ready")).status_code == 200
            return False

        await until(is_ready)
        return process, url

    process, url = await bound(start)
    try:
        yield url
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def loaded(gateway: str, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Keep a gateway busy while the block runs: streams with and without targets, some of which the client leaves."""

    async def one_after_the_other(number: int) -> None:
        for count in itertools.count(number):
            body = {
                "model": MODEL, "prompt": f"{number} tell me more " * 30, "max_tokens": 8 + count % 24, "stream": True,
            }  # fmt: skip
            headers = HEADERS[count % len(HEADERS)]
            with suppress(httpx.HTTPError):
                async with client.stream("POST", f"{gateway}/v1/completions", json=body, headers=headers) as reply:
                    async for _ in reply.aiter_bytes():
                        if count % 17 == 0:
                            break
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(one_after_the_other(number)) for number in range(CLIENTS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
