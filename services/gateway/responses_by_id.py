"""A request for a response by its id, passed to the instance that keeps it; the reply passes byte for byte."""

from __future__ import annotations

from services.gateway.context import GatewayContext
from services.gateway.incoming import target_of
from services.gateway.kept_responses import KeptResponse
from services.http.application import Call
from services.http.connection import Connection
from services.http.headers import Headers, request_head
from services.http.proxying import OWN_HEADERS, engine_error

MAX_BODY_BYTES = 64 * 1024  # of a request that has nothing to say


async def pass_to_instance(context: GatewayContext, kept: KeptResponse, call: Call, headers: Headers) -> None:
    """Send a request without a body on, and its reply back."""
    settings = context.settings
    head = request_head(call.scope["method"].encode(), kept.origin, target_of(call.scope), headers, 0)
    try:
        connection = await context.engines.send(kept.origin, head, b"", settings.first_byte_s)
    except (ConnectionError, TimeoutError) as error:
        raise engine_error(error) from None
    try:
        await _pass_back(connection, call, kept.instance_id, settings.idle_s)
    except (ConnectionError, TimeoutError) as error:
        raise engine_error(error) from None
    finally:
        connection.release()


async def _pass_back(connection: Connection, call: Call, instance_id: str, idle_s: float) -> None:
    headers = [pair for pair in connection.headers if pair[0] not in OWN_HEADERS]
    await call.start(connection.status, [*headers, (b"x-block-instance", instance_id.encode("ascii", "replace"))])
    while not connection.drained():
        if piece := await connection.read(idle_s):
            await call.write(piece)
    await call.end()
