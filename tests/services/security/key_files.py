"""Key files for tests."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.security.keys import digest_of


def key(text: str, name: str = "", **fields: Any) -> str:
    """Write the table of a key, which is called as it reads unless it has a name."""
    return table("key", name=name or text, sha256=digest_of(text), **fields)


def tenant(name: str, **fields: float) -> str:
    """Write the table of a tenant, with its limits and its weight."""
    return table("tenant", name=name, **fields)


def table(kind: str, **fields: Any) -> str:
    """Write a table of a list."""
    return "\n".join([f"[[{kind}]]", *(f"{field} = {json.dumps(value)}" for field, value in fields.items()), ""])


def write_keys(path: Path, *tables: str) -> str:
    """Replace a key file."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(tables))
    new.chmod(0o600)
    new.rename(path)
    return str(path)


@contextmanager
def key_file(*tables: str) -> Iterator[str]:
    """Have a key file while the block runs; without tables there is none, and its name is empty."""
    if not tables:
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_keys(Path(folder) / "keys.toml", *tables)
