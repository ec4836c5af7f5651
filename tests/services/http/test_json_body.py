"""JSON from clients: what is too deep, ambiguous or no JSON is refused by its place."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from services.http.errors import ApiError
from services.http.json_body import JsonError, reply_json, request_json


def nested(depth: int, inside: str = "1") -> str:
    """Write lists in lists."""
    return "[" * depth + inside + "]" * depth


REFUSED: list[tuple[str, str, str | None]] = [
    (f'{{"a": {{"b": {nested(3)}}}}}', "json_too_deep", "a.b[0][0]"),
    (f'{{"a": [1, {{"b": {nested(3)}}}]}}', "json_too_deep", "a[1].b[0]"),
    ('{"x": 1, "tools": [{"f": {"p": {"q": 1}}}]}', "json_too_deep", "tools[0].f.p"),
    (f'{{"a": {nested(5000)}}}', "json_too_deep", "a[0][0][0]"),
    ("[" * 100_000, "json_too_deep", None),
    ('{"a": 1, "b": [1, NaN]}', "not_a_number", "b[1]"),
    ('{"a": "NaN", "max_tokens": -Infinity}', "not_a_number", "max_tokens"),
    ('{"a": {"b": Infinity}}', "not_a_number", "a.b"),
    ("NaN", "not_a_number", None),
    ('{"a": 1, "b": 2, "a": 3}', "duplicate_key", "a"),
    ('{"x": {"kv": 1, "kv": null}}', "duplicate_key", "kv"),
]


@pytest.mark.parametrize(("text", "code", "param"), REFUSED)
def test_what_is_refused(text: str, code: str, param: str | None) -> None:
    """Each has its own code, and names its place; at HTTP it is a 400."""
    with pytest.raises(JsonError) as caught:
        request_json(text.encode(), max_depth=4)
    assert (caught.value.code, caught.value.param) == (code, param)
    error = ApiError.of(caught.value)
    assert (error.status, error.code, error.param) == (400, code, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"a": }', b"\xff", b'{"a": "\xed\xa0\x80"}', b'\xef\xbb\xbf{"a": 1}', b"1" * 5000, b'{"a": 01}'],
)
def test_what_is_no_json(body: bytes) -> None:
    """Anything else is a ValueError: no JSON, no UTF-8, a number that is too long."""
    with pytest.raises(ValueError, match="."):
        request_json(body)


@pytest.mark.parametrize(
    "value", [None, 3, "a", [], {}, {"a": [{"b": ["[[[[[", "}}}"]}]}, "\ud800", {"a": 10**300}, {'"': '\\"'}, [[[[]]]]]
)
def test_what_is_read(value: Any) -> None:
    """JSON within the limit is read as it is; brackets in texts are no depth."""
    assert request_json(json.dumps(value).encode(), max_depth=4) == value


def test_long_paths_are_cut_and_found_quickly() -> None:
    """A path is as long as a line allows; a place behind many values is not looked for."""
    with pytest.raises(JsonError) as caught:
        request_json(('{"%s": NaN}' % ("k\u2028" * 500)).encode())
    assert caught.value.param is not None
    assert len(caught.value.param) <= 101
    assert caught.value.param.isprintable()
    body = b"[%sNaN]" % (b"1," * 10**6)
    start_s = time.process_time()
    with pytest.raises(JsonError) as caught:
        request_json(body)
    assert caught.value.param is None
    refused_s = time.process_time() - start_s
    start_s = time.process_time()
    json.loads(body)
    assert refused_s < 5 * (time.process_time() - start_s) + 0.5


def test_deep_replies_are_no_json() -> None:
    """What an engine nests too deeply is a ValueError as well; NaN is read, as engines write it."""
    with pytest.raises(ValueError, match="nested"):
        reply_json(nested(5000))
    assert reply_json(b'{"a": NaN}')["a"] != reply_json(b'{"a": 1}')["a"]
