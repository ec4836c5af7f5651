"""What the targets behind HTTP share: limits, and the replies of the engines behind a gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.gateway.server import serving
from services.gateway.settings import GatewaySettings
from services.rpc.settings import ServerSettings
from tests.services.gateway.stubs import Call, completes, streams

QUIET_S = 0.05  # after which a client leaves, whatever it has
END_S = 20.0  # for a request that has all that it needs
STATUSES = (503,)  # of 5xx, that may be the client's fault: it asks for what no instance has
CLIENT = ("192.0.2.1", 4711)  # not this machine: faults of emulated engines can be set from there only


async def answers(call: Call) -> None:
    """Reply as an engine does; a body that is no JSON is the gateway's error."""
    data = json.loads(call.body) if call.body else {}
    await (streams(call) if isinstance(data, dict) and data.get("stream") is True else completes(call))


async def lenient_answers(call: Call) -> None:
    """Do the same, and refuse what is no JSON: a proxy passes any body on."""
    try:
        json.loads(call.body or b"{}")
    except (ValueError, RecursionError):
        call.whole({"error": {"message": "no JSON"}}, 400)
    else:
        await answers(call)


@asynccontextmanager
async def gateway_before(*urls: str, **settings: Any) -> AsyncIterator[Any]:
    """Run a gateway without a scheduler before engines."""
    given = GatewaySettings(engine_urls=urls, **{"attempts": 1, "max_body_bytes": 2**20, **settings})
    async with serving(given, ServerSettings(drain_s=0.0)) as running:
        yield running.gateway
