"""Request facts that a client sends to its engine in `vllm_xargs`, as columns of `layout.REQUEST`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_TEXT = 256  # characters of an id
CLASSES = ("real-time", "best-effort")  # in the order of `layout.REQUEST`'s numbers for them


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"must be a number, not {value!r}") from None


def _positive(value: Any) -> float:
    number = _number(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"must be above 0, not {value!r}")
    return number


def _request_class(value: Any) -> int:
    if value not in CLASSES:
        raise ValueError(f"must be one of {', '.join(CLASSES)}, not {value!r}")
    return CLASSES.index(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {value!r}")
    if len(value) > MAX_TEXT:
        raise ValueError(f"must have at most {MAX_TEXT} characters, not {len(value)}")
    return value


# By its name in `vllm_xargs`: the column that it fills, and how it is read.
FIELDS: dict[str, tuple[str, Callable[[Any], float | str]]] = {
    "block_tag_tokens": ("tag_tokens", _number),
    "block_tag_spread": ("tag_spread", _number),
    "block_ttft_s": ("ttft_slo_s", _positive),
    "block_tpot_s": ("tpot_slo_s", _positive),
    "block_class": ("request_class", _request_class),
    "block_weight": ("weight", _positive),
    "block_client_id": ("client_id", _text),
    "block_session_id": ("session_id", _text),
}


def facts_in(xargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the columns that the arguments fill, for `Writer.put_request`, and what is wrong with the others."""
    columns: dict[str, Any] = {}
    errors: list[str] = []
    for name, (column, read) in FIELDS.items():
        if (value := xargs.get(name)) is not None:
            try:
                columns[column] = read(value)
            except ValueError as error:
                errors.append(f"{name} {error}")
    return columns, errors
