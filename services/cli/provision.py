"""`block provision`: queries a provisioner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import click
import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from protos.block.v1 import common_pb2, provisioner_pb2_grpc
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.instances import BOTH
from services.cli.caller_key import api_key_option
from services.cli.tls_options import tls_options
from services.instances.instance import require_address
from services.rpc.channels import open_channel
from services.security.own_key import OwnKey
from services.settings import PORTS

TIMEOUT_S = 10.0

address_option = click.option(
    "--address",
    default=f"127.0.0.1:{PORTS['provisioner']}",
    envvar="BLOCK_PROVISIONER",
    show_default=True,
    help="host:port of the provisioner.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def provision() -> None:
    """Query a provisioner: its instances, its plan, and its past actions with their reasons."""


@provision.command()
@address_option
@tls_options
@json_option
@api_key_option
def status(address: str, *, as_json: bool, key: OwnKey) -> None:
    """Show the instances, their desired number, and the actions in progress."""
    answer = _queried(lambda stub: stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S), address, key)
    if as_json:
        print(json.dumps(_plain(answer)))
        return
    print(f"leader {answer.leader_id or 'none'}, queried {answer.provisioner_id}")
    for pool in answer.pools:
        print(
            f"{pool.pool}: {pool.rule}, {len(pool.instances)} instances, {pool.num_desired} desired "
            f"({pool.min_instances} to {pool.max_instances}), {pool.arrivals_per_s:.2f} requests/s, forecast P99 "
            f"{pool.forecast_p99_e2e_s:.1f} s, cold start {pool.cold_start_s:.1f} s"
        )
        for tier in pool.tiers:
            print(_tier_line(tier))
        for one in pool.instances:
            role = f"  {one.role}" if one.role not in ("", BOTH) else ""
            tier = f"  {one.tier}{' (pending)' if one.tier_closed else ''}" if one.tier else ""
            print(f"  {one.instance_id:28} {_state(one.state):9} {one.engine_url}{role}{tier}")
        for action in pool.under_way:
            print(f"  {_line(action)}")


@provision.command()
@address_option
@tls_options
@click.option("--rule", default="", help="Rule to plan by.  [default: the provisioner's]")
@json_option
@api_key_option
def plan(address: str, rule: str, *, as_json: bool, key: OwnKey) -> None:
    """Show what the provisioner would do now, and why, without doing it."""
    answer = _queried(lambda stub: stub.Plan(pb.PlanRequest(rule=rule), timeout=TIMEOUT_S), address, key)
    if as_json:
        print(json.dumps(_plain(answer)))
        return
    for action in answer.actions:
        print(_line(action))
    if not answer.actions:
        print(f"nothing: {answer.why}")


@provision.command()
@address_option
@tls_options
@click.option(
    "--last", "--most", "-n", "last", type=click.IntRange(min=0), default=0, help="Number of entries.  [default: all]"
)
@click.option("--follow", "-f", is_flag=True, help="Continue with new actions as they happen.")
@json_option
@api_key_option
def history(address: str, last: int, *, follow: bool, as_json: bool, key: OwnKey) -> None:
    """List past actions, oldest first, one line for each change of an action."""
    request = pb.HistoryRequest(most=last, follow=follow)
    entries = _streamed(address, request, None if follow else TIMEOUT_S, key)
    if as_json and not follow:
        print(json.dumps({"entries": [_plain(entry) for entry in entries]}))
        return
    for entry in entries:
        at = datetime.fromtimestamp(entry.at_unix_s, UTC).isoformat(timespec="seconds")
        print(json.dumps(_plain(entry)) if as_json else f"{at} {_line(entry.action)}", flush=True)


def _queried(call: Any, address: str, key: OwnKey) -> Any:
    require_address("address", address)

    async def queried() -> Any:
        async with open_channel(address, key) as channel:
            return await call(provisioner_pb2_grpc.ProvisionerStub(channel))

    try:
        return asyncio.run(queried())
    except grpc.aio.AioRpcError as error:
        raise ValueError(f"{address}: {error.details()}") from None


def _streamed(
    address: str, request: pb.HistoryRequest, within_s: float | None, key: OwnKey
) -> Iterator[pb.HistoryResponse]:
    require_address("address", address)

    async def opened() -> tuple[grpc.aio.Channel, AsyncIterator[pb.HistoryResponse]]:
        channel = open_channel(address, key)
        history: Any = provisioner_pb2_grpc.ProvisionerStub(channel).History
        return channel, history(request, timeout=within_s)

    with asyncio.Runner() as runner:
        channel, entries = runner.run(opened())
        try:
            while (entry := runner.run(_next_of(entries))) is not None:
                yield entry
        except grpc.aio.AioRpcError as error:
            raise ValueError(f"{address}: {error.details()}") from None
        finally:
            runner.run(channel.close())


async def _next_of(entries: AsyncIterator[pb.HistoryResponse]) -> pb.HistoryResponse | None:
    return await anext(entries, None)


def _plain(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _state(state: common_pb2.InstanceState.ValueType) -> str:
    return common_pb2.InstanceState.Name(state).removeprefix("INSTANCE_STATE_").lower()


def _tier_line(tier: pb.TierStatus) -> str:
    line = (
        f"  tier {tier.name}, {1e3 * tier.tpot_slo_s:g} ms: {tier.num_instances} instances, {tier.num_pending} "
        f"pending, {tier.num_waiting} requests wait"
    )
    if tier.HasField("shortest_step_s") and tier.shortest_step_s > tier.tpot_slo_s:
        line += f"; no instance can keep this bound: the shortest step takes {1e3 * tier.shortest_step_s:.3g} ms"
    return line


def _line(action: pb.Action) -> str:
    kind = pb.ActionKind.Name(action.kind).removeprefix("ACTION_KIND_").lower()
    state = pb.ActionState.Name(action.state).removeprefix("ACTION_STATE_").lower()
    what = ",".join(action.instance_ids) or str(action.num_instances)
    return f"{action.action_id or '-'} {kind} {what} -> {action.num_desired} ({state}, {action.rule}): {action.why}"
