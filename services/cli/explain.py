"""`block explain`: explains the decision about a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
import grpc
from google.protobuf.json_format import MessageToDict

from services.cli.caller_key import api_key_option
from services.cli.scheduler_client import message_of, query, scheduler_option
from services.cli.tls_options import tls_options
from services.security.own_key import OwnKey


@click.command()
@click.argument("request_id")
@scheduler_option
@click.option("--record", metavar="FILE", default=None, help="Read the decision from a recording.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@api_key_option
@tls_options
def explain(request_id: str, scheduler: tuple[str, ...], record: str | None, *, as_json: bool, key: OwnKey) -> None:
    """Explain the decision about the request REQUEST_ID: its candidates, their scores, and the skipped instances.

    Schedulers keep their last decisions. Older decisions are in recordings, with their candidates if the scheduler ran
    with --record-candidates.
    """
    from services.explanations import table_of

    decision = _recorded(record, request_id) if record else _kept(scheduler, request_id, key)
    if as_json:
        click.echo(json.dumps(MessageToDict(decision, preserving_proto_field_name=True)))
        return
    for line in table_of(decision):
        click.echo(line)


def _kept(addresses: Sequence[str], request_id: str, key: OwnKey) -> Any:
    from protos.block.v1 import scheduler_pb2

    request = scheduler_pb2.ExplainRequest(request_id=request_id)
    replies = query(addresses, lambda stub: stub.Explain(request), key)
    found = [reply.decision for _, reply in replies if not isinstance(reply, grpc.aio.AioRpcError)]
    if not found:
        raise click.ClickException("; ".join(message_of(address, error) for address, error in replies))
    return max(found, key=lambda decision: decision.decided_unix_s)


def _recorded(path: str, request_id: str) -> Any:
    from services.decision_recordings import decisions_in

    last = None
    for decision in decisions_in(path):
        if decision.request_id == request_id:
            last = decision
    if last is None:
        raise click.ClickException(f"{path}: has no decision about {request_id!r}")
    return last
