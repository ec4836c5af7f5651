"""TLS options of commands that call running servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from services.security.settings import TlsSettings

Command = TypeVar("Command", bound=Callable[..., Any])


def tls_options(command: Command) -> Command:
    """Give a command the options of a client's certificates, which all its calls use."""

    @functools.wraps(command)
    def call(**parameters: Any) -> Any:
        given = {name: parameters.pop(name) for name in HELP}
        peers = given.pop("tls_peer")
        if peers or any(given.values()):
            from services.security.certificates import use_tls

            use_tls(TlsSettings(tls_peers=peers, **given))
        return command(**parameters)

    for name, text in reversed(HELP.items()):
        repeated = name == "tls_peer"
        call = click.option(
            f"--{name.replace('_', '-')}",
            name,
            metavar="NAME" if repeated else "FILE",
            multiple=repeated,
            default=() if repeated else "",
            envvar=f"BLOCK_{name.upper()}",
            help=text,
        )(call)
    return cast("Command", call)


HELP = {
    "tls_ca": "CA certificates that verify servers; calls to parts of Block then use TLS.",
    "tls_cert": "Certificate to present to servers.",
    "tls_key": "Private key of --tls-cert.",
    "tls_peer": "Name that the certificate of a server must have, in place of its host. Repeatable.",
}
