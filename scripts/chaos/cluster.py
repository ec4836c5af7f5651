"""The processes of a chaos run: emulated engines, sidecars, tagger, provisioner, schedulers and gateways."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scripts.chaos.links import FailingLink
from scripts.chaos.machine import SmallDisk, WallClocks, remove_left_clocks
from scripts.chaos.plan import CLOCKED, ENGINES_PER_SIDECAR, ChaosSettings, kind_of
from services.cluster.child import Child, StartError
from services.cluster.programs import BlockServer

MODEL = "tiny"
MAX_MODEL_LEN = 4096
HOST = "127.0.0.1"
AT_ONCE = 2 * (os.cpu_count() or 1)
TABLES = f"""
[engine]
speed = 4.0
served-model-name = "{MODEL}"
max-num-seqs = 32
max-model-len = {MAX_MODEL_LEN}
[predictor]
metrics-port = 0
[tagger]
metrics-port = 0
[provisioner]
metrics-port = 0
[scheduler]
sidecar-deadline-ms = 500
metrics-port = 0
idle-s = 5.0
record-mib = 256
max-explained = 256
[gateway]
schedule-s = 10.0
connect-s = 5.0
idle-s = 5.0
"""


@dataclass(slots=True, kw_only=True)
class ChaosCluster:
    """The running processes by name, the links that can fail, and the files that can be damaged."""

    settings: ChaosSettings
    folder: Path
    disk: SmallDisk
    clocks: WallClocks
    children: dict[str, Child] = field(default_factory=dict)
    links: dict[str, FailingLink] = field(default_factory=dict)

    @property
    def instances_file(self) -> Path:
        """The list of instances that schedulers follow."""
        return self.folder / "instances.json"

    @property
    def pool_folder(self) -> Path:
        """The folder of the provisioner, whose instances take no load."""
        return self.disk.folder / "pool"

    def state_file(self, engine: str) -> Path:
        """The state file of an engine."""
        return self.disk.folder / f"{engine}.state"

    def recording(self, scheduler: str) -> Path:
        """The decisions and outcomes that a scheduler has recorded."""
        return self.disk.folder / f"{scheduler}.jsonl"

    def of_kind(self, *kinds: str) -> list[Child]:
        """Return the processes of some kinds."""
        return [child for name, child in self.children.items() if kind_of(name) in kinds]

    def address_of(self, name: str) -> str:
        """Return the address of a process."""
        return f"{HOST}:{self.children[name].port}"

    def url_of(self, name: str) -> str:
        """Return the URL of a process."""
        return f"http://{self.address_of(name)}"

    def write_instances(self) -> None:
        """Write the list of instances: those with a link are reached through it."""
        instances = []
        for number in range(self.settings.engines):
            engine, sidecar = f"engine-{number}", f"predictor-{number // ENGINES_PER_SIDECAR}"
            engine_link, sidecar_link = (self.links.get(f"{kind}-link-{number}") for kind in ("engine", "sidecar"))
            engine_port = self.children[engine].port if engine_link is None else engine_link.port
            sidecar_port = self.children[sidecar].port if sidecar_link is None else sidecar_link.port
            instances.append(
                {
                    "instance_id": engine,
                    "engine_url": f"http://{HOST}:{engine_port}",
                    "sidecar_address": f"{HOST}:{sidecar_port}",
                }
            )
        complete = self.instances_file.with_suffix(".new")
        complete.write_text(json.dumps({"instances": instances}), encoding="utf-8")
        complete.rename(self.instances_file)

    # Starting and stopping.

    async def start(self) -> None:
        """Start all processes, from the back to the front; StartError if one does not serve."""
        await warm()
        tables = self.folder / "chaos.toml"
        tables.write_text(TABLES, encoding="utf-8")
        common = ("--config", str(tables), "--host", HOST)
        numbers = range(self.settings.engines)
        engines = [f"engine-{number}" for number in numbers]
        seeds = zip(engines, numbers, strict=True)
        flags = {name: ("--state-file", str(self.state_file(name)), "--seed", str(seed)) for name, seed in seeds}
        await self._start([self._child(name, "engine", *common, *flags[name]) for name in engines])
        await self._start([self._child("tagger", "tagger", *common)])
        await self._start(self._sidecars(common))
        await self._start_links()
        self.write_instances()
        await self._start([self._provisioner(common)])
        schedulers = [f"scheduler-{number}" for number in range(self.settings.schedulers)]
        await self._start([self._scheduler(name, common) for name in schedulers])
        addresses = [f"--scheduler={self.address_of(child.name)}" for child in self.of_kind("scheduler")]
        gateways = [f"gateway-{number}" for number in range(self.settings.gateways)]
        await self._start([self._child(name, "gateway", *common, *addresses) for name in gateways])

    async def stop(self) -> None:
        """Stop all processes, from the front to the back, and what the provisioner left behind."""
        for kind in ("gateway", "scheduler", "tagger", "provisioner", "predictor", "engine"):
            await asyncio.gather(*(child.stop() for child in self.of_kind(kind)))
        for link in self.links.values():
            await link.stop()
        await asyncio.to_thread(self._kill_pool)

    def _kill_pool(self) -> None:
        for path in self.pool_folder.glob("**/*.pid"):
            with suppress(OSError, ValueError):
                pid = int(path.read_text(encoding="ascii"))
                if str(path.parent) in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"):
                    os.killpg(pid, signal.SIGKILL)

    def _child(self, name: str, *arguments: str) -> Child:
        environment = self.clocks.environment(name) if kind_of(name) in CLOCKED else {}
        return Child(name, program=BlockServer(arguments=arguments, environment=environment))

    def _sidecars(self, common: tuple[str, ...]) -> list[Child]:
        sidecars = []
        for number in range(self.settings.num_sidecars):
            first = number * ENGINES_PER_SIDECAR
            engines = [f"engine-{one}" for one in range(first, min(first + ENGINES_PER_SIDECAR, self.settings.engines))]
            followed = [f"--engine={name}={self.state_file(name)},{self.url_of(name)}" for name in engines]
            sidecars.append(self._child(f"predictor-{number}", "predictor", *common, *followed))
        return sidecars

    def _provisioner(self, common: tuple[str, ...]) -> Child:
        config = shlex.join(common[:2])
        return self._child(
            "provisioner", "provisioner", *common, "--folder", str(self.pool_folder), "--min-instances", "1",
            "--max-instances", "2", "--seats", "32", "--hook", "process", "--end-instances", "--engine-flags", config,
            "--sidecar-flags", config,
        )  # fmt: skip

    def _scheduler(self, name: str, common: tuple[str, ...]) -> Child:
        return self._child(
            name, "scheduler", *common, "--policy", "block", "--scheduler-id", name, "--instances-file",
            str(self.instances_file), "--tagger", self.address_of("tagger"), "--provisioner",
            self.address_of("provisioner"), "--record", str(self.recording(name)),
        )  # fmt: skip

    async def _start_links(self) -> None:
        for number in self.settings.linked:
            for kind, part in (("engine", number), ("predictor", number // ENGINES_PER_SIDECAR)):
                name = f"{'engine' if kind == 'engine' else 'sidecar'}-link-{number}"
                self.links[name] = FailingLink(partial(self._port_of, f"{kind}-{part}"))
                await self.links[name].start()

    def _port_of(self, name: str) -> int:
        return self.children[name].port

    async def _start(self, children: Iterable[Child]) -> None:
        limit = asyncio.Semaphore(AT_ONCE)

        async def start(child: Child) -> None:
            async with limit:
                await child.start()

        try:
            async with asyncio.TaskGroup() as tasks:
                for child in children:
                    self.children[child.name] = child
                    tasks.create_task(start(child))
        except* StartError as errors:
            raise errors.exceptions[0] from None


async def warm() -> None:
    """Compile the kernels, so that no process has to when it starts."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "warm", stdout=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise StartError("the kernels cannot be compiled: see block warm")


@asynccontextmanager
async def cluster_running(settings: ChaosSettings, folder: Path) -> AsyncIterator[ChaosCluster]:
    """Run a cluster while the block runs, with its files in a folder."""
    disk = SmallDisk(folder / "disk")
    with disk.mounted():
        cluster = ChaosCluster(settings=settings, folder=folder, disk=disk, clocks=WallClocks(folder / "clocks"))
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()
            remove_left_clocks()
