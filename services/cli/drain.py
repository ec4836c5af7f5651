"""`block drain` and `block undrain`: take an instance out of service, and return it."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

import click

from services.cli.caller_key import api_key_option
from services.cli.operator_client import OperatorReply, call_all, json_option, operator_option, require_success
from services.cli.tls_options import tls_options
from services.instances.registrations import DEFAULT_DEADLINE_S
from services.security.own_key import OwnKey

NOT_FOUND = 404
POLL_S = 0.5
STILL_BUSY = 1  # exit status


@click.command()
@click.argument("instance_id", metavar="NAME")
@click.option(
    "--deadline-s",
    type=click.FloatRange(min=0),
    default=DEFAULT_DEADLINE_S,
    show_default=True,
    help="Time after which requests that are left move to other instances, in seconds.",
)
@click.option(
    "--migrate/--no-migrate", default=True, help="Whether they move, or stay to their end.  [default: migrate]"
)
@click.option(
    "--force-after-s",
    type=click.FloatRange(min=0),
    default=None,
    help="Time after which requests that could not move are ended, in seconds.  [default: never]",
)
@click.option("--wait", is_flag=True, help="Wait until no request is left.")
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    help="Maximum time to wait, in seconds; then the exit status is 1.",
)
@operator_option
@api_key_option
@tls_options
@json_option
def drain(
    *,
    instance_id: str,
    deadline_s: float,
    migrate: bool,
    force_after_s: float | None,
    wait: bool,
    wait_s: float,
    operators: tuple[str, ...],
    key: OwnKey,
    as_json: bool,
) -> int:
    """Send no new requests to the instance NAME, whatever list it is from; move those that it still has in time.

    The same command again changes nothing. The instance stays in the list; remove it when no request is left.
    """
    body = {"deadline_s": deadline_s, "migrate": migrate, "force_after_s": force_after_s}
    path = f"/instances/{quote(instance_id, safe='')}"
    replies = call_all(operators, key, "POST", f"{path}/drain", body)
    require_success(replies)
    if not as_json:
        click.echo(f"{instance_id} drains")
    left = _requests_left(replies)
    if wait:
        left = _waited(operators, key, path, wait_s, quiet=as_json)
    if as_json:
        click.echo(json.dumps({"instance_id": instance_id, "requests": left, **body}))
    return STILL_BUSY if wait and left else 0


@click.command()
@click.argument("instance_id", metavar="NAME")
@operator_option
@api_key_option
@tls_options
@json_option
def undrain(instance_id: str, operators: tuple[str, ...], key: OwnKey, *, as_json: bool) -> None:
    """Send requests to the instance NAME again."""
    replies = call_all(operators, key, "DELETE", f"/instances/{quote(instance_id, safe='')}/drain")
    require_success(replies)
    click.echo(json.dumps({"instance_id": instance_id}) if as_json else f"{instance_id} takes requests again")


def _waited(operators: tuple[str, ...], key: OwnKey, path: str, wait_s: float, *, quiet: bool) -> int | None:
    """Return the number of requests left: none, or those at the end of the time; show it whenever it changes."""
    until_s, shown = time.monotonic() + wait_s, -1
    while True:
        replies = call_all(operators, key, "GET", path)
        require_success(replies, also=(NOT_FOUND,))  # it is gone: no request is left
        left = _requests_left(replies)
        if left is not None and left != shown and not quiet:
            shown = left
            click.echo(f"{left} requests left", err=True)
        if left == 0 or time.monotonic() >= until_s:
            return left
        time.sleep(POLL_S)


def _requests_left(replies: list[OperatorReply]) -> int | None:
    """Return the largest number that a scheduler knows; None where one does not know it yet."""
    numbers: list[Any] = [0 if reply.status == NOT_FOUND else reply.body.get("requests") for reply in replies]
    return None if None in numbers else max(numbers, default=0)
