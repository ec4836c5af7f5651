"""The engines of a cluster by their roles in disaggregated prefill and decode, and what roles change for each."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from predictor.config import CONSUMER, PRODUCER, PRODUCER_AND_CONSUMER
from scheduler.instances import BOTH, DECODE_ROLE, PREFILL_ROLE
from services.cluster.programs import LOCAL
from services.http.client import HttpClient
from services.http.engine_identity import difference, engine_identity
from services.http.origin import origin_of
from services.logs import log_event

log = logging.getLogger(__name__)

KV_ROLES = {PREFILL_ROLE: PRODUCER, DECODE_ROLE: CONSUMER, BOTH: PRODUCER_AND_CONSUMER}
CONNECTOR = "NixlConnector"
CONNECTOR_FLAG = "--kv-transfer-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """One engine: its name, its role, and its part in the KV connector; without pools it has no connector."""

    name: str
    role: str = BOTH
    kv_role: str = ""


def planned_engines(num_prefill: int, num_decode: int, num_both: int) -> tuple[PlannedEngine, ...]:
    """Name the engines of each role: prefill-0, …, decode-0, …, engine-0, … ."""
    pooled = num_prefill + num_decode > 0
    return tuple(
        PlannedEngine(name=f"{word}-{number}", role=role, kv_role=KV_ROLES[role] if pooled else "")
        for word, role, num in (
            (PREFILL_ROLE, PREFILL_ROLE, num_prefill),
            (DECODE_ROLE, DECODE_ROLE, num_decode),
            ("engine", BOTH, num_both),
        )
        for number in range(num)
    )


def emulator_flags(engine: PlannedEngine) -> tuple[str, ...]:
    """Write the flags of an emulated engine, and of a sidecar that mirrors one."""
    return ("--kv-role", engine.kv_role) if engine.kv_role else ()


def connector_flags(engine: PlannedEngine, given: Sequence[str], *, on_cpu: bool) -> tuple[str, ...]:
    """Write the flags of vLLM that configure its KV connector, unless the user's arguments do."""
    if not engine.kv_role or any(re.split("[.=]", word)[0] == CONNECTOR_FLAG for word in given):
        return ()
    connector = {"kv_connector": CONNECTOR, "kv_role": engine.kv_role}
    if on_cpu:
        connector["kv_buffer_device"] = "cpu"
    return (CONNECTOR_FLAG, json.dumps(connector))


def connector_environment(
    engine: PlannedEngine, host: str, port: int, present: Mapping[str, str], *, on_cpu: bool
) -> dict[str, str]:
    """Make the variables of an engine with NIXL: where others find it, unless set, and how it uses few cores."""
    if not engine.kv_role:
        return {}
    variables = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOCAL.get(host, host).strip("[]"),
        "UCX_TLS": "all",
        **({"BLOCK_NIXL_ON_CPU": "1"} if on_cpu else {}),
    }
    kept = {name: value for name, value in variables.items() if name not in present}
    return kept | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}  # each engine needs its own


async def pass_blocks_on(engine_urls: Mapping[str, str], tls: ssl.SSLContext | None = None) -> bool:
    """Return whether KV blocks can pass between these engines; where they cannot, the reason is logged."""
    client = HttpClient(tls=tls)
    try:
        found = await asyncio.gather(*(engine_identity(client, origin_of(url)) for url in engine_urls.values()))
        reason = difference(dict(zip(engine_urls, found, strict=True))) if found else ""
    except ValueError as error:
        reason = f"an engine does not say what it is: {error}"
    finally:
        client.close()
    if reason:
        log_event(log, logging.WARNING, f"{reason}; every engine serves whole requests meanwhile")
    return not reason
