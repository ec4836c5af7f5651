"""A part of Kubernetes' API server: scales, pods and leases with versions, conflicts, and watches that break."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SCALE = "/apis/apps/v1/namespaces/llm/{kind}s/engines/scale"
PODS = "/api/v1/namespaces/llm/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/llm/leases"


@dataclass(slots=True)
class Cluster:
    """The state of the server; each of `intruders` changes the scale just before a write, as another client would."""

    kind: str = "deployment"
    replicas: int = 2
    version: int = 100
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: deque[tuple[int, str, dict[str, Any]]] = field(default_factory=deque)
    oldest: int = 0  # version from which watches may start; older ones are gone
    intruders: int = 0
    lists: int = 0
    watches: int = 0
    writes: list[int] = field(default_factory=list)
    outage: int = 0  # number of requests to fail with status 500
    lock: threading.RLock = field(default_factory=threading.RLock)

    def bump(self) -> str:
        """Count a change."""
        self.version += 1
        return str(self.version)

    def settle(self) -> None:
        """Act as the controller: add or remove pods, those with the lowest deletion cost first."""
        with self.lock:
            while len(self.pods) < self.replicas:
                taken = {int(name.rpartition("-")[2]) for name in self.pods}
                number = next(place for place in range(1000) if place not in taken)
                self.put_pod(f"engines-{number}")
            while len(self.pods) > self.replicas:
                if self.kind == "deployment":
                    name = min(self.pods, key=lambda one: (_cost(self.pods[one]), one))
                else:
                    name = max(self.pods, key=lambda one: int(one.rpartition("-")[2]))
                pod = self.pods.pop(name)
                pod["metadata"]["resourceVersion"] = self.bump()
                self.events.append((self.version, "DELETED", pod))

    def put_pod(self, name: str) -> None:
        """Add a pod."""
        number = int(name.rpartition("-")[2])
        self.pods[name] = {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "llm", "resourceVersion": self.bump(),
                         "labels": {"app": "engines"}, "annotations": {}},
            "spec": {"containers": [{"name": "vllm"}]},
            "status": {"podIP": f"10.0.0.{number + 1}", "phase": "Running"},
        }  # fmt: skip
        self.events.append((self.version, "ADDED", self.pods[name]))

    def forget_history(self) -> None:
        """Compact the history: watches from older versions fail with status 410."""
        with self.lock:
            self.bump()
            self.oldest = self.version
            self.events.clear()


def _cost(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["annotations"].get("controller.kubernetes.io/pod-deletion-cost", 0))


class Handler(BaseHTTPRequestHandler):
    """Serves one client."""

    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, code: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, code: int, reason: str) -> None:
        self._answer(code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason})

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")

    def _is_out(self) -> bool:
        with self.cluster.lock:
            if self.cluster.outage:
                self.cluster.outage -= 1
                self._fail(500, "InternalError")
                return True
        return False

    def do_GET(self) -> None:
        """Read a scale, an owner, a lease; list or watch pods."""
        parts, cluster = urlsplit(self.path), self.cluster
        query = parse_qs(parts.query)
        if self._is_out():
            return
        scale = SCALE.format(kind=cluster.kind)
        if parts.path == PODS and "watch" in query:
            self._watch(int(query["resourceVersion"][0]))
            return
        with cluster.lock:
            if parts.path == scale:
                self._answer(200, self._scale())
            elif parts.path == scale.removesuffix("/scale"):
                self._answer(200, self._owner())
            elif parts.path == PODS:
                assert query["labelSelector"] == ["app=engines"]
                cluster.lists += 1
                self._answer(200, {"kind": "PodList", "apiVersion": "v1", "items": list(cluster.pods.values()),
                                   "metadata": {"resourceVersion": str(cluster.version)}})  # fmt: skip
            elif parts.path.startswith(LEASES + "/") and parts.path.rpartition("/")[2] in cluster.leases:
                self._answer(200, cluster.leases[parts.path.rpartition("/")[2]])
            else:
                self._fail(404, "NotFound")

    def _scale(self) -> dict[str, Any]:
        return {"kind": "Scale", "apiVersion": "autoscaling/v1",
                "metadata": {"name": "engines", "namespace": "llm", "resourceVersion": str(self.cluster.version)},
                "spec": {"replicas": self.cluster.replicas}, "status": {"replicas": len(self.cluster.pods)}}  # fmt: skip

    def _owner(self) -> dict[str, Any]:
        kind = {"deployment": "Deployment", "statefulset": "StatefulSet"}[self.cluster.kind]
        return {"kind": kind, "apiVersion": "apps/v1", "metadata": {"name": "engines"},
                "spec": {"replicas": self.cluster.replicas, "selector": {"matchLabels": {"app": "engines"}},
                         "serviceName": "engines", "template": {"metadata": {"labels": {"app": "engines"}}}}}  # fmt: skip

    def _watch(self, version: int) -> None:
        """Send changes for a moment, and then close the connection, as proxies do."""
        with self.cluster.lock:
            self.cluster.watches += 1
            gone = version < self.cluster.oldest
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        if gone:
            status = {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired", "message": "too old"}
            self.wfile.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        else:
            deadline_s = time.monotonic() + 0.3
            while time.monotonic() < deadline_s:
                with self.cluster.lock:
                    changes = [event for event in self.cluster.events if event[0] > version]
                    if version < self.cluster.oldest:
                        break
                for at, kind, pod in changes:
                    self.wfile.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
                    version = at
                self.wfile.flush()
                time.sleep(0.02)
        self.close_connection = True

    def do_PUT(self) -> None:
        """Replace an object that has the version that was read; another version is a conflict."""
        body, cluster = self._body(), self.cluster
        if self._is_out():
            return
        path = urlsplit(self.path).path
        with cluster.lock:
            if path == SCALE.format(kind=cluster.kind):
                if cluster.intruders:
                    cluster.intruders -= 1
                    cluster.bump()
                if body["metadata"]["resourceVersion"] != str(cluster.version):
                    self._fail(409, "Conflict")
                    return
                cluster.replicas = body["spec"]["replicas"]
                cluster.writes.append(cluster.replicas)
                cluster.bump()
                cluster.settle()
                self._answer(200, self._scale())
                return
            name = path.rpartition("/")[2]
            if body["metadata"].get("resourceVersion") != cluster.leases[name]["metadata"]["resourceVersion"]:
                self._fail(409, "Conflict")
                return
            body["metadata"]["resourceVersion"] = cluster.bump()
            cluster.leases[name] = body
            self._answer(200, body)

    def do_POST(self) -> None:
        """Create a lease, unless it exists."""
        body, cluster = self._body(), self.cluster
        if self._is_out():
            return
        with cluster.lock:
            name = body["metadata"]["name"]
            if name in cluster.leases:
                self._fail(409, "AlreadyExists")
                return
            body["metadata"]["resourceVersion"] = cluster.bump()
            cluster.leases[name] = body
            self._answer(201, body)

    def do_PATCH(self) -> None:
        """Annotate a pod; a merge of objects, not a list of changes."""
        assert "merge-patch+json" in self.headers["content-type"]
        body, cluster = self._body(), self.cluster
        with cluster.lock:
            pod = cluster.pods.get(urlsplit(self.path).path.rpartition("/")[2])
            if pod is None:
                self._fail(404, "NotFound")
                return
            pod["metadata"]["annotations"].update(body["metadata"]["annotations"])
            pod["metadata"]["resourceVersion"] = cluster.bump()
            cluster.events.append((cluster.version, "MODIFIED", pod))
            self._answer(200, pod)

    def do_DELETE(self) -> None:
        """Delete a pod."""
        cluster = self.cluster
        with cluster.lock:
            pod = cluster.pods.pop(urlsplit(self.path).path.rpartition("/")[2], None)
            if pod is None:
                self._fail(404, "NotFound")
                return
            pod["metadata"]["resourceVersion"] = cluster.bump()
            cluster.events.append((cluster.version, "DELETED", pod))
            self._answer(200, pod)


@contextmanager
def api_server(cluster: Cluster) -> Iterator[str]:
    """Serve while the block runs; yields the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
