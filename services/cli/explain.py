"""`block explain`: why a request went where it went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
import grpc
from google.protobuf.json_format import MessageToDict

from services.cli.scheduler_client import asked, complaint, scheduler_option


@click.command()
@click.argument("request_id")
@scheduler_option
@click.option("--record", metavar="FILE", default=None, help="Look into a recording instead.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def explain(request_id: str, scheduler: tuple[str, ...], record: str | None, *, as_json: bool) -> None:
    """Say why the request REQUEST_ID went where it went: candidates, scores, and who was skipped.

    Schedulers remember their last decisions; older ones are in recordings, with candidates if --record-candidates
    was set.
    """
    from services.explanations import table_of

    decision = _recorded(record, request_id) if record else _remembered(scheduler, request_id)
    if as_json:
        click.echo(json.dumps(MessageToDict(decision, preserving_proto_field_name=True)))
        return
    for line in table_of(decision):
        click.echo(line)


def _remembered(addresses: Sequence[str], request_id: str) -> Any:
    from protos.block.v1 import scheduler_pb2

    question = scheduler_pb2.ExplainRequest(request_id=request_id)
    answers = asked(addresses, lambda stub: stub.Explain(question))
    found = [answer.decision for _, answer in answers if not isinstance(answer, grpc.aio.AioRpcError)]
    if not found:
        raise click.ClickException("; ".join(complaint(address, error) for address, error in answers))
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
