"""`--instances-from kubernetes`: the ready pods of an InferencePool, or of a label selector, and its objectives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TypeVar

from scheduler.objectives import NO_OBJECTIVES, Objective, Objectives
from services.instances.instance import DRAINING, Instance, Instances
from services.instances.sources import InstanceSource
from services.kubernetes.api import KubernetesApi, Resource, api_address, own_namespace
from services.kubernetes.pods import (
    InferencePool,
    Pod,
    instances_of,
    objective_from_resource,
    pod_from,
    pool_from,
    reason_for_none,
    selector_text,
)
from services.kubernetes.reflector import Reflector
from services.kubernetes.settings import KubernetesSettings
from services.logs import log_event
from services.supervised_task import supervised

T = TypeVar("T")

log = logging.getLogger(__name__)

POOL_GROUP = "inference.networking.k8s.io"
OBJECTIVE_GROUPS = ("inference.networking.x-k8s.io", "llm-d.ai")  # the later one has precedence
FIRST_SYNC_S = 5.0  # that the start of a server waits for the first list


class FromKubernetes(InstanceSource):
    """Follows a pool, its pods and its objectives.

    A pod that is not ready is no instance, and one that is being deleted drains. While the API server is away, the
    last list stays. A pool that is deleted has no instances.
    """

    may_come_later = True
    kind = "kubernetes"

    def __init__(self, settings: KubernetesSettings) -> None:
        """Find the API server, and read nothing yet; ValueError where there is none."""
        self._api = KubernetesApi(api_address(settings))
        self._namespace = own_namespace(settings)
        self._sidecar_port = settings.pod_sidecar_port
        self._pool_name = settings.pool_name
        self._pool: InferencePool | None = None
        if not settings.pool_name:
            self._pool = InferencePool(name="", labels=settings.selector_labels, ports=settings.target_ports)
        self._pools: Reflector[InferencePool] | None = None
        self._pods: Reflector[Pod] | None = None
        self._objectives: list[Reflector[Objective]] = []
        self._following: list[asyncio.Task[None]] = []
        self._is_started = False
        self._following_pods: asyncio.Task[None] | None = None
        self._change = asyncio.Event()
        self._instances: Instances | None = None  # as reported last
        self._unusable: dict[str, str] = {}  # the reason of each pod that should have instances and has none
        self._problem = "kubernetes: nothing is listed yet"

    # As a source.

    async def poll(self) -> Instances | None:
        """Return the list where it changed; the first call waits a while for it. ValueError while it is unknown."""
        if not self._is_started:
            self._is_started = True
            self._start()
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_SYNC_S):
                    while not self._is_known() and not self._failure():
                        await self._change.wait()
                        self._change.clear()
        self._change.clear()
        if not self._is_known():
            self._problem = self._failure() or f"{self._target()}: not listed yet"
            raise ValueError(self._problem)
        instances = self._current()
        if instances == self._instances:
            return None
        self._instances = instances
        return instances

    async def wait(self, every_s: float) -> None:
        """Wait for a change; there is nothing to poll for."""
        del every_s
        await self._change.wait()

    def problem(self) -> str:
        """Say why there is no instance; while there are some, the API server may be away."""
        return self._problem

    def objectives(self) -> Objectives:
        """Return the pool's InferenceObjectives by name."""
        if not any(one.items for one in self._objectives):
            return NO_OBJECTIVES
        return MappingProxyType({name: value for one in self._objectives for name, value in one.items.items()})

    async def close(self) -> None:
        """Stop following."""
        for task in (*self._following, self._following_pods):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._following, self._following_pods = [], None
        self._api.close()

    # What is followed.

    def _start(self) -> None:
        if self._pool is not None:
            self._follow_pods(self._pool)
            return
        self._pools = Reflector(
            self._api,
            Resource(
                plural="inferencepools",
                namespace=self._namespace,
                group=POOL_GROUP,
                field_selector=f"metadata.name={self._pool_name}",
            ),
            pool_from,
            self._pool_changed,
        )
        self._following.append(_task(self._pools))
        for group in OBJECTIVE_GROUPS:
            resource = Resource(
                plural="inferenceobjectives", namespace=self._namespace, group=group, version="v1alpha2"
            )
            objectives = Reflector(self._api, resource, self._objective, _ignored, optional=True)
            self._objectives.append(objectives)
            self._following.append(_task(objectives))

    def _objective(self, item: Mapping[str, object]) -> Objective | None:
        return objective_from_resource(item, self._pool_name)

    def _pool_changed(self) -> None:
        """Follow other pods where the selector changed; without the pool, none."""
        assert self._pools is not None
        before, self._pool = self._pool, self._pools.items.get(self._pool_name)
        if self._pool is None:
            self._follow_pods(None)
        elif before is None or self._pods is None or before.labels != self._pool.labels:
            self._follow_pods(self._pool)
        self._change.set()

    def _follow_pods(self, pool: InferencePool | None) -> None:
        if self._following_pods is not None:
            self._following_pods.cancel()
        self._pods = self._following_pods = None
        if pool is not None:
            resource = Resource(plural="pods", namespace=self._namespace, label_selector=selector_text(pool.labels))
            self._pods = Reflector(self._api, resource, pod_from, self._change.set)
            self._following_pods = _task(self._pods)

    # What follows from it.

    def _is_known(self) -> bool:
        """Return whether the list is known, be it empty."""
        if self._pools is not None and self._pools.synced and self._pool is None:
            return True
        return self._pods is not None and self._pods.synced

    def _failure(self) -> str:
        return next((one.problem for one in (self._pools, self._pods) if one is not None and one.problem), "")

    def _target(self) -> str:
        return f"InferencePool {self._namespace}/{self._pool_name}" if self._pool_name else f"pods of {self._namespace}"

    def _current(self) -> Instances:
        """Return the instances of all ready pods, and note why there is none."""
        if self._pool is None or self._pods is None:
            self._note(f"{self._target()} does not exist, or is invalid")
            return ()
        found: dict[str, Instance] = {}
        unusable: dict[str, str] = {}
        for name, pod in sorted(self._pods.items.items()):
            try:
                found |= {one.instance_id: one for one in instances_of(pod, self._pool.ports, self._sidecar_port)}
            except ValueError as error:
                unusable[name] = str(error)
        for name, reason in unusable.items():
            if self._unusable.get(name) != reason:
                log_event(log, logging.WARNING, "pod is left out", namespace=self._namespace, pod=name, reason=reason)
        self._unusable = unusable
        if any(one.state != DRAINING for one in found.values()):
            self._note("")
        elif unusable:
            name, reason = next(iter(unusable.items()))
            self._note(f"{self._target()} has no instance: pod {name}: {reason}")
        else:
            why = reason_for_none(self._pods.items.values(), selector_text(self._pool.labels), self._namespace)
            self._note(f"{self._target()} has no instance: {why}")
        return tuple(found.values())

    def _note(self, problem: str) -> None:
        """Keep a problem for readiness, and log it where it is a new one."""
        if problem != self._problem:
            self._problem = problem
            if problem:
                log_event(log, logging.WARNING, "not ready", reason=problem)


def _ignored() -> None:
    """Objectives are read when a request names one."""


def _task(reflector: Reflector[T]) -> asyncio.Task[None]:
    return asyncio.create_task(supervised(f"discovery of {reflector.resource}", reflector.run))
