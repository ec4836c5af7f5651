"""Commands that ask schedulers: which ones, and what goes wrong in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click
import grpc

from protos.block.v1 import scheduler_pb2_grpc
from services.cli.serve_scheduler import PORT
from services.instances import require_address
from services.rpc.channels import open_channel

T = TypeVar("T")
WITHIN_S = 5.0
DEFAULT = f"127.0.0.1:{PORT}"

scheduler_option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    multiple=True,
    default=(DEFAULT,),
    show_default=True,
    envvar="BLOCK_SCHEDULERS",
    help="host:port of a scheduler; repeat for more.",
)


def asked(addresses: Sequence[str], ask: Callable[[Any], Awaitable[T]]) -> list[tuple[str, T | grpc.aio.AioRpcError]]:
    """Ask each scheduler; give what each said, or why it said nothing."""

    async def one(address: str) -> T | grpc.aio.AioRpcError:
        async with open_channel(address) as channel:
            try:
                return await asyncio.wait_for(ask(scheduler_pb2_grpc.SchedulerStub(channel)), WITHIN_S)
            except grpc.aio.AioRpcError as error:
                return error

    async def everyone() -> list[T | grpc.aio.AioRpcError]:
        return list(await asyncio.gather(*map(one, addresses)))

    for address in addresses:
        require_address("scheduler", address)
    try:
        return list(zip(addresses, asyncio.run(everyone()), strict=True))
    except TimeoutError:
        raise click.ClickException(f"scheduler: no answer within {WITHIN_S:g} s") from None


def complaint(address: str, error: grpc.aio.AioRpcError) -> str:
    """Say in one line what a scheduler said instead of an answer."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"{address}: no scheduler answers there"
    return f"{address}: {error.details()}"
