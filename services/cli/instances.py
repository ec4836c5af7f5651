"""`block instances`: lists, registers and removes instances of running schedulers."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import click

from scheduler.instances import BOTH
from services.cli.caller_key import api_key_option
from services.cli.operator_client import OperatorReply, call_all, json_option, operator_option, require_success
from services.cli.tls_options import tls_options
from services.security.own_key import OwnKey


@click.group()
def instances() -> None:
    """List, register and remove instances, at the ports for operators."""


@instances.command(name="list")
@operator_option
@api_key_option
@tls_options
@json_option
def list_instances(operators: tuple[str, ...], key: OwnKey, *, as_json: bool) -> None:
    """List the instances: where each comes from, its state, its health and its requests."""
    replies = call_all(operators, key, "GET", "/instances")
    require_success(replies)
    if as_json:
        click.echo(json.dumps({"schedulers": [{"operator": reply.url, **reply.body} for reply in replies]}))
        return
    for reply in replies:
        found = reply.body["instances"]
        click.echo(f"{reply.url}: {len(found)} instances")
        for one in found:
            click.echo(f"  {_line(one)}")


@instances.command()
@click.argument("instance_id", metavar="NAME")
@click.argument("engine_url")
@click.argument("sidecar_address", metavar="SIDECAR")
@click.option("--model", "models", multiple=True, help="Model that it serves. Repeatable.  [default: any]")
@click.option("--role", default=BOTH, show_default=True, help="both, prefill or decode.")
@click.option("--tier", default="", help="Tier that it belongs to; needs --tier-tpot-ms.")
@click.option("--tier-tpot-ms", type=float, default=None, help="Bound of its tier, in milliseconds per token.")
@click.option(
    "--ttl-s", type=float, default=None, help="Time after which it is forgotten, unless it is added again, in seconds."
)
@click.option("--replace", is_flag=True, help="Replace an instance of this name that has other facts.")
@operator_option
@api_key_option
@tls_options
@json_option
def add(
    *,
    instance_id: str,
    engine_url: str,
    sidecar_address: str,
    models: tuple[str, ...],
    role: str,
    tier: str,
    tier_tpot_ms: float | None,
    ttl_s: float | None,
    replace: bool,
    operators: tuple[str, ...],
    key: OwnKey,
    as_json: bool,
) -> None:
    """Register the instance NAME: the URL of its engine, and host:port of its sidecar."""
    table: dict[str, Any] = {
        "instance_id": instance_id,
        "engine_url": engine_url,
        "sidecar_address": sidecar_address,
        "models": list(models),
        "role": role,
        "tier": tier,
    }
    if tier_tpot_ms is not None:
        table["tier_tpot_s"] = tier_tpot_ms / 1e3
    if ttl_s is not None:
        table["ttl_s"] = ttl_s
    replies = call_all(operators, key, "POST", f"/instances?replace={str(replace).lower()}", table)
    require_success(replies)
    _report(replies, f"{instance_id} is registered", as_json=as_json)


@instances.command()
@click.argument("instance_id", metavar="NAME")
@operator_option
@api_key_option
@tls_options
@json_option
def remove(instance_id: str, operators: tuple[str, ...], key: OwnKey, *, as_json: bool) -> None:
    """Remove the instance NAME, which was registered; its requests go on to their end."""
    replies = call_all(operators, key, "DELETE", f"/instances/{quote(instance_id, safe='')}")
    require_success(replies)
    _report(replies, f"{instance_id} is removed", as_json=as_json)


def _report(replies: list[OperatorReply], text: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"schedulers": [{"operator": one.url, "status": one.status} for one in replies]}))
    else:
        click.echo(text)


def _line(one: dict[str, Any]) -> str:
    requests = "?" if one.get("requests") is None else one["requests"]
    state = one["state"]
    if isinstance(drain := one.get("drain"), dict) and drain.get("deadline_in_s") is not None:
        state += f" ({max(0.0, drain['deadline_in_s']):.0f} s left)"
    expiry = f", expires in {one['expires_in_s']:.0f} s" if "expires_in_s" in one else ""
    about = f"{one.get('health', 'unknown')}, {requests} requests, by {one['source']}{expiry}"
    return f"{one['instance_id']:24} {state:10} {one['engine_url']}  {about}"
