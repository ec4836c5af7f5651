"""Leases: at most one provisioner acts at a time, by a lock on a file or by a Lease of Kubernetes."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from services.logs import log_event

log = logging.getLogger(__name__)

LEASE_S = 15.0
RENEW_S = 5.0
TIMEOUT_S = 5.0  # of one call to the API server
NOT_FOUND, CONFLICT = 404, 409
NEVER_S = -1e9


class Lease(Protocol):
    """Held by at most one provisioner at a time."""

    async def held(self) -> bool:
        """Acquire or renew it; return whether it is held now."""

    async def holder(self) -> str:
        """Return the id of its holder; empty where none is known."""

    async def release(self) -> None:
        """Release it for the next provisioner."""


class FileLease:
    """A lock on a file; the kernel releases it when its process ends."""

    def __init__(self, path: Path, own_id: str) -> None:
        """Hold nothing yet."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._own_id = path, own_id
        self._handle: int | None = None

    async def held(self) -> bool:
        """Try to lock the file; a lock is kept once it is acquired."""
        if self._handle is not None:
            return True
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        os.ftruncate(handle, 0)
        os.pwrite(handle, self._own_id.encode(), 0)
        self._handle = handle
        return True

    async def holder(self) -> str:
        """Read the id that the holder wrote into the file."""
        try:
            return self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    async def release(self) -> None:
        """Unlock the file."""
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None


class KubernetesLease:
    """A Lease of coordination.k8s.io, held while it is renewed.

    Another holder's lease has expired when it did not change for its duration, by the clock of this process.
    """

    def __init__(
        self, configuration: Any, *, namespace: str, name: str, own_id: str, duration_s: float = LEASE_S
    ) -> None:
        """Hold nothing yet; needs a running event loop."""
        from aiohttp import ClientError
        from kubernetes_asyncio import client

        self._client = client
        self._api_client = client.ApiClient(configuration)
        self._api = client.CoordinationV1Api(self._api_client)
        self._connection_errors = (ClientError, TimeoutError, OSError)
        self._namespace, self._name, self._own_id, self._duration_s = namespace, name, own_id, duration_s
        self._seen: tuple[str, float] = ("", 0.0)  # the lease's version, and when it was first seen
        self._holder = ""
        self._renewed_s = NEVER_S

    async def held(self) -> bool:
        """Acquire or renew it; while the API server is away, it counts as held until two thirds of its duration."""
        start_s = time.monotonic()
        if start_s - self._renewed_s < RENEW_S * self._duration_s / LEASE_S:
            return True
        try:
            is_held = await self._acquire()
        except self._client.ApiException as error:
            if error.status == CONFLICT:  # another provisioner was faster
                self._renewed_s = NEVER_S
                return False
            log_event(log, logging.WARNING, "lease cannot be renewed", status=error.status, reason=error.reason)
            return start_s - self._renewed_s < 2 / 3 * self._duration_s
        except self._connection_errors as error:
            log_event(log, logging.WARNING, "lease cannot be renewed", reason=str(error))
            return start_s - self._renewed_s < 2 / 3 * self._duration_s
        self._renewed_s = start_s if is_held else NEVER_S
        return is_held

    async def _acquire(self) -> bool:
        try:
            lease = await self._read()
        except self._client.ApiException as error:
            if error.status != NOT_FOUND:
                raise
            await self._api.create_namespaced_lease(self._namespace, self._new_lease(), _request_timeout=TIMEOUT_S)
            self._holder = self._own_id
            return True
        version, self._holder = lease.metadata.resource_version, lease.spec.holder_identity or ""
        if version != self._seen[0]:
            self._seen = (version, time.monotonic())
        duration_s = lease.spec.lease_duration_seconds or self._duration_s
        if self._holder not in ("", self._own_id) and time.monotonic() - self._seen[1] < duration_s:
            return False
        now = datetime.now(UTC)
        if self._holder != self._own_id:
            lease.spec.lease_transitions = (lease.spec.lease_transitions or 0) + 1
            lease.spec.acquire_time = now
        lease.spec.holder_identity, lease.spec.renew_time = self._own_id, now
        lease.spec.lease_duration_seconds = max(1, round(self._duration_s))
        await self._replace(lease)
        self._holder = self._own_id
        return True

    def _new_lease(self) -> Any:
        now = datetime.now(UTC)
        return self._client.V1Lease(
            metadata=self._client.V1ObjectMeta(name=self._name),
            spec=self._client.V1LeaseSpec(
                holder_identity=self._own_id,
                lease_duration_seconds=max(1, round(self._duration_s)),
                acquire_time=now,
                renew_time=now,
                lease_transitions=0,
            ),
        )

    async def _read(self) -> Any:
        return await self._api.read_namespaced_lease(self._name, self._namespace, _request_timeout=TIMEOUT_S)

    async def _replace(self, lease: Any) -> None:
        await self._api.replace_namespaced_lease(self._name, self._namespace, lease, _request_timeout=TIMEOUT_S)

    async def holder(self) -> str:
        """Return the id of the last known holder."""
        return self._holder

    async def release(self) -> None:
        """Give it up, so that the next provisioner need not wait, and close the connections."""
        try:
            if self._holder == self._own_id:
                lease = await self._read()
                if lease.spec.holder_identity == self._own_id:
                    lease.spec.holder_identity = ""
                    await self._replace(lease)
                self._holder, self._renewed_s = "", NEVER_S
        except (self._client.ApiException, *self._connection_errors) as error:
            log_event(log, logging.WARNING, "lease was not released", reason=str(error))
        finally:
            await self._api_client.close()
