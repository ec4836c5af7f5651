"""Lists of named tables in a TOML document, such as `[[objective]]` and `[[mix]]`; errors name table and field."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from predictor.suggestions import require_known

MAX_NUMBER = 1e9


class Named(Protocol):
    """What a table describes; no two of a list have the same name."""

    @property
    def name(self) -> str:
        """The name."""


Entry = TypeVar("Entry", bound=Named)


def entries_in(text: str, source: str, key: str, read: Callable[[Any], tuple[Entry, ...]]) -> tuple[Entry, ...]:
    """Read a document whose only key is `key`; errors start with its source, which is the name of the file."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{source}: is not TOML: {error}") from None
    try:
        require_known(data, (key,), "table")
        return read(data.get(key))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def entries_from(tables: Any, key: str, read: Callable[[Mapping[str, Any]], Entry]) -> tuple[Entry, ...]:
    """Read a list of tables; the error for an invalid one has its index."""
    if not isinstance(tables, Sequence) or isinstance(tables, str) or not tables:
        raise ValueError(f"{key}: must be a list of tables, one [[{key}]] for each entry")
    entries: list[Entry] = []
    names: set[str] = set()
    for index, table in enumerate(tables):
        try:
            if not isinstance(table, Mapping):
                raise ValueError(f"name: the entry must be a table, not {table!r:.40}")
            entry = read(table)
            if entry.name in names:
                raise ValueError(f"name: {entry.name!r} is a duplicate")
        except ValueError as error:
            raise ValueError(f"{key}[{index}].{error}") from None
        names.add(entry.name)
        entries.append(entry)
    return tuple(entries)


def require_fields(table: Mapping[str, Any], fields: Sequence[str], required: Sequence[str]) -> None:
    """Refuse unknown fields, and missing ones."""
    require_known(table, fields, "field")
    for field in required:
        if field not in table:
            raise ValueError(f"{field}: is missing")


def require_text(field: str, value: Any) -> None:
    """Refuse what is no text, or an empty one."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field}: must be a text, not {value!r:.40}")


def require_positive(field: str, value: Any) -> None:
    """Refuse what is no number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value <= MAX_NUMBER):
        raise ValueError(f"{field}: must be a number above 0, at most {MAX_NUMBER:g}, not {value!r:.20}")
