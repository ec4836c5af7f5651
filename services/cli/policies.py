"""`block policies`: which rules there are, and switching a running scheduler to another."""

from __future__ import annotations

import json

import click
import grpc

from services.cli.scheduler_client import asked, complaint, scheduler_option


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_context
def policies(context: click.Context, *, as_json: bool) -> None:
    """List the policies, with formula and source; parameters are set as in 'linear: lambda = 0.3'."""
    if context.invoked_subcommand is not None:
        return
    from scheduler.policies import POLICIES

    if as_json:
        listed = [
            {
                "name": name,
                "formula": entry.formula,
                "source": entry.source,
                "reads": list(entry.needs),
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
        for key, one in entry.parameters.items():
            click.echo(f"{'':{width}}  {key} = {one.default:g}: {one.meaning}")
    click.echo(f"\nAnd any formula over indicators: {'expr: p_tokens * batch_size'!r}. The lowest score wins.")


@policies.command()
@click.argument("policy")
@scheduler_option
def use(policy: str, scheduler: tuple[str, ...]) -> None:
    """Have running schedulers decide by POLICY from now on, until they end. Only on their own machine."""
    from protos.block.v1 import scheduler_pb2
    from scheduler.policy import policy_from

    policy_from(policy)
    question = scheduler_pb2.UsePolicyRequest(policy=policy)
    answers = asked(scheduler, lambda stub: stub.UsePolicy(question))
    for address, answer in answers:
        if not isinstance(answer, grpc.aio.AioRpcError):
            click.echo(f"{address}: {answer.policy} (before: {answer.before})")
    failed = [complaint(address, answer) for address, answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    if failed:
        raise click.ClickException("; ".join(failed))


@policies.command()
@scheduler_option
def show(scheduler: tuple[str, ...]) -> None:
    """Say by which policy running schedulers decide, and over which instances."""
    from protos.block.v1 import scheduler_pb2

    question = scheduler_pb2.ListInstancesRequest()
    answers = asked(scheduler, lambda stub: stub.ListInstances(question))
    for address, answer in answers:
        if not isinstance(answer, grpc.aio.AioRpcError):
            names = ", ".join(instance.instance_id for instance in answer.instances) or "none"
            click.echo(f"{address}: {answer.policy}; instances: {names}")
    failed = [complaint(address, answer) for address, answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    if failed:
        raise click.ClickException("; ".join(failed))
