"""Reads requests, snapshots and settings from files and JSON, and writes them; errors are one line."""

from __future__ import annotations

import csv
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from predictor.config import FIELD_NAMES
from predictor.prefix import block_hashes
from predictor.request import RequestFacts
from predictor.snapshot import OLDEST_VERSION, VERSION, Snapshot
from predictor.suggestions import require_known
from simulator.progress import followed

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

SHORTHANDS = ("prompt_token_ids",)
TEXT_FIELDS = ("request_id", "request_class", "client_id", "session_id", "model")
REQUEST_FIELDS = tuple(spec.name for spec in fields(RequestFacts)) + SHORTHANDS


def read_json(path: str) -> Any:
    """Read one JSON document; `-` is standard input."""
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None


def read_text(path: str) -> str:
    """Read a file, or standard input for `-`."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def snapshot_from(data: Any) -> Snapshot:
    """Check and build a snapshot of this version or an older one; a newer one is refused before anything else."""
    version = data.get("version") if isinstance(data, Mapping) else None
    if isinstance(version, int) and not isinstance(version, bool):
        if version > VERSION:
            raise ValueError(f"version: {version} is newer than {VERSION}, the newest that can be read here")
        if OLDEST_VERSION <= version < VERSION:  # fields that it lacks have their defaults
            data = {**data, "version": VERSION}
    return checked(Snapshot, data)


def snapshot_json(snapshot: Snapshot) -> str:
    """Write a snapshot as JSON."""
    return _adapter_of(Snapshot).dump_json(snapshot).decode()


def request_from(data: Any, *, block_size: int, default_id: str) -> RequestFacts:
    """Check and build a request; token ids are counted and hashed."""
    if not isinstance(data, Mapping):
        raise ValueError(f"must be an object with prompt_tokens and so on, not {_kind(data)}")
    require_known(data, REQUEST_FIELDS, "field")
    given = {"request_id": default_id, **data}
    token_ids = given.pop("prompt_token_ids", None)
    if isinstance(given.get("prompt_tokens"), list):
        token_ids = given.pop("prompt_tokens")
    if token_ids is not None:
        given = {**_from_token_ids(token_ids, block_size), **given}
    if isinstance(given.get("prefix_hashes"), list):
        given["prefix_hashes"] = tuple(given["prefix_hashes"])
    return checked(RequestFacts, given)


def _from_token_ids(token_ids: Any, block_size: int) -> dict[str, Any]:
    is_valid = isinstance(token_ids, list) and all(type(token) is int and abs(token) < 2**63 for token in token_ids)
    if not is_valid:
        raise ValueError("prompt_token_ids: must be a list of whole numbers")
    return {"prompt_tokens": len(token_ids), "prefix_hashes": block_hashes(token_ids, block_size)}


def requests_from_file(path: str, *, block_size: int) -> list[RequestFacts]:
    """Read requests from JSON lines, a JSON array or CSV with a header; the error for an invalid one has its index."""
    requests = []
    seen: set[str] = set()
    rows, num_rows = _rows(path)
    for index, data in enumerate(followed(rows, "reading requests", num_rows)):
        try:
            request = request_from(data, block_size=block_size, default_id=str(index))
            if request.request_id in seen:
                raise ValueError(f"request_id: {request.request_id!r} is a duplicate")
        except ValueError as error:
            raise ValueError(f"{path}: requests[{index}].{error}") from None
        seen.add(request.request_id)
        requests.append(request)
    if not requests:
        raise ValueError(f"{path}: has no requests")
    return requests


def _rows(path: str) -> tuple[Iterable[Any], int]:
    """Return the rows of a file, which are parsed one by one, and about how many there are."""
    text = read_text(path)
    if not path.endswith(".csv") and text.lstrip().startswith("["):
        rows = list(_parsed(path, text, 1))
        return rows, len(rows)
    lines = text.splitlines()
    if path.endswith(".csv"):
        return map(_typed, csv.DictReader(lines)), len(lines)
    return (_parsed(path, line, number) for number, line in enumerate(lines, 1) if line.strip()), len(lines)


def _parsed(path: str, text: str, line: int) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{line}: is not JSON: {error}") from None


def _typed(row: Mapping[str, str | None]) -> dict[str, Any]:
    """Convert the cells of a CSV row to their types; empty ones are left out."""
    values: dict[str, Any] = {}
    for name, cell in row.items():
        if not cell or name is None:
            continue
        try:
            values[name] = cell if name in TEXT_FIELDS else json.loads(cell)
        except ValueError:
            values[name] = cell
    return values


def settings_from_toml(path: str) -> dict[str, Any]:
    """Read engine settings, at the top level or under [engine]; an unknown one is refused by name."""
    try:
        data = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    settings = data.get("engine", data)
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: engine: must be a table")
    try:
        require_known(settings, FIELD_NAMES, "setting")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return settings


@cache
def _adapter_of(kind: type[Any]) -> TypeAdapter[Any]:
    """Make pydantic's validator of a dataclass; most programs never read one, and importing pydantic takes a while."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def checked(kind: type[T], data: Any) -> T:
    """Check and build a value from plain data; errors begin with the field."""
    from pydantic import ValidationError

    try:
        checked: T = _adapter_of(kind).validate_json(json.dumps(data))  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        first = error.errors()[0]
        path = _path_of(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            message = "is missing"
        elif first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            message = "is unknown"
        if not path:
            raise ValueError(message) from None
        separator = "." if first["type"] == "value_error" else ": "  # the errors of our own values start with the field
        raise ValueError(f"{path}{separator}{message}") from None
    return checked


def _path_of(location: Iterable[int | str]) -> str:
    """Write the path of a field in a document: running[3].request.prompt_tokens."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in ("Tag", "float", "int", "str", "constrained-float"):  # the branches of a union are no fields
            path += f".{step}" if path else str(step)
    return path


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), f"{value!r}")


def plain(value: Any) -> Any:
    """Convert values for JSON; an infinite time becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {spec.name: plain(getattr(value, spec.name)) for spec in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return value
