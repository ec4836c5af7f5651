"""A stand-in of Kubernetes' API server: collections with versions, lists in pages, watches, tokens, roles, faults."""

from __future__ import annotations

import copy
import json
import re
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.services.http_stand_in import StandInHandler
from tests.services.kubernetes.custom_schemas import validate

NAMESPACE = "llm"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
OBJECTIVES = f"/apis/llm-d.ai/v1alpha2/namespaces/{NAMESPACE}/inferenceobjectives"
KINDS = {PODS: ("v1", "Pod"), POOLS: ("inference.networking.k8s.io/v1", "InferencePool"),
         OBJECTIVES: ("llm-d.ai/v1alpha2", "InferenceObjective")}  # fmt: skip
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 410: "Expired", 429: "TooManyRequests"}

Item = dict[str, Any]


@dataclass(slots=True)
class Cluster:
    """What the server stores, what it refuses, and what it was asked for; a test changes all of these as it likes."""

    collections: dict[str, dict[str, Item]] = field(default_factory=lambda: {path: {} for path in KINDS})
    version: int = 100
    oldest: int = 0  # watches from earlier versions are gone
    history: list[tuple[int, str, Item | None, Item | None]] = field(default_factory=list)  # version, path, old, new
    token: str = ""  # that calls must have
    allowed: set[tuple[str, ...]] | None = None  # verb, plural.group, and a name where only that one; None: everything
    failing: dict[tuple[str, str], int] = field(default_factory=dict)  # status by verb and plural, until removed
    page_items: int = 1000  # that a page has at most, whatever the client's limit
    drop_watches_after: int | None = None  # bytes after which the connection of a watch is cut
    piece_bytes: int = 0  # in which watches send their lines, each by itself; 0: whole
    silent: bool = False  # connections are accepted, and nothing is said
    bookmarks: int = 0  # that watches are to send: each time it grows, each watch sends one
    calls: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # verb, path, query
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, path: str, item: Item) -> None:
        """Create or replace an object."""
        item = copy.deepcopy(item)
        item["apiVersion"], item["kind"] = KINDS[path]
        validate(item)
        with self.changed:
            self.version += 1
            item["metadata"]["resourceVersion"] = str(self.version)
            name = item["metadata"]["name"]
            self.history.append((self.version, path, self.collections[path].get(name), item))
            self.collections[path][name] = item
            self.changed.notify_all()

    def delete(self, path: str, name: str) -> None:
        """Delete an object."""
        with self.changed:
            self.version += 1
            item = self.collections[path].pop(name)
            self.history.append((self.version, path, item, None))
            self.changed.notify_all()

    def compact(self) -> None:
        """Forget the history: watches from earlier versions, also those under way, fail with status 410."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.history.clear()
            self.changed.notify_all()

    def set(self, **values: Any) -> None:
        """Change faults and permissions."""
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def count(self, verb: str, path: str) -> int:
        """Return how often a collection was listed or watched."""
        return sum((one[0], one[1]) == (verb, path) for one in self.calls)


def allowed_by(role: Item) -> set[tuple[str, ...]]:
    """Return what a Role of RBAC allows, as `Cluster.allowed` has it."""
    return {
        (verb, f"{plural}.{group}".rstrip("."), *([name] if name else []))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for plural in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def pod(
    name: str,
    address: str,
    *,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ports: tuple[int, ...] = (8000,),
    deleted: bool = False,
) -> Item:
    """Make a pod of an engine and its sidecar."""
    metadata: Item = {"name": name, "namespace": NAMESPACE, "labels": {"app": "vllm", **(labels or {})},
                      "annotations": annotations or {}}  # fmt: skip
    if deleted:
        metadata |= {"deletionTimestamp": "2026-11-01T00:02:00Z", "deletionGracePeriodSeconds": 120}
    return {
        "metadata": metadata,
        "spec": {"containers": [
            {"name": "vllm", "image": "vllm", "ports": [{"containerPort": port} for port in ports]},
            {"name": "sidecar", "image": "block-serving", "ports": [{"containerPort": 50052}]},
        ]},
        "status": {"phase": "Running", **({"podIP": address} if address else {}),
                   "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }  # fmt: skip


def pool(name: str = "chat", ports: tuple[int, ...] = (8000,), labels: dict[str, str] | None = None) -> Item:
    """Make an InferencePool."""
    return {
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"matchLabels": labels or {"app": "vllm"}},
                 "targetPorts": [{"number": port} for port in ports],
                 "endpointPickerRef": {"name": "picker", "port": {"number": 9002}}},
    }  # fmt: skip


class Handler(StandInHandler):
    """Serves one client."""

    cluster: Cluster

    def do_GET(self) -> None:
        """List or watch a collection."""
        parts, cluster = urlsplit(self.path), self.cluster
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        verb = "watch" if "watch" in query else "list"
        found = re.fullmatch(r"/(?:api|apis/([^/]+))/[^/]+/namespaces/[^/]+/([^/]+)", parts.path)
        plural, group = (found[2], found[1] or "") if found else ("", "")
        resource = f"{plural}.{group}".rstrip(".")
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        with cluster.changed:
            cluster.calls.append((verb, parts.path, query))
            cluster.changed.wait_for(lambda: not cluster.silent or cluster.closed)
            status = cluster.failing.get((verb, plural), 0)
            if cluster.token and self.headers.get("authorization") != f"Bearer {cluster.token}":
                status = 401
            elif cluster.allowed is not None and not cluster.allowed & {(verb, resource), (verb, resource, name)}:
                status = 403
            elif parts.path not in cluster.collections:
                status = 404
        if status:
            self._fail(status, f'{resource} is forbidden: cannot {verb} resource "{plural}" in API group "{group}"')
        elif verb == "watch":
            self._watch(parts.path, query)
        else:
            self._list(parts.path, query)

    def _fail(self, status: int, message: str) -> None:
        body = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status,
                           "reason": REASONS.get(status, "InternalError"), "message": message}).encode()  # fmt: skip
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _list(self, path: str, query: dict[str, str]) -> None:
        cluster = self.cluster
        with cluster.changed:
            names = sorted(name for name, item in cluster.collections[path].items() if _matches(item, query))
            version, _, last = query.get("continue", f"{cluster.version} ").partition(" ")
            if int(version) < cluster.oldest:
                self._fail(410, "the continue token is too old")
                return
            rest = [name for name in names if name > last]
            page = rest[: min(cluster.page_items, int(query.get("limit", 1000)))]
            metadata = {"resourceVersion": version}
            if len(page) < len(rest):
                metadata["continue"] = f"{version} {page[-1]}"
            items = [cluster.collections[path][name] for name in page]
        self.answer(json.dumps({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items}).encode())

    def _watch(self, path: str, query: dict[str, str]) -> None:
        """Send what changed since a version, and then every change, until the client's time is over."""
        cluster, version = self.cluster, int(query["resourceVersion"])
        until_s = time.monotonic() + float(query.get("timeoutSeconds", "60"))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        bookmarks, num_bytes = cluster.bookmarks, 0
        while time.monotonic() < until_s:
            with cluster.changed:
                lines = []
                if version < cluster.oldest:
                    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    lines.append({"type": "ERROR", "object": status})
                lines += [event for at, where, old, new in cluster.history if at > version and where == path
                          for event in _events(at, old, new, query)]  # fmt: skip
                if bookmarks != cluster.bookmarks and query.get("allowWatchBookmarks") == "true":
                    bookmarks = cluster.bookmarks
                    mark = {"kind": KINDS[path][1], "metadata": {"resourceVersion": str(cluster.version)}}
                    lines.append({"type": "BOOKMARK", "object": mark})
                gone = version < cluster.oldest
                version = max(version, cluster.version)
                cut = cluster.drop_watches_after
                if not lines and not cluster.closed:
                    cluster.changed.wait(0.5)
            text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            if cut is not None and num_bytes + len(text) > cut:
                self.wfile.write(text[: cut - num_bytes])
                return
            size = cluster.piece_bytes or max(1, len(text))
            for start in range(0, len(text), size):
                self.wfile.write(text[start : start + size])
                self.wfile.flush()
            num_bytes += len(text)
            if gone or cluster.closed:
                return


def _matches(item: Item | None, query: dict[str, str]) -> bool:
    if item is None:
        return False
    labels = item["metadata"].get("labels", {})
    wanted = [part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and name in ("", item["metadata"]["name"])


def _events(version: int, old: Item | None, new: Item | None, query: dict[str, str]) -> Iterator[Item]:
    """Yield what a watch with selectors sees of a change: an object that no longer matches is deleted for it."""
    before, now = _matches(old, query), _matches(new, query)
    if now:
        yield {"type": "MODIFIED" if before else "ADDED", "object": new}
    elif before:
        last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(version)}}
        yield {"type": "DELETED", "object": last}


@contextmanager
def api_server(cluster: Cluster, tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[str]:
    """Serve while the block runs; the context value is the URL."""
    cluster.closed = False
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Own", (Handler,), {"cluster": cluster}))
    server.daemon_threads, server.block_on_close = True, False
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        cluster.set(closed=True)
        server.shutdown()
        server.server_close()
        thread.join()
