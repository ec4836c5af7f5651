"""`kubernetes`: sets the scale of a Deployment or StatefulSet, and watches its pods."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.backoff import Backoff
from services.kubernetes.pods import ROLE_LABEL, role_from_label
from services.logs import log_event
from services.provisioner_server.hooks import Hook, HookError
from services.security.certificates import engine_access
from services.supervised_task import supervised

log = logging.getLogger(__name__)

DEPLOYMENT, STATEFUL_SET = "deployment", "statefulset"
NOT_FOUND, CONFLICT, GONE = 404, 409, 410
MAX_CONFLICTS = 10
CONFLICT_PAUSE_S = 0.05
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = "-1000"
TIMEOUT_S = 30.0  # of one call
WATCH_S = 60  # after which the API server ends a watch, and another one starts


class Scale(Hook):
    """Sets the number of replicas. The number is absolute, so setting it twice has no further effect."""

    def __init__(  # noqa: PLR0913 - the settings of this hook
        self,
        configuration: Any,
        *,
        namespace: str,
        kind: str,
        name: str,
        engine_port: int = 8000,
        sidecar_port: int = 50052,
    ) -> None:
        """Start to watch the pods; needs a running event loop."""
        from aiohttp import ClientError
        from kubernetes_asyncio import client

        if kind not in (DEPLOYMENT, STATEFUL_SET):
            raise ValueError(f"kubernetes: {kind!r} is neither {DEPLOYMENT} nor {STATEFUL_SET}")
        self._client = client.ApiClient(configuration)
        self._apps, self._core = client.AppsV1Api(self._client), client.CoreV1Api(self._client)
        self._api_error, self._connection_errors = client.ApiException, (ClientError, TimeoutError, OSError)
        self._namespace, self._kind, self._name = namespace, kind, name
        self._kind_in_api = "deployment" if kind == DEPLOYMENT else "stateful_set"
        self._ports = (engine_port, sidecar_port)
        self._pods: dict[str, Any] | None = None  # None until they are listed
        self._backoff = Backoff(first_s=0.5, max_s=8.0, random=random.random)
        self._following = asyncio.create_task(supervised("watching pods", self._follow))

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Mark the pods that are to be removed, and set the number."""
        try:
            for name in action.instance_ids:
                await self._mark(name)
            if action.kind == pb.ACTION_KIND_STOP:  # the controller replaces the pod
                for name in action.instance_ids:
                    await self._delete(name)
            else:
                await self._set(action.num_desired)
        except self._api_error as error:
            raise HookError(f"kubernetes: status {error.status}: {error.reason}") from None
        except self._connection_errors as error:
            raise HookError(f"kubernetes: {error or 'the API server did not respond in time'}") from None
        return pb.HookReply(action_id=action.action_id)

    async def _set(self, num: int) -> None:
        """Replace the number that was read; after a conflict, read it again."""
        read = getattr(self._apps, f"read_namespaced_{self._kind_in_api}_scale")
        replace = getattr(self._apps, f"replace_namespaced_{self._kind_in_api}_scale")
        for _ in range(MAX_CONFLICTS):
            scale = await read(self._name, self._namespace, _request_timeout=TIMEOUT_S)
            if scale.spec.replicas == num:
                return
            scale.spec.replicas = num
            try:
                await replace(self._name, self._namespace, scale, _request_timeout=TIMEOUT_S)
            except self._api_error as error:
                if error.status != CONFLICT:
                    raise
                log_event(log, logging.INFO, "scale was changed by another client, retrying", name=self._name)
                await asyncio.sleep(CONFLICT_PAUSE_S)
            else:
                return
        raise HookError(f"kubernetes: {MAX_CONFLICTS} conflicts in a row over the scale of {self._name}")

    async def _mark(self, pod: str) -> None:
        """Have a Deployment's controller remove this pod first."""
        if self._kind != DEPLOYMENT:
            return
        annotations = {"metadata": {"annotations": {DELETION_COST: LOWEST_COST}}}
        with _missing_ignored(self._api_error):
            await self._core.patch_namespaced_pod(pod, self._namespace, annotations, _request_timeout=TIMEOUT_S)

    async def _delete(self, pod: str) -> None:
        with _missing_ignored(self._api_error):
            await self._core.delete_namespaced_pod(pod, self._namespace, _request_timeout=TIMEOUT_S)

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Return the pods that are not being deleted; None until they are listed for the first time."""
        if self._pods is None:
            return None
        engine_port, sidecar_port = self._ports
        scheme = engine_access().engine_scheme
        return [
            common_pb2.Instance(
                instance_id=name,
                engine_url=f"{scheme}://{pod.status.pod_ip}:{engine_port}" if pod.status.pod_ip else "",
                sidecar_address=f"{pod.status.pod_ip}:{sidecar_port}" if pod.status.pod_ip else "",
                role=_role_of(pod),
            )
            for name, pod in sorted(self._pods.items())
            if pod.metadata.deletion_timestamp is None
        ]

    def fixed_choice(self, instance_ids: list[str], num: int) -> list[str] | None:
        """Return the pods with the highest ordinals, as a StatefulSet's controller always removes these."""
        if self._kind != STATEFUL_SET:
            return None
        return sorted(instance_ids, key=_ordinal)[-num:] if num else []

    async def close(self) -> None:
        """End the watch, and close the connections."""
        self._following.cancel()
        with suppress(asyncio.CancelledError):
            await self._following
        await self._client.close()

    # Pods.

    async def _follow(self) -> None:
        """List the pods, then watch from there; list again when the watch breaks or its version is too old."""
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                version = await self._watch_from(version)
                self._backoff.reset()
            except self._api_error as error:
                version = ""
                if error.status != GONE:
                    await self._pause(status=error.status, reason=error.reason)
            except self._connection_errors as error:
                version = ""
                await self._pause(reason=str(error))

    async def _pause(self, **fields: Any) -> None:
        pause_s = self._backoff.next_s()
        log_event(log, logging.WARNING, "pods cannot be watched", **fields, retry_in_s=pause_s)
        await asyncio.sleep(pause_s)

    async def _selector(self) -> str:
        read = getattr(self._apps, f"read_namespaced_{self._kind_in_api}")
        owner = await read(self._name, self._namespace, _request_timeout=TIMEOUT_S)
        return ",".join(f"{key}={value}" for key, value in sorted(owner.spec.selector.match_labels.items()))

    async def _list(self) -> str:
        found = await self._core.list_namespaced_pod(
            self._namespace, label_selector=await self._selector(), _request_timeout=TIMEOUT_S
        )
        self._pods = {pod.metadata.name: pod for pod in found.items}
        return str(found.metadata.resource_version)

    async def _watch_from(self, version: str) -> str:
        from kubernetes_asyncio import watch

        assert self._pods is not None
        selector = await self._selector()
        async with watch.Watch() as pods:
            events = pods.stream(
                self._core.list_namespaced_pod, self._namespace, label_selector=selector, resource_version=version,
                timeout_seconds=WATCH_S, _request_timeout=(TIMEOUT_S, WATCH_S + TIMEOUT_S),
            )  # fmt: skip
            async for event in events:
                pod = event["object"]
                if event["type"] == "DELETED":
                    self._pods.pop(pod.metadata.name, None)
                else:
                    self._pods[pod.metadata.name] = pod
                version = str(pod.metadata.resource_version)
        return version


@contextmanager
def _missing_ignored(api_error: Any) -> Iterator[None]:
    try:
        yield
    except api_error as error:
        if error.status != NOT_FOUND:
            raise


def cluster_configuration() -> Any:
    """Find the cluster: the one that this process runs in, else the one of the user's kubeconfig."""
    try:
        from kubernetes_asyncio import client, config
    except ImportError:
        raise ValueError("kubernetes: its client is not installed (pip install 'block-serving[kubernetes]')") from None
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        try:
            asyncio.run(config.load_kube_config(client_configuration=configuration))
        except config.ConfigException as error:
            raise ValueError(f"kubernetes: no cluster is configured: {error}") from None
    return configuration


def _role_of(pod: Any) -> str:
    """Return the role that the label of a pod means; the label itself where it means none, which is refused later."""
    label = (pod.metadata.labels or {}).get(ROLE_LABEL, "")
    try:
        return (role_from_label(label) or label) if label else ""
    except ValueError:
        return str(label)


def _ordinal(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1
