"""`block certs`: a CA and certificates for development."""

from __future__ import annotations

import json
from pathlib import Path

import click

from services.security.parts import LOCAL_NAMES, PARTS


@click.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="Part to make a certificate for. Repeatable.  [default: every part, and `client` for commands]",
)
@click.option(
    "--name",
    "names",
    metavar="NAME",
    multiple=True,
    help="Further DNS name, address or URI of every certificate. Repeatable; localhost is there in any case.",
)
@click.option("--days", type=float, default=90, show_default=True, help="Days until the certificates expire.")
@click.option("--force", is_flag=True, help="Overwrite certificates and keys that exist; the CA stays.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: the files that were written.")
def certs(
    folder: str, *, parts: tuple[str, ...], names: tuple[str, ...], days: float, force: bool, as_json: bool
) -> None:
    """Make a development CA in DIR, and a certificate and a key for each part, signed by it.

    A certificate PART.crt names PART.block.internal, PART, localhost and the addresses of this machine's loopback, and
    serves both sides of a connection. With --force, certificates are made again under the same CA: programs that run
    read them without a restart. Keys can be read by this user only. For production use a CA of your own.
    """
    from services.security.development_ca import CA_FILE, write_certificates

    try:
        written = write_certificates(Path(folder), parts or PARTS, [*LOCAL_NAMES, *names], days, force=force)
    except OSError as error:
        raise ValueError(f"folder: {error.filename}: {error.strerror}") from None
    if as_json:
        print(json.dumps({"ca": str(Path(folder) / CA_FILE), "files": [str(path) for path in written]}))
        return
    for path in written:
        print(path)
