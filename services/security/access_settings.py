"""Settings of who may call a server, and the access control that they make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

from prometheus_client import CollectorRegistry

from services.security.access import AccessControl
from services.security.access_metrics import AccessMetrics
from services.security.audit import auditing
from services.security.key_file import KeyFile
from services.security.keys import plain_keys
from services.settings import Option
from services.supervised_task import supervised


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Keys, names of operators, and the audit log."""

    api_key_file: Annotated[
        str,
        Option(
            "TOML file with the accepted API keys, a table [[key]] for each; it is read again when it changes. Without "
            "it, calls need no key, and operators are the callers on this machine.",
            metavar="FILE",
        ),
    ] = ""
    operator_peers: Annotated[
        tuple[str, ...],
        Option(
            "Name in a client certificate whose owner is an operator. Repeatable.",
            name="operator_peer",
            separator=",",
            metavar="NAME",
        ),
    ] = ()
    audit_log: Annotated[
        str,
        Option(
            "File to which operators' actions are appended, besides the log, as a JSON object a line.", metavar="FILE"
        ),
    ] = ""
    plain_keys: tuple[str, ...] = ()  # of clients, in place of a file


@asynccontextmanager
async def access_controlled(settings: AccessSettings, registry: CollectorRegistry) -> AsyncIterator[AccessControl]:
    """Check callers while the block runs, by the file as it is at the moment."""
    metrics = AccessMetrics(registry)
    async with auditing(settings.audit_log, metrics) as audit:
        if not settings.api_key_file:
            keys = plain_keys(settings.plain_keys)
            metrics.valid.set(1)
            yield AccessControl(lambda: keys, operator_peers=settings.operator_peers, audit=audit, metrics=metrics)
            return
        file = KeyFile(settings.api_key_file, metrics)
        following = asyncio.create_task(supervised("API keys", file.follow))
        try:
            yield AccessControl(
                lambda: file.keys,
                operator_peers=settings.operator_peers,
                audit=audit,
                metrics=metrics,
                problem=lambda: file.problem,
            )
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
