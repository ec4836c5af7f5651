"""`block policies`: lists policies, and switches a running scheduler to another."""

from __future__ import annotations

import json

import click
import grpc

from services.cli.caller_key import api_key_option
from services.cli.scheduler_client import message_of, query, scheduler_option
from services.cli.tls_options import tls_options
from services.security.own_key import OwnKey


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def policies(context: click.Context, *, as_json: bool) -> None:
    """List the policies with their formulas and sources; parameters are set as in 'linear: lambda = 0.3'."""
    if context.invoked_subcommand is not None:
        return
    from scheduler.policies import POLICIES
    from scheduler.policy import policy_from, rules_of

    if as_json:
        listed = [
            {
                "name": name,
                "formula": entry.formula,
                "source": entry.source,
                "reads": list(dict.fromkeys(policy_from(name).needs)),
                "disaggregate": rules_of(name).described,
                "parameters": {
                    key: {"default": one.default, "meaning": one.meaning} for key, one in entry.parameters.items()
                },
            }
            for name, entry in POLICIES.items()
        ]
        click.echo(json.dumps({"policies": listed}))
        return
    width = max(map(len, POLICIES))
    for name, entry in POLICIES.items():
        click.echo(f"{name:{width}}  {entry.formula}")
        click.echo(f"{'':{width}}  {entry.source}")
        click.echo(f"{'':{width}}  two legs: {rules_of(name).described}")
        for key, one in entry.parameters.items():
            click.echo(f"{'':{width}}  {key} = {one.default:g}: {one.meaning}")
    example = "expr: p_tokens * batch_size"
    click.echo(f"\nA policy can also be a formula over indicators: {example!r}. The lowest score wins.")


@policies.command()
@click.argument("policy")
@scheduler_option
@api_key_option
@tls_options
def use(policy: str, scheduler: tuple[str, ...], *, key: OwnKey) -> None:
    """Switch running schedulers to POLICY, until they stop; those of other machines need an operator's key."""
    from protos.block.v1 import scheduler_pb2
    from scheduler.policy import policy_from

    policy_from(policy)
    request = scheduler_pb2.UsePolicyRequest(policy=policy)
    replies = query(scheduler, lambda stub: stub.UsePolicy(request), key)
    for address, reply in replies:
        if not isinstance(reply, grpc.aio.AioRpcError):
            click.echo(f"{address}: {reply.policy} (before: {reply.before})")
    failed = [message_of(address, reply) for address, reply in replies if isinstance(reply, grpc.aio.AioRpcError)]
    if failed:
        raise click.ClickException("; ".join(failed))


@policies.command()
@scheduler_option
@api_key_option
@tls_options
def show(scheduler: tuple[str, ...], *, key: OwnKey) -> None:
    """Show the policy and the instances of running schedulers."""
    from protos.block.v1 import scheduler_pb2

    request = scheduler_pb2.ListInstancesRequest()
    replies = query(scheduler, lambda stub: stub.ListInstances(request), key)
    for address, reply in replies:
        if not isinstance(reply, grpc.aio.AioRpcError):
            names = ", ".join(instance.instance_id for instance in reply.instances) or "none"
            click.echo(f"{address}: {reply.policy}; instances: {names}")
    failed = [message_of(address, reply) for address, reply in replies if isinstance(reply, grpc.aio.AioRpcError)]
    if failed:
        raise click.ClickException("; ".join(failed))
