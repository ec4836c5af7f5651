"""Reads from Kubernetes' API server over HTTP: lists page by page, and watches line by line.

The three calls of discovery (list, watch, and both with a selector) need no more than the HTTP client of the gateway.
A Kubernetes library would double what a gateway's image and memory hold, and hides bookmarks and pages.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from services.http.client import HttpClient
from services.http.connection import Connection
from services.http.headers import Headers, request_head
from services.http.origin import Origin, origin_of
from services.kubernetes.settings import KubernetesSettings

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 15.0  # of a call, and of the head of a watch
PAGE_ITEMS = 100  # of a list, so that no page takes long to parse
MAX_PAGE_BYTES = 64 * 2**20
MAX_EVENT_BYTES = 16 * 2**20
MAX_ERROR_TEXT = 300
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, GONE, TOO_MANY = 401, 403, 404, 410, 429
OUTCOMES = {
    UNAUTHORIZED: "Unauthorized (is the service account's token mounted?)",
    FORBIDDEN: "Forbidden (does a Role grant this verb to the service account?)",
}

Object = Mapping[str, Any]  # as parsed from JSON


class KubernetesError(Exception):
    """A call failed; the text names verb, resource and namespace. `status` is 0 where no reply came."""

    def __init__(self, call: str, status: int, reason: str, retry_after_s: float = 0.0) -> None:
        """Note the call, its status, and what the server said."""
        said = OUTCOMES.get(status, "")
        texts = [f"cannot {call}", f"status {status}" if status else "", said, reason]
        super().__init__(": ".join(text for text in texts if text))
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind of object in a namespace, as RBAC rules and URLs name it, and which of them."""

    plural: str
    namespace: str
    group: str = ""
    version: str = "v1"
    label_selector: str = ""
    field_selector: str = ""

    @property
    def query(self) -> Mapping[str, str]:
        """The selectors as a list or a watch has them."""
        selectors = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {name: text for name, text in selectors.items() if text}

    @property
    def path(self) -> str:
        """The path of the collection."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{self.namespace}/{self.plural}"

    def __str__(self) -> str:
        """Name it as `kubectl auth can-i` takes it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAddress:
    """Where the API server is, and the files by which client and server know each other."""

    origin: Origin
    token_file: Path | None
    ca_file: Path | None


def api_address(settings: KubernetesSettings) -> ApiAddress:
    """Find the API server by the settings, else by what Kubernetes gives each pod; ValueError where there is none."""
    url = settings.kubernetes_api
    if not url:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("kubernetes_api: is missing, and this process runs in no pod of a cluster")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    try:
        origin = origin_of(url)
    except ValueError as error:
        raise ValueError(f"kubernetes_api: {error}") from None
    return ApiAddress(
        origin=origin,
        token_file=_file(settings.kubernetes_token_file, SERVICE_ACCOUNT / "token", "kubernetes_token_file"),
        ca_file=_file(settings.kubernetes_ca_file, SERVICE_ACCOUNT / "ca.crt", "kubernetes_ca_file"),
    )


def _file(given: str, default: Path, field: str) -> Path | None:
    path = Path(given) if given else default
    if path.is_file():
        return path
    if given:
        raise ValueError(f"{field}: {given}: is no file that can be read")
    return None


def own_namespace(settings: KubernetesSettings) -> str:
    """Return the namespace of the settings, else that of this pod, else `default`."""
    if settings.pool_namespace:
        return settings.pool_namespace
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="ascii").strip() or "default"
    except (OSError, ValueError):
        return "default"


class KubernetesApi:
    """Lists and watches collections; every wait has a deadline."""

    def __init__(self, address: ApiAddress, *, timeout_s: float = TIMEOUT_S) -> None:
        """Connect when the first call comes."""
        self._address = address
        self._timeout_s = timeout_s
        self._client: HttpClient | None = None
        self._ca_changed_ns = -1

    async def list_page(self, resource: Resource, query: Mapping[str, str]) -> Object:
        """Read one page of a collection."""
        call = f"list {resource} in namespace {resource.namespace}"
        async with self._opened(call, resource, query) as connection:
            body = await connection.read_all(self._timeout_s, MAX_PAGE_BYTES)
        page = _object_in(body)
        if page is None or not isinstance(page.get("items"), list):
            raise KubernetesError(call, connection.status, "the reply is no list")
        return page

    async def watch(self, resource: Resource, query: Mapping[str, str], quiet_s: float) -> AsyncGenerator[Object]:
        """Yield the events of a watch until the server ends it; a silence of `quiet_s` is an error."""
        call = f"watch {resource} in namespace {resource.namespace}"
        async with self._opened(call, resource, {**query, "watch": "1"}) as connection:
            rest = b""
            while piece := await connection.read(quiet_s):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise KubernetesError(call, connection.status, f"an event has more than {MAX_EVENT_BYTES} bytes")
                for line in filter(None, lines):
                    event = _object_in(line)
                    if event is None or not isinstance(event.get("object"), Mapping):
                        raise KubernetesError(call, connection.status, "an event is no JSON object")
                    yield event

    @asynccontextmanager
    async def _opened(self, call: str, resource: Resource, query: Mapping[str, str]) -> AsyncIterator[Connection]:
        """Send a GET; yield the connection with a successful reply, and release it."""
        target = f"{resource.path}?{urlencode(query)}".encode()
        try:
            client = self._current_client()
            head = request_head(b"GET", self._address.origin, target, self._headers(), 0)
            async with asyncio.timeout(2 * self._timeout_s):
                connection = await client.send(self._address.origin, head, b"", self._timeout_s)
            try:
                if connection.status != 200:
                    raise await self._failure(call, connection)
                yield connection
            finally:
                connection.release()
        except (OSError, TimeoutError) as error:  # TLS and broken connections are of OSError
            raise KubernetesError(call, 0, str(error) or "the API server did not reply in time") from None

    async def _failure(self, call: str, connection: Connection) -> KubernetesError:
        body = await connection.read_all(self._timeout_s, MAX_PAGE_BYTES)
        status = _object_in(body) or {}
        retry_after = dict(connection.headers).get(b"retry-after", b"")
        return KubernetesError(
            call,
            connection.status,
            str(status.get("message") or status.get("reason") or "")[:MAX_ERROR_TEXT],
            float(retry_after) if retry_after.isdigit() else 0.0,
        )

    def _headers(self) -> Headers:
        headers: Headers = [(b"accept", b"application/json"), (b"user-agent", b"block")]
        if self._address.token_file is not None:
            token = self._address.token_file.read_bytes().strip()
            headers.append((b"authorization", b"Bearer " + token))
        return headers

    def _current_client(self) -> HttpClient:
        """Return the client, a new one where the file of certificates changed."""
        ca_file = self._address.ca_file if self._address.origin.scheme == "https" else None
        changed_ns = ca_file.stat().st_mtime_ns if ca_file is not None else 0
        if self._client is None or changed_ns != self._ca_changed_ns:
            self.close()
            tls = ssl.create_default_context(cafile=ca_file) if ca_file is not None else None
            self._client, self._ca_changed_ns = HttpClient(connect_s=self._timeout_s, tls=tls), changed_ns
        return self._client

    def close(self) -> None:
        """Close the idle connections."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _object_in(text: bytes) -> Object | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, Mapping) else None
