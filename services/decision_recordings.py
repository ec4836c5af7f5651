"""Recordings of schedulers: their decisions, and their requests for the simulator.

`services/placement/decision_recorder.py` defines the lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from predictor.lengths import Tag
from predictor.request import RequestFacts
from protos.block.v1 import common_pb2

EVENTS = ("decision", "outcome")


def is_recording(path: str) -> bool:
    """Tell whether a file is a recording, by its first line."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            first = json.loads(file.readline() or "null")
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and first.get("event") in EVENTS


def decisions_in(path: str) -> Iterator[common_pb2.Decision]:
    """Yield all decisions of a recording, the older file first."""
    for place, line in _lines(path):
        if line["event"] == "decision":
            yield _parsed(place, line.get("decision"), common_pb2.Decision())


def requests_in(path: str, *, block_size: int | None = None) -> list[RequestFacts]:
    """Return the requests of a recording by arrival, with their tags, and with their lengths where they completed.

    A request with several decisions counts once. Arrivals are relative to the first one. Prefixes are kept where their
    blocks have `block_size` tokens, if that is given.
    """
    messages: dict[str, common_pb2.Request] = {}
    arrived: dict[str, float] = {}
    lengths: dict[str, int] = {}
    for place, line in _lines(path):
        if line["event"] == "outcome":
            outcome = _parsed(place, line.get("outcome"), common_pb2.Outcome())
            ended = outcome.finish_reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
            if ended and outcome.output_tokens:
                lengths[outcome.request_id] = outcome.output_tokens
            continue
        request = _parsed(place, line.get("request"), common_pb2.Request())
        decision = _parsed(place, line.get("decision"), common_pb2.Decision())
        if not request.request_id or request.prompt_tokens < 1:
            raise ValueError(f"{place}: request: has no request_id or no prompt_tokens")
        messages.setdefault(request.request_id, request)
        arrived.setdefault(request.request_id, decision.decided_unix_s - request.waited_s)
    first_s = min(arrived.values(), default=0.0)
    requests = [
        _request(request, arrived[name] - first_s, lengths.get(name), block_size) for name, request in messages.items()
    ]
    return sorted(requests, key=lambda one: one.arrival_s)


def _request(
    message: common_pb2.Request, arrival_s: float, output_tokens: int | None, block_size: int | None
) -> RequestFacts:
    tag = None
    if message.HasField("tag") and message.tag.median_tokens > 0:
        tag = Tag(median_tokens=message.tag.median_tokens, spread=message.tag.spread)
    known = message.output_tokens if message.HasField("output_tokens") else None
    if known is None and message.ignore_eos and message.HasField("max_tokens"):
        known = message.max_tokens
    has_names = block_size is None or message.prefix_block_tokens == block_size
    return RequestFacts(
        request_id=message.request_id,
        prompt_tokens=message.prompt_tokens,
        output_tokens=output_tokens or known,
        tag=tag,
        arrival_s=max(0.0, arrival_s),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        priority=message.priority,
        prefix_hashes=tuple(bytes(one).hex() for one in message.prefix_hashes) if has_names else (),
    )


def _lines(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the lines of the older file and of the newer one; an incomplete last line, left by a crash, is skipped."""
    files = [one for one in (Path(f"{path}.1"), Path(path)) if one.exists()]
    if not files:
        raise ValueError(f"{path}: no such file")
    for file in files:
        with file.open("rb") as opened:
            for number, raw in enumerate(opened, 1):
                place = f"{file}:{number}"
                try:
                    line = json.loads(raw)
                except (ValueError, RecursionError):
                    if not raw.endswith(b"\n"):
                        break
                    raise ValueError(f"{place}: is not JSON") from None
                if not isinstance(line, dict) or line.get("event") not in EVENTS:
                    raise ValueError(f"{place}: event: must be one of {', '.join(EVENTS)}")
                yield place, line


def _parsed(place: str, value: Any, message: Any) -> Any:
    try:
        return ParseDict(value if isinstance(value, dict) else {}, message, ignore_unknown_fields=True)
    except ParseError as error:
        raise ValueError(f"{place}: {error}") from None
