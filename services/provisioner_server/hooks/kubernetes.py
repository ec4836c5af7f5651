"""`kubernetes`: the scale of a Deployment or StatefulSet, by the official client; pods are followed by a watch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from services.logs import log_event
from services.provisioner_server.hooks import HookError

log = logging.getLogger(__name__)

DEPLOYMENT, STATEFUL_SET = "deployment", "statefulset"
CONFLICT, GONE = 409, 410
MOST_CONFLICTS = 10
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIRST_TO_GO = "-1000"
WATCH_S = 60  # until the API server ends a watch, and another one begins
PAUSE_S = 0.5


class Scale:
    """Sets how many replicas there are. That number is absolute: to set it twice is to set it once."""

    def __init__(  # noqa: PLR0913 - what the operator may say
        self,
        api_client: Any,
        *,
        namespace: str,
        kind: str,
        name: str,
        engine_port: int = 8000,
        sidecar_port: int = 50052,
    ) -> None:
        """Follow the pods from now on."""
        from kubernetes import client

        if kind not in (DEPLOYMENT, STATEFUL_SET):
            raise ValueError(f"kubernetes: {kind!r} is neither {DEPLOYMENT} nor {STATEFUL_SET}")
        self._apps, self._core = client.AppsV1Api(api_client), client.CoreV1Api(api_client)
        self._namespace, self._kind, self._name = namespace, kind, name
        self._kind_in_api = "deployment" if kind == DEPLOYMENT else "stateful_set"
        self._ports = (engine_port, sidecar_port)
        self._pods: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._watch: Any = None
        self._thread = threading.Thread(target=self._follow, name="pods", daemon=True)
        self._thread.start()

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Mark who is to go, and set the number."""
        return await asyncio.to_thread(self._act, action)

    def _act(self, action: pb.Action) -> pb.HookReply:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            for name in action.instance_ids:
                self._mark(name)
            if action.kind == pb.ACTION_KIND_STOP:  # the controller brings another one for it
                for name in action.instance_ids:
                    self._delete(name)
            else:
                self._set(action.num_desired)
        except ApiException as error:
            raise HookError(f"kubernetes: status {error.status}: {error.reason}") from None
        except HTTPError as error:
            raise HookError(f"kubernetes: {error}") from None
        return pb.HookReply(action_id=action.action_id)

    def _set(self, num: int) -> None:
        """Write the number over the one that was read; where somebody else was faster, read again."""
        from kubernetes.client.exceptions import ApiException

        read = getattr(self._apps, f"read_namespaced_{self._kind_in_api}_scale")
        replace = getattr(self._apps, f"replace_namespaced_{self._kind_in_api}_scale")
        for _ in range(MOST_CONFLICTS):
            scale = read(self._name, self._namespace)
            if scale.spec.replicas == num:
                return
            scale.spec.replicas = num
            try:
                replace(self._name, self._namespace, scale)
            except ApiException as error:
                if error.status != CONFLICT:
                    raise
                log_event(log, logging.INFO, "scale was changed by another, trying again", name=self._name)
                time.sleep(PAUSE_S / 10)
            else:
                return
        raise HookError(f"kubernetes: {MOST_CONFLICTS} conflicts in a row over the scale of {self._name}")

    def _mark(self, pod: str) -> None:
        """Have a Deployment's controller remove this pod first."""
        from kubernetes.client.exceptions import ApiException

        if self._kind != DEPLOYMENT:
            return
        try:
            self._core.patch_namespaced_pod(
                pod, self._namespace, {"metadata": {"annotations": {DELETION_COST: FIRST_TO_GO}}}
            )
        except ApiException as error:
            if error.status != 404:
                raise

    def _delete(self, pod: str) -> None:
        from kubernetes.client.exceptions import ApiException

        try:
            self._core.delete_namespaced_pod(pod, self._namespace)
        except ApiException as error:
            if error.status != 404:
                raise

    async def instances(self) -> list[common_pb2.Instance] | None:
        """Tell of the pods that have an address and are not on their way out; None before they were ever listed."""
        with self._lock:
            pods = None if self._pods is None else dict(self._pods)
        if pods is None:
            return None
        engine_port, sidecar_port = self._ports
        return [
            common_pb2.Instance(
                instance_id=name,
                engine_url=f"http://{pod.status.pod_ip}:{engine_port}" if pod.status.pod_ip else "",
                sidecar_address=f"{pod.status.pod_ip}:{sidecar_port}" if pod.status.pod_ip else "",
            )
            for name, pod in sorted(pods.items())
            if pod.metadata.deletion_timestamp is None
        ]

    def leavers(self, instance_ids: list[str], num: int) -> list[str] | None:
        """Name those with the highest numbers, where the controller removes these whatever anybody wants."""
        if self._kind != STATEFUL_SET:
            return None
        return sorted(instance_ids, key=_ordinal)[-num:] if num else []

    async def close(self) -> None:
        """End the watch."""
        self._stopping.set()
        if self._watch is not None:
            self._watch.stop()

    # Pods.

    def _follow(self) -> None:
        """List, then watch from there; list again whenever the watch breaks or is too old."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        version = ""
        while not self._stopping.is_set():
            try:
                if not version:
                    version = self._list()
                version = self._watch_from(version)
            except ApiException as error:
                version = ""
                if error.status != GONE:
                    log_event(log, logging.WARNING, "pods cannot be watched", status=error.status, reason=error.reason)
                    self._stopping.wait(PAUSE_S)
            except (HTTPError, OSError) as error:
                version = ""
                log_event(log, logging.WARNING, "pods cannot be watched", reason=str(error))
                self._stopping.wait(PAUSE_S)

    def _selector(self) -> str:
        owner = getattr(self._apps, f"read_namespaced_{self._kind_in_api}")(self._name, self._namespace)
        return ",".join(f"{key}={value}" for key, value in sorted(owner.spec.selector.match_labels.items()))

    def _list(self) -> str:
        found = self._core.list_namespaced_pod(self._namespace, label_selector=self._selector())
        with self._lock:
            self._pods = {pod.metadata.name: pod for pod in found.items}
        return str(found.metadata.resource_version)

    def _watch_from(self, version: str) -> str:
        from kubernetes import watch

        self._watch = watch.Watch()
        events = self._watch.stream(
            self._core.list_namespaced_pod, self._namespace, label_selector=self._selector(), resource_version=version,
            timeout_seconds=WATCH_S,
        )  # fmt: skip
        for event in events:
            pod = event["object"]
            with self._lock:
                assert self._pods is not None
                if event["type"] == "DELETED":
                    self._pods.pop(pod.metadata.name, None)
                else:
                    self._pods[pod.metadata.name] = pod
            version = str(pod.metadata.resource_version)
        return version


def api_client() -> Any:
    """Find the cluster: the one that this runs in, or the one that the user's configuration names."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise ValueError("kubernetes: its client is not installed (pip install 'block-serving[kubernetes]')") from None
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            config.load_kube_config()
        except config.ConfigException as error:
            raise ValueError(f"kubernetes: no cluster is configured: {error}") from None
    return client.ApiClient()


def _ordinal(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1
