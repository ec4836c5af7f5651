"""Commands that use the ports for operators, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from services.http.client import HttpClient
from services.http.headers import request_head
from services.http.origin import origin_of
from services.security.own_key import OwnKey
from services.settings import PORTS

WITHIN_S = 10.0
MAX_REPLY_BYTES = 64 * 2**20

operator_option = click.option(
    "--operator",
    "operators",
    metavar="URL",
    multiple=True,
    default=(f"http://127.0.0.1:{PORTS['operator']}",),
    show_default=True,
    envvar="BLOCK_OPERATORS",
    help="Port for operators (--metrics-port) of a scheduler, or of a gateway that decides in-process. Repeatable: "
    "name every scheduler.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class OperatorReply(NamedTuple):
    """What one port for operators replies."""

    url: str
    status: int
    body: Any


def call_all(operators: Sequence[str], key: OwnKey, method: str, path: str, body: Any = None) -> list[OperatorReply]:
    """Call each port at the same time, with a key.

    ClickException names those that cannot be reached, ValueError a bad URL.
    """
    for url in operators:
        try:
            origin_of(url)
        except ValueError as error:
            raise ValueError(f"operator: {error}") from None
    if not operators:
        raise ValueError("operator: is missing")
    return asyncio.run(_call_all(operators, key, method, path, body))


def require_success(replies: Sequence[OperatorReply], *, also: Sequence[int] = ()) -> None:
    """Raise ClickException for replies that refuse; statuses in `also` are no refusals."""
    refused = [
        f"{reply.url}: {error_in(reply.body)}" for reply in replies if reply.status >= 400 and reply.status not in also
    ]
    if refused:
        raise click.ClickException("; ".join(refused))


def error_in(body: Any) -> str:
    """Return the message of an error's body."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else str(body)[:200]


async def _call_all(operators: Sequence[str], key: OwnKey, method: str, path: str, body: Any) -> list[OperatorReply]:
    client = HttpClient()
    data = b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in key.metadata()]

    async def call(url: str) -> OperatorReply:
        head = request_head(method.encode(), origin_of(url), path.encode(), headers, len(data))
        return await _replied(client, url, head, data)

    try:
        return list(await asyncio.gather(*map(call, operators)))
    finally:
        client.close()


async def _replied(client: HttpClient, url: str, head: bytes, data: bytes) -> OperatorReply:
    try:
        async with asyncio.timeout(WITHIN_S):
            connection = await client.send(origin_of(url), head, data, WITHIN_S)
            try:
                text = await connection.read_all(WITHIN_S, MAX_REPLY_BYTES) if connection.status != 204 else b""
            finally:
                connection.release()
    except TimeoutError:
        raise click.ClickException(f"{url}: no reply within {WITHIN_S:g} s") from None
    except ConnectionError as error:
        raise click.ClickException(f"{url}: {error}") from None
    try:
        return OperatorReply(url, connection.status, json.loads(text) if text else None)
    except ValueError:
        return OperatorReply(url, connection.status, text.decode("utf-8", "replace")[:200])
