"""Who may act, in a cluster: a Lease of coordination.k8s.io, taken over when its holder has not renewed it in time."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from services.logs import log_event

log = logging.getLogger(__name__)

LASTS_S = 15.0
RENEW_S = 5.0
NOT_FOUND, CONFLICT = 404, 409


class KubernetesLease:
    """Held as long as it is renewed. Whether it has run out is told by a clock of one's own since it last changed."""

    def __init__(self, api_client: Any, *, namespace: str, name: str, own_id: str, lasts_s: float = LASTS_S) -> None:
        """Hold nothing yet."""
        from kubernetes import client

        self._client = client
        self._api = client.CoordinationV1Api(api_client)
        self._namespace, self._name, self._own_id, self._lasts_s = namespace, name, own_id, lasts_s
        self._seen: tuple[str, float] = ("", 0.0)  # its version, and when it was first seen
        self._holder = ""
        self._renewed_s = -1e9

    async def held(self) -> bool:
        """Take or renew it; where the API server is away, it is held until it would have run out."""
        if time.monotonic() - self._renewed_s < RENEW_S * self._lasts_s / LASTS_S:
            return True
        return await asyncio.to_thread(self._held)

    def _held(self) -> bool:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        start_s = time.monotonic()
        try:
            done = self._try()
        except ApiException as error:
            if error.status == CONFLICT:  # somebody else was faster
                self._renewed_s = -1e9
                return False
            log_event(log, logging.WARNING, "lease cannot be had", status=error.status, reason=error.reason)
            return start_s - self._renewed_s < 2 / 3 * self._lasts_s
        except HTTPError as error:
            log_event(log, logging.WARNING, "lease cannot be had", reason=str(error))
            return start_s - self._renewed_s < 2 / 3 * self._lasts_s
        self._renewed_s = start_s if done else -1e9
        return done

    def _try(self) -> bool:
        from kubernetes.client.exceptions import ApiException

        try:
            lease = self._api.read_namespaced_lease(self._name, self._namespace)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise
            self._api.create_namespaced_lease(self._namespace, self._fresh())
            self._holder = self._own_id
            return True
        version, self._holder = lease.metadata.resource_version, lease.spec.holder_identity or ""
        if version != self._seen[0]:
            self._seen = (version, time.monotonic())
        lasts_s = lease.spec.lease_duration_seconds or self._lasts_s
        if self._holder not in ("", self._own_id) and time.monotonic() - self._seen[1] < lasts_s:
            return False
        now = datetime.now(UTC)
        if self._holder != self._own_id:
            lease.spec.lease_transitions = (lease.spec.lease_transitions or 0) + 1
            lease.spec.acquire_time = now
        lease.spec.holder_identity, lease.spec.renew_time = self._own_id, now
        lease.spec.lease_duration_seconds = max(1, round(self._lasts_s))
        self._api.replace_namespaced_lease(self._name, self._namespace, lease)
        self._holder = self._own_id
        return True

    def _fresh(self) -> Any:
        now = datetime.now(UTC)
        return self._client.V1Lease(
            metadata=self._client.V1ObjectMeta(name=self._name),
            spec=self._client.V1LeaseSpec(
                holder_identity=self._own_id,
                lease_duration_seconds=max(1, round(self._lasts_s)),
                acquire_time=now,
                renew_time=now,
                lease_transitions=0,
            ),
        )

    async def holder(self) -> str:
        """Tell who was last seen to hold it."""
        return self._holder

    async def release(self) -> None:
        """Give it up, so that the next one need not wait."""
        if self._holder != self._own_id:
            return
        await asyncio.to_thread(self._give_up)

    def _give_up(self) -> None:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            lease = self._api.read_namespaced_lease(self._name, self._namespace)
            if lease.spec.holder_identity == self._own_id:
                lease.spec.holder_identity = ""
                self._api.replace_namespaced_lease(self._name, self._namespace, lease)
        except (ApiException, HTTPError) as error:
            log_event(log, logging.WARNING, "lease was not given up", reason=str(error))
        self._holder, self._renewed_s = "", -1e9
