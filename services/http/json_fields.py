"""Fields of JSON bodies: their types and limits checked; errors name the field as the client wrote it.

As everywhere in OpenAI's API, null means that a field is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.http.json_body import MAX_JSON_DEPTH, JsonError, request_json

MAX_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # characters of ids and names


def object_in(body: bytes, max_depth: int = MAX_JSON_DEPTH) -> dict[str, Any]:
    """Parse a body that must be a JSON object."""
    try:
        data = request_json(body, max_depth)
    except JsonError:
        raise
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    return data


def model_in(data: Mapping[str, Any]) -> str:
    """Read the name of the model; empty where there is none."""
    return name_in(data, "model")


def name_in(data: Mapping[str, Any], field: str) -> str:
    """Read a name or an id; empty where there is none."""
    value = data.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{field}: must be a string, not {description_of(value)}")
    if len(value) > LONGEST_NAME:
        raise ValueError(f"{field}: is longer than {LONGEST_NAME} characters")
    return value


def xargs_in(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Read `vllm_xargs`; None without this key."""
    if "vllm_xargs" not in data:
        return None
    xargs = data["vllm_xargs"] or {}
    if not isinstance(xargs, dict):
        raise ValueError(f"vllm_xargs: must be an object, not {description_of(xargs)}")
    return xargs


def flag_in(data: Mapping[str, Any], name: str) -> bool:
    """Read a flag; false where it is absent."""
    value = data.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, not {description_of(value)}")
    return value


def count_in(data: Mapping[str, Any], name: str) -> int | None:
    """Read a number of tokens."""
    value = data.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{name}: must be a whole number, not {description_of(value)}")
    if not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{name}: must lie between 0 and {MAX_TOKENS}, not {value}")
    return value


def signed(value: Any, name: str) -> int | None:
    """Check a whole number of 32 bits."""
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{name}: must be a whole number, not {description_of(value)}")
    return bounded(value, name)


def bounded(value: int, name: str) -> int:
    """Refuse a whole number beyond 32 bits, which engines do."""
    if abs(value) > MAX_TOKENS:
        raise ValueError(f"{name}: must lie between -{MAX_TOKENS} and {MAX_TOKENS}, not {value}")
    return value


def description_of(value: Any) -> str:
    """Describe a JSON value of the wrong type, in short."""
    kinds: dict[type, Callable[[Any], str]] = {
        dict: lambda _: "an object",
        list: lambda _: "a list",
        str: lambda text: repr(text if len(text) <= 40 else text[:40] + "…"),
        type(None): lambda _: "null",
        bool: lambda flag: str(flag).lower(),
    }
    return kinds.get(type(value), repr)(value)


def with_fields(body: bytes, fields: bytes) -> bytes:
    """Add fields, written as JSON, to a body that is an object and not empty; the rest is not read again."""
    inside = body.index(b"{") + 1
    return b"%s%s,%s" % (body[:inside], fields, body[inside:])
