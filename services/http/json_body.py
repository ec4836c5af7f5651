"""JSON from clients and engines: what is too deep, ambiguous or not a number of JSON is refused by its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

MAX_JSON_DEPTH = 64
LONGEST_PATH = 100  # characters of a path in a message
MAX_TOKENS = 20_000  # of a text, among which the path of an error is looked for
JSON_TOO_DEEP, DUPLICATE_KEY, NOT_A_NUMBER = "json_too_deep", "duplicate_key", "not_a_number"

# The tokens that a path consists of; in JSON texts, quotation marks inside strings are escaped.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:,]|-?\b(?:NaN|Infinity)\b')
_CONSTANTS = ("NaN", "Infinity", "-Infinity")


class JsonError(ValueError):
    """JSON that is not accepted: `code` says why, `param` where."""

    def __init__(self, message: str, *, code: str, param: str | None) -> None:
        """Note what the client receives."""
        super().__init__(f"{param}: {message}" if param else f"the body: {message}")
        self.code = code
        self.param = param


class _ConstantError(ValueError):
    """NaN or an infinity."""


def request_json(body: bytes, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Read a client's body, which must be UTF-8; ValueError where it is no JSON, JsonError where it is not accepted."""
    text = body.decode()
    try:
        data = _DECODER.decode(text)
    except _ConstantError as error:
        raise JsonError(str(error), code=NOT_A_NUMBER, param=_path_of(_constants(text))) from None
    except RecursionError:
        raise _too_deep(text, max_depth) from None
    if text.count("[") + text.count("{") > max_depth and _is_deeper(data, max_depth):
        raise _too_deep(text, max_depth)
    return data


def reply_json(body: bytes | str) -> Any:
    """Read what an engine says; ValueError where it is no JSON, or too deep for any reader."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; readers differ in which of two equal keys they take, so that there may not be two."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError("is a duplicate", code=DUPLICATE_KEY, param=_shortened(twice))
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantError(f"must be a number of JSON, which {name} is not")


_DECODER = json.JSONDecoder(object_pairs_hook=_with_unique_keys, parse_constant=_refuse_constant)


def _is_deeper(data: Any, max_depth: int) -> bool:
    """Return whether objects and lists lie deeper, level by level."""
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _too_deep(text: str, max_depth: int) -> JsonError:
    path = _path_of(path for path, sign in _walk(text) if sign in "[{" and len(path) >= max_depth)
    return JsonError(f"is nested deeper than {max_depth} levels", code=JSON_TOO_DEEP, param=path)


def _constants(text: str) -> Iterator[list[str]]:
    return (path for path, sign in _walk(text) if sign in _CONSTANTS)


def _path_of(paths: Iterator[list[str]]) -> str | None:
    """Write the first path as Python would, as far as it is short; one in a list that is the whole has no name."""
    text = "".join(next(paths, []))
    return _shortened(text[1:]) or None if text.startswith(".") else None


def _shortened(path: str) -> str:
    printable = "".join(sign if sign.isprintable() else "?" for sign in path[: LONGEST_PATH + 1])
    return printable if len(printable) <= LONGEST_PATH else printable[:LONGEST_PATH] + "…"


def _walk(text: str) -> Iterator[tuple[list[str], str]]:
    """Give the tokens of a text and the path of each, which changes as the walk goes on."""
    path: list[str] = []
    places: list[int] = []  # in each list; -1 in an object
    key = ""
    for found in islice(_TOKEN.finditer(text), MAX_TOKENS):
        sign = found[0]
        yield path, sign
        if sign in "[{":
            places.append(0 if sign == "[" else -1)
            path.append("[0]" if sign == "[" else "")
        elif sign in "]}":
            if places:
                places.pop()
                path.pop()
        elif not places:
            continue
        elif sign == ",":
            if places[-1] >= 0:
                places[-1] += 1
                path[-1] = f"[{places[-1]}]"
        elif sign == ":":
            path[-1] = f".{key}"
        elif sign[0] == '"':
            key = sign[1:-1]
