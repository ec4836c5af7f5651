"""`block keys`: makes API keys, and the file in which servers find them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from services.security.key_file import keys_from_file, keys_in
from services.security.keys import LIMITS, LONGEST_KEY, ROLES, digest_of, new_key

MODE = 0o600


@click.group()
def keys() -> None:
    """Make API keys, and the file with their digests that servers read (--api-key-file)."""


@keys.command()
@click.argument("name")
@click.option("--role", type=click.Choice([str(role) for role in ROLES]), default="client", show_default=True,
              help="What the holder may do.")  # fmt: skip
@click.option("--tenant", default="", help="Tenant of the holder.  [default: NAME]")
@click.option("--objective", default="", help="Objective of requests that name none.")
@click.option("--model", "models", multiple=True, help="Model that requests may name. Repeatable.  [default: all]")
@click.option("--expires", default="", metavar="DATE", help="Last day on which the key is valid, such as 2027-01-31.")
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="Rate limit of requests.")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="Rate limit of tokens: prompts and responses.")
@click.option("--max-requests", type=click.IntRange(min=1), help="Maximum number of requests under way.")
@click.option("--max-tokens-in-flight", type=click.IntRange(min=1), help="Maximum number of their tokens.")
@click.option("--append", metavar="FILE", default="", help="Add the table to this key file, and print only the key.")
def new(name: str, append: str, **fields: Any) -> None:
    """Make a key for NAME, and print it: it is stored nowhere else.

    The table for the key file follows, with the key's SHA-256. --append adds it to a file, which is made where it does
    not exist, and is readable by its owner only.
    """
    key = new_key()
    table = table_of(name, digest_of(key), fields)
    keys_in(table, "key")
    if append:
        append_table(Path(append), table)
        click.echo(key)
        return
    click.echo(key)
    click.echo(f"\n{table}", nl=False)


@keys.command("hash")
def hash_command() -> None:
    """Print the SHA-256 of a key, as a key file has it; the key is read from standard input."""
    text = (sys.stdin.buffer.readline(LONGEST_KEY + 2)).decode("utf-8", "replace").strip()
    if not text or len(text) > LONGEST_KEY:
        raise ValueError(f"key: give one of at most {LONGEST_KEY} characters on standard input")
    click.echo(digest_of(text))


@keys.command("list")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(file: str, *, as_json: bool) -> None:
    """Check the key file FILE, and list the holders of its keys."""
    listed = []
    for stored in keys_from_file(file).keys:
        holder = stored.holder
        listed.append(
            {
                "name": holder.name,
                "role": str(holder.role),
                "tenant": holder.tenant,
                "models": sorted(holder.models),
                "expired": holder.is_expired(time.time()),
                **{limit: getattr(holder.limits, limit) for limit in LIMITS if getattr(holder.limits, limit)},
            }
        )
    if as_json:
        click.echo(json.dumps({"keys": listed}))
        return
    width = max(len(str(one["name"])) for one in listed)
    for one in listed:
        more = [f"tenant {one['tenant']}"] if one["tenant"] != one["name"] else []
        more += [f"models {', '.join(one['models'])}"] if one["models"] else []
        more += [f"{limit} {one[limit]}" for limit in LIMITS if limit in one]
        more += ["expired"] if one["expired"] else []
        click.echo(f"{one['name']:{width}}  {one['role']:8}  {'; '.join(more)}".rstrip())


def table_of(name: str, digest: str, fields: dict[str, Any]) -> str:
    """Write the table of a key; fields without a value are left out."""
    lines = ["[[key]]", f"name = {json.dumps(name)}", f'sha256 = "{digest}"']
    for field, value in fields.items():
        if value and not (field == "role" and value == "client"):
            lines.append(f"{field} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    return "\n".join(lines) + "\n"


def append_table(path: Path, table: str) -> None:
    """Add a table to a key file, which stays valid and is replaced in one step."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    text = f"{before.rstrip()}\n\n{table}" if before.strip() else table
    keys_in(text, str(path))
    try:
        descriptor, new_path = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ValueError(f"append: {path} cannot be written: {error.strerror}") from None
    try:
        os.fchmod(descriptor, MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(new_path).replace(path)
    finally:
        Path(new_path).unlink(missing_ok=True)  # where it was not renamed
