"""The whole system on one machine: engines, emulated or vLLM, and all other components, each a process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.instances import BOTH
from scheduler.policy import policy_from
from services.cluster.autoscaling import NAME as PROVISIONER
from services.cluster.autoscaling import first_instances, provisioner_of
from services.cluster.child import Child, StartError
from services.cluster.engines import engines_of, kv_event_flags, require_exported
from services.cluster.link_security import LinkSecurity
from services.cluster.pools import emulator_flags, pass_blocks_on
from services.cluster.settings import ClusterSettings, VllmSettings
from services.engine_state.identity import rank_file
from services.placement.decision_time import DECIDE_S, schedule_s_of
from services.rpc.channels import refuse_taken

__all__ = ["Child", "Cluster", "ClusterSettings", "StartError", "VllmSettings", "running", "write_instances"]

MEMORY = Path("/dev/shm")  # noqa: S108 - where processes of one machine share memory
AT_ONCE = 2 * (os.cpu_count() or 1)  # processes that start at a time: more would only compete for the CPU


@dataclass(slots=True)
class Cluster:
    """A running cluster: engine-0, …, predictor-0, … (or provisioner), tagger, scheduler-block-0, …, gateway-block.

    With pools, the engines are prefill-0, …, decode-0, … and engine-0, … .
    """

    settings: ClusterSettings
    folder: Path
    children: dict[str, Child] = field(default_factory=dict)
    security: LinkSecurity | None = None  # without, every connection is plain text
    legs_apart: bool = True  # whether its engines can prefill and decode for each other, if they have roles

    @property
    def instances_file(self) -> Path:
        """The list of instances, which schedulers watch for changes."""
        if self.settings.instance_range is not None:
            return self.folder / PROVISIONER / "instances.json"
        return self.folder / "instances.json"

    @property
    def state_files(self) -> list[Path]:
        """The state file of each engine that is not mirrored."""
        return [self.folder / f"{engine.name}.state" for engine in self.settings.engines]

    @property
    def gateway_urls(self) -> Mapping[str, str]:
        """The URL of each policy's gateway."""
        return {policy: self.url_of(f"gateway-{policy}") for policy in self.settings.policies}

    @property
    def scheduler_addresses(self) -> Mapping[str, Sequence[str]]:
        """The addresses at which block.v1.Scheduler is served for each policy."""
        if not self.settings.schedulers:
            ports = {policy: self.children[f"gateway-{policy}"].scheduler_port for policy in self.settings.policies}
            return {policy: (f"{self.settings.host}:{port}",) for policy, port in ports.items()}
        numbers = range(self.settings.schedulers)
        return {
            policy: [self.address_of(f"scheduler-{policy}-{number}") for number in numbers]
            for policy in self.settings.policies
        }

    @property
    def operator_urls(self) -> Mapping[str, Sequence[str]]:
        """The URLs of the ports for operators of each policy: where instances are drained."""
        urls: dict[str, Sequence[str]] = {}
        for policy in self.settings.policies:
            names = [f"scheduler-{policy}-{number}" for number in range(self.settings.schedulers)]
            parts = [self.children[name] for name in names or [f"gateway-{policy}"]]
            urls[policy] = [f"{self.scheme}://{self.settings.host}:{part.metrics_port}" for part in parts]
        return urls

    @property
    def provisioner_address(self) -> str:
        """The address of the provisioner; empty without one."""
        return self.address_of(PROVISIONER) if self.settings.instance_range is not None else ""

    @property
    def scheme(self) -> str:
        """The scheme of all URLs."""
        return "http" if self.security is None else "https"

    def url_of(self, name: str) -> str:
        """The URL of a component with an HTTP server."""
        return f"{self.scheme}://{self.settings.host}:{self.children[name].port}"

    def engine_url_of(self, number: int) -> str:
        """The URL of an engine for clients: the proxy of its sidecar, if that mirrors it."""
        proxy_port = self.sidecar_of(number).proxy_port
        if proxy_port is None:
            return self.url_of(self.settings.engines[number].name)
        return f"{self.scheme}://{self.settings.host}:{proxy_port}"

    def sidecar_of(self, number: int) -> Child:
        """The sidecar process of an engine: its own if the engine is mirrored, otherwise one for several engines."""
        per_sidecar = 1 if self.settings.mirror else self.settings.engines_per_sidecar
        return self.children[f"predictor-{number // per_sidecar}"]

    def address_of(self, name: str) -> str:
        """The address of a component with a gRPC server."""
        return f"{self.settings.host}:{self.children[name].port}"


@asynccontextmanager
async def running(settings: ClusterSettings, started: Callable[[str], None] | None = None) -> AsyncIterator[Cluster]:
    """Run a cluster while the block runs; `started` is called for each part that serves. StartError if one does not."""
    refuse_taken(settings.host, settings.port, "port")  # the gateway, which listens on it, starts last
    cluster = Cluster(settings=settings, folder=_new_folder(settings.folder))
    try:
        if settings.tls:
            certificates = Path(settings.tls_folder) if settings.tls_folder else cluster.folder / "tls"
            cluster.security = LinkSecurity.in_folder(certificates.absolute(), settings.host)
        if settings.instance_range is None:
            await _start(cluster, _engines_and_tagger(cluster), started)
            require_exported(settings, cluster.state_files)
            urls = {name: cluster.url_of(name) for name in _pooled(settings)}
            tls = None if cluster.security is None else cluster.security.client().http_context
            cluster.legs_apart = await pass_blocks_on(urls, tls)
            await _start(cluster, _sidecars(cluster), started)
        else:
            await _start(cluster, _provisioner_and_tagger(cluster), started)
            await first_instances(cluster.instances_file, settings.instance_range.minimum)
        for layer in (_schedulers, _gateways):
            await _start(cluster, layer(cluster), started)
        yield cluster
    finally:
        await _stop(cluster)
        shutil.rmtree(cluster.folder, ignore_errors=True)


def _engines_and_tagger(cluster: Cluster) -> list[Child]:
    settings = cluster.settings
    engines = engines_of(settings, _common(cluster, "engine"), cluster.state_files, cluster.security)
    return [*engines, Child("tagger", "tagger", *_common(cluster, "tagger"))]


def _provisioner_and_tagger(cluster: Cluster) -> list[Child]:
    settings, common = cluster.settings, _common(cluster, PROVISIONER)
    assert settings.instance_range is not None
    folder = cluster.instances_file.parent
    provisioner = provisioner_of(settings, settings.instance_range, common, folder, cluster.security)
    return [provisioner, Child("tagger", "tagger", *_common(cluster, "tagger"))]


def _sidecars(cluster: Cluster) -> list[Child]:
    settings = cluster.settings
    numbers = range(len(settings.engines))
    if settings.mirror:
        return [
            Child(
                f"predictor-{number}", "predictor", *_common(cluster, "predictor"), "--instance-id", engine.name,
                "--engine-url", cluster.url_of(engine.name), *emulator_flags(engine),
                *kv_event_flags(settings, cluster.state_files[number], follows=True), *settings.sidecar_flags,
                proxy_port=0,
            )
            for number, engine in enumerate(settings.engines)
        ]  # fmt: skip
    per_sidecar = settings.engines_per_sidecar
    return [
        Child(
            f"predictor-{index}", "predictor", *_common(cluster, "predictor"),
            *(word for number in group for flag in _engine_flags(cluster, number) for word in ("--engine", flag)),
            *settings.sidecar_flags,
        )
        for index, group in enumerate(numbers[first : first + per_sidecar] for first in numbers[::per_sidecar])
    ]  # fmt: skip


def _engine_flags(cluster: Cluster, number: int) -> list[str]:
    """Write the flags of an engine that a sidecar follows, one for each of its ranks."""
    name, file = cluster.settings.engines[number].name, str(cluster.state_files[number])
    return [
        f"{instance}={file if rank is None else rank_file(file, rank)},{cluster.url_of(name)}"
        for instance, rank in _ranks(cluster.settings, name)
    ]


def _ranks(settings: ClusterSettings, engine: str) -> list[tuple[str, int | None]]:
    """Return the instances of an engine with their data-parallel ranks; the only one of an engine has no rank."""
    if settings.data_parallel == 1:
        return [(engine, None)]
    return [(f"{engine}-rank-{rank}", rank) for rank in range(settings.data_parallel)]


def _schedulers(cluster: Cluster) -> list[Child]:
    settings = cluster.settings
    if settings.instance_range is None:
        write_instances(cluster)
    return [
        Child(
            f"scheduler-{policy}-{number}",
            "scheduler",
            *_common(cluster, "scheduler"),
            *_decision_flags(cluster, policy, number),
        )
        for policy in settings.policies
        for number in range(settings.schedulers)
    ]


def _decision_flags(cluster: Cluster, policy: str, number: int) -> list[str]:
    """Write the flags of a process that decides: a scheduler, or a gateway without one."""
    settings = cluster.settings
    flags = [*_objectives_flags(settings), "--policy", policy, "--instances-file", str(cluster.instances_file)]
    flags += ["--tagger", cluster.address_of("tagger"), "--scheduler-id", f"{policy}-{number}"]
    if settings.instance_range is not None:
        flags += ["--provisioner", cluster.address_of(PROVISIONER)]
    return [*flags, "--metrics-port", "0", *settings.scheduler_flags]


def _objectives_flags(settings: ClusterSettings) -> list[str]:
    return ["--objectives", settings.objectives] if settings.objectives else []


def _gateways(cluster: Cluster) -> list[Child]:
    settings = cluster.settings
    gateways = []
    for index, policy in enumerate(settings.policies):
        addresses = [cluster.address_of(f"scheduler-{policy}-{number}") for number in range(settings.schedulers)]
        flags = [*_objectives_flags(settings), *(word for one in addresses for word in ("--scheduler", one))]
        if settings.tables_file is None and (needed_s := schedule_s_of(policy_from(policy))) > DECIDE_S:
            flags += ["--schedule-s", f"{needed_s:g}"]  # gateways do not know the policy of schedulers
        if not settings.schedulers:
            flags = ["--decide", "in-process", "--scheduler-port", "0", *_decision_flags(cluster, policy, 0)]
        port = 0 if index else settings.port
        gateways.append(Child(f"gateway-{policy}", "gateway", *_common(cluster, "gateway"), *flags, port=port))
    return gateways


def _common(cluster: Cluster, part: str) -> tuple[str, ...]:
    """Write the flags of every process; each reads its own table of the file."""
    settings = cluster.settings
    protection = () if cluster.security is None else cluster.security.flags(part)
    if settings.insecure:
        protection += ("--insecure",)
    config = ("--config", settings.tables_file) if settings.tables_file is not None else ()
    # the line about serving is needed here
    level = "debug" if settings.log_level == "debug" else "info"
    return (*config, "--host", settings.host, "--log-level", level, *protection)


def _pooled(settings: ClusterSettings) -> list[str]:
    return [engine.name for engine in settings.engines if engine.kv_role]


def _new_folder(name: str) -> Path:
    if name:
        folder = Path(name).resolve()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ValueError(f"folder: {name} exists already; name a new one") from None
        return folder
    return Path(tempfile.mkdtemp(prefix="block-", dir=MEMORY if MEMORY.is_dir() else None))


def write_instances(cluster: Cluster) -> None:
    """Write the list of instances; the file is replaced as a whole."""
    instances = [
        {
            "instance_id": instance_id,
            "engine_url": cluster.engine_url_of(number),
            "sidecar_address": cluster.address_of(cluster.sidecar_of(number).name),
            "role": engine.role if cluster.legs_apart else BOTH,
            **({} if rank is None else {"data_parallel_rank": rank}),
        }
        for number, engine in enumerate(cluster.settings.engines)
        for instance_id, rank in _ranks(cluster.settings, engine.name)
    ]
    complete = cluster.instances_file.with_suffix(".new")
    complete.write_text(json.dumps({"instances": instances}), encoding="utf-8")
    complete.rename(cluster.instances_file)


async def _start(cluster: Cluster, children: Sequence[Child], started: Callable[[str], None] | None) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def start(child: Child) -> None:
        async with limit:
            await child.start()
        if started is not None:
            started(child.name)

    cluster.children.update({child.name: child for child in children})
    try:
        async with asyncio.TaskGroup() as tasks:
            for child in children:
                tasks.create_task(start(child))
    except* StartError as errors:
        raise errors.exceptions[0] from None


async def _stop(cluster: Cluster) -> None:
    """Stop all components from the front to the back, so that requests in progress can finish."""
    names = list(cluster.children)
    for kind in ("gateway", "scheduler", "tagger", PROVISIONER, "predictor", "prefill", "decode", "engine"):
        await asyncio.gather(*(cluster.children[name].stop() for name in names if name.startswith(kind)))
