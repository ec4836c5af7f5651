"""Commands that query running schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click
import grpc

from protos.block.v1 import scheduler_pb2_grpc
from services.instances.instance import require_address
from services.rpc.channels import open_channel
from services.security.own_key import OwnKey
from services.settings import PORTS

T = TypeVar("T")
TIMEOUT_S = 5.0

scheduler_option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    multiple=True,
    default=(f"127.0.0.1:{PORTS['scheduler']}",),
    show_default=True,
    envvar="BLOCK_SCHEDULERS",
    help="host:port of a scheduler. Repeatable.",
)


def query(
    addresses: Sequence[str], call: Callable[[Any], Awaitable[T]], key: OwnKey
) -> list[tuple[str, T | grpc.aio.AioRpcError]]:
    """Call each scheduler at the same time, with a key; return the reply or the error of each."""

    async def one(address: str) -> T | grpc.aio.AioRpcError:
        async with open_channel(address, key) as channel:
            try:
                return await asyncio.wait_for(call(scheduler_pb2_grpc.SchedulerStub(channel)), TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error

    async def all_of_them() -> list[T | grpc.aio.AioRpcError]:
        return list(await asyncio.gather(*map(one, addresses)))

    for address in addresses:
        require_address("scheduler", address)
    try:
        return list(zip(addresses, asyncio.run(all_of_them()), strict=True))
    except TimeoutError:
        raise click.ClickException(f"scheduler: no reply within {TIMEOUT_S:g} s") from None


def message_of(address: str, error: grpc.aio.AioRpcError) -> str:
    """Write the error of a call in one line."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"{address}: no scheduler answers there: {error.details()}"
    return f"{address}: {error.details()}"
