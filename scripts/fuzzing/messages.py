"""Draws protobuf messages by their descriptors, and packs several into one input."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message import Message

from scripts.fuzzing.inputs import mutated

LENGTH = struct.Struct("<I")
NAMES = (
    "",
    "r1",
    "r2",
    "r3",
    "a",
    "b",
    "one",
    "tiny",
    "m",
    "block",
    "jsq",
    "caf\u00e9",
    "x" * 257,
    "\x00",
    "\n",
    "a b",
    "default",
)
FLOATS = (
    0.0,
    -0.0,
    1.0,
    0.5,
    -1.0,
    1e-9,
    1e-320,
    60.0,
    600.0,
    1e6,
    1e30,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
)
WHOLES = (0, 1, 2, 3, 10, 16, 100, 255, 1024, 65535, 10**6, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
BYTES = (b"", b"a", b"\x00" * 8, b"\xff" * 32, b"x" * 65, b"Say hello", b"\xed\xa0\x80")
LIMITS = {
    F.TYPE_INT32: (-(2**31), 2**31 - 1), F.TYPE_SINT32: (-(2**31), 2**31 - 1), F.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
    F.TYPE_INT64: (-(2**63), 2**63 - 1), F.TYPE_SINT64: (-(2**63), 2**63 - 1), F.TYPE_SFIXED64: (-(2**63), 2**63 - 1),
    F.TYPE_UINT32: (0, 2**32 - 1), F.TYPE_FIXED32: (0, 2**32 - 1), F.TYPE_UINT64: (0, 2**64 - 1),
    F.TYPE_FIXED64: (0, 2**64 - 1),
}  # fmt: skip


def message(draw: Random, kind: type[Message], depth: int = 4) -> Message:
    """Draw a message: most fields with values that are often valid."""
    made = kind()
    _fill(draw, made, depth)
    return made


def _fill(draw: Random, made: Message, depth: int) -> None:
    share = draw.choice((0.2, 0.5, 0.8))
    for field in made.DESCRIPTOR.fields:
        if draw.random() > share:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, getattr(made, field.name), field, depth)
        elif field.is_repeated:
            values = getattr(made, field.name)
            for _ in range(draw.choice((0, 1, 1, 2, 3, 20))):
                if field.message_type is not None:
                    if depth:
                        _fill(draw, values.add(), depth - 1)
                else:
                    values.append(_value(draw, field))
        elif field.message_type is not None:
            if depth:
                inner = getattr(made, field.name)
                inner.SetInParent()
                _fill(draw, inner, depth - 1)
        else:
            setattr(made, field.name, _value(draw, field))


def _fill_map(draw: Random, values: Any, field: Any, depth: int) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(draw.choice((0, 1, 2))):
        if value.message_type is None:
            values[_value(draw, key)] = _value(draw, value)
        elif depth:
            _fill(draw, values[_value(draw, key)], depth - 1)


def _value(draw: Random, field: Any) -> Any:
    kind = field.type
    if kind == F.TYPE_BOOL:
        return draw.random() < 0.5
    if kind == F.TYPE_STRING:
        return draw.choice(NAMES) if draw.random() < 0.9 else "".join(chr(draw.randrange(1, 0xD7FF)) for _ in range(5))
    if kind == F.TYPE_BYTES:
        return draw.choice(BYTES)
    if kind in (F.TYPE_DOUBLE, F.TYPE_FLOAT):
        value = draw.choice(FLOATS)
        return value if kind == F.TYPE_DOUBLE or abs(value) < 1e38 else 1.0
    if kind == F.TYPE_ENUM:
        numbers = [one.number for one in field.enum_type.values]
        return draw.choice(numbers) if draw.random() < 0.95 else draw.choice((99, -1, 2**31 - 1))
    low, high = LIMITS[kind]
    value = draw.choice(WHOLES[:11]) if draw.random() < 0.8 else draw.choice(WHOLES)
    return max(low, min(high, -value if low < 0 and draw.random() < 0.2 else value))


def as_wire(draw: Random, made: Message) -> bytes:
    """Write a message, now and then with some bytes changed."""
    data = made.SerializeToString()
    return mutated(draw, data) if draw.random() < 0.15 else data


def packed(messages: Sequence[bytes]) -> bytes:
    """Write messages one after the other, each after its length."""
    return b"".join(LENGTH.pack(len(one)) + one for one in messages)


def unpacked(data: bytes) -> Iterator[bytes]:
    """Read messages; a length beyond the end ends with it."""
    at = 0
    while at + LENGTH.size <= len(data):
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        yield data[at : at + size]
        at += size
