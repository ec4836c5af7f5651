"""Makes inputs: JSON by a grammar with right and wrong values, and mutations of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

NUMBERS = (
    0, 1, -1, 2, 7, 16, 255, 256, 1024, 65535, 65536, 2**31 - 1, 2**31, 2**32, -(2**31), -(2**31) - 1, 2**53, 2**63 - 1,
    2**63, 2**64, 10**30, 0.0, -0.0, 0.1, 1.5, -0.5, 1e-9, 1e-320, 1e30, 1e308,
)  # fmt: skip
TEXTS = (
    "", "a", "tiny", "Say hello", "null", "NaN", "true", "-1", "1e999", "caf\u00e9", "\u4f60\u597d", "\U0001f600",
    "\ud800", "\udfff\ud800", "\x00", "\n", "\r\n", "\u2028", "\ufeff", "a" * 257, "x y", "../../etc/passwd", "{{7*7}}",
    "%s%n", "\\", '"', "<|im_end|>", "data: [DONE]", "__class__",
)  # fmt: skip
# Pieces of JSON that are no JSON, or that readers take in different ways.
RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x10", "01", "1.", ".5", "+1", "1" * 400, "1" * 5000,
    "[" * 70 + "]" * 70, '{"a":' * 70 + "1" + "}" * 70, "[" * 2000 + "]" * 2000, "[" * 5000, "{", "}", "[", "]",
    "tru", "nul", "'a'", '"\\u12"', '"\\x"', '"', '"\x01"', "//", "/* */", ",", ":", "\ufeff", '{"a":1,"a":2}',
)  # fmt: skip
Values = Mapping[str, Callable[[Random], Any]]


class Raw(str):
    """A text that is written into JSON as it is."""

    __slots__ = ()


def any_json(draw: Random, depth: int = 3) -> Any:
    """Draw a value."""
    kind = draw.randrange(9 if depth else 6)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(TEXTS)
    if kind == 4:
        return draw.choice((None, True, False))
    if kind == 5:
        return Raw(draw.choice(RAW)) if draw.random() < 0.1 else draw.random() * 10 ** draw.randrange(-3, 10)
    if kind == 6:
        return [any_json(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(TEXTS[:8]) or "k": any_json(draw, depth - 1) for _ in range(draw.randrange(4))}


def document(draw: Random, required: Values, optional: Values, wrong: float = 0.15) -> dict[str, Any]:
    """Draw an object with the required fields and some optional ones, each with its own values or others."""
    fields = [name for name in required if draw.random() > wrong / 3]
    fields += draw.sample(list(optional), min(len(optional), draw.randrange(5)))
    known = {**required, **optional}
    made = {name: any_json(draw) if draw.random() < wrong else known[name](draw) for name in fields}
    if draw.random() < wrong / 2:
        made[draw.choice(TEXTS)] = any_json(draw)
    return made


def written(draw: Random, value: Any) -> bytes:
    """Write JSON, now and then in an unusual way."""
    held: list[str] = []

    def hold(one: Any) -> Any:
        if isinstance(one, Raw):
            held.append(one)
            return f"@raw{len(held) - 1}@"
        if isinstance(one, dict):
            return {name: hold(inner) for name, inner in one.items()}
        return [hold(inner) for inner in one] if isinstance(one, list) else one

    text = json.dumps(hold(value), ensure_ascii=draw.random() < 0.5, indent=draw.choice((None, None, None, 1)))
    for number, raw in enumerate(held):
        text = text.replace(f'"@raw{number}@"', raw)
    if draw.random() < 0.03 and text.startswith("{") and len(text) > 2:  # every key twice
        text = f"{text[:-1]},{text[1:]}"
    encoding = "utf-8" if draw.random() < 0.98 else draw.choice(("utf-16", "utf-32", "utf-8-sig", "latin-1"))
    errors = "surrogatepass" if encoding.startswith("utf") else "replace"
    return text.encode(encoding, errors)


# Bytes.

CHUNKS = (
    b"\x00", b"\xff", b"\xff" * 8, b"\r\n", b"\n\n", b"\r\n\r\n", b" ", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\",
    b"0", b"-1", b"1e999", b"NaN", b"null", b"9" * 30, b"A" * 300, b"\xed\xa0\x80", b"\xc0\xaf", b"data: ", b"[DONE]",
)  # fmt: skip


def mutated(draw: Random, data: bytes, others: Sequence[bytes] = (), chunks: Sequence[bytes] = CHUNKS) -> bytes:
    """Change some bytes."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(made) + 1)
        end = min(len(made), at + draw.choice((1, 1, 2, 4, 16, 64)))
        kind = draw.randrange(8)
        if kind == 0:
            made[at:end] = b""
        elif kind == 1:
            made[at:at] = draw.choice(chunks)
        elif kind == 2:
            made[at:end] = draw.choice(chunks)
        elif kind == 3:
            made[at:at] = made[at:end] * draw.choice((1, 2, 50))
        elif kind == 4:
            made[at:end] = draw.randbytes(end - at)
        elif kind == 5 and others:
            other = draw.choice(others)
            first = draw.randrange(len(other) + 1)
            made[at:at] = other[first : first + draw.randrange(1, 200)]
        elif kind == 6:
            del made[at:]
        elif made and at < len(made):
            made[at] ^= 1 << draw.randrange(8)
    return bytes(made[: 2**18])


def halves(data: bytes) -> list[bytes]:
    """List smaller forms of an input, the smallest first, among which one may fail in the same way."""
    found = []
    size = len(data) // 2
    while size:
        found += [data[:at] + data[at + size :] for at in range(0, len(data), size)]
        size //= 2
        if len(found) > 600:
            break
    return found
