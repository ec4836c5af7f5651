"""Recordings of schedulers: their decisions, and their requests for the simulator.

`services/placement/decision_recorder.py` defines the lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from predictor.lengths import Tag
from predictor.request import RequestFacts
from predictor.request_group import PromptFacts, group_of, members_of
from protos.block.v1 import common_pb2
from services.rpc.json_form import message_from
from services.rpc.request_groups import num_responses_of
from simulator.progress import followed

EVENTS = ("decision", "outcome")
COMPLETED = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


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


Placed = tuple[RequestFacts, common_pb2.Decision, common_pb2.Outcome | None]


def placed_requests(path: str, *, block_size: int | None = None) -> Iterator[Placed]:
    """Yield each request of a recording once: its facts, its last decision, and how it ended, if that was recorded.

    Prefixes are kept where their blocks have `block_size` tokens, if that is given.
    """
    requests, decisions, outcomes = _recorded(path)
    for name, request in requests.items():
        facts = _request(request, 0.0, None, block_size)
        facts = replace(facts, model=request.model, client_id=request.client_id)
        yield facts, decisions[name][-1], outcomes.get(name)


def outcomes_in(path: str) -> Iterator[common_pb2.Outcome]:
    """Yield all outcomes of a recording, the older file first."""
    for place, line in _lines(path):
        if line["event"] == "outcome":
            yield _parsed(place, line.get("outcome"), common_pb2.Outcome())


def placements_in(path: str) -> Iterator[tuple[common_pb2.Request, common_pb2.Decision]]:
    """Yield all requests of a recording with the decisions about them, the older file first."""
    for place, line in _lines(path):
        if line["event"] == "decision":
            request = _parsed(place, line.get("request"), common_pb2.Request())
            yield request, _parsed(place, line.get("decision"), common_pb2.Decision())


def requests_in(path: str, *, block_size: int | None = None) -> list[RequestFacts]:
    """Return the requests of a recording by arrival, with their tags, and with their lengths where they completed.

    A request with several decisions counts once, and one with several responses as the requests that engines make of
    it, with their mean length. Arrivals are relative to the first one. Prefixes are kept where their blocks have
    `block_size` tokens, if that is given.
    """
    requests, decisions, outcomes = _recorded(path)
    arrived = {name: decisions[name][0].decided_unix_s - request.waited_s for name, request in requests.items()}
    lengths = {name: outcome.output_tokens for name, outcome in outcomes.items() if outcome.finish_reason in COMPLETED}
    first_s = min(arrived.values(), default=0.0)
    facts = [
        member
        for name, request in requests.items()
        for member in _members(request, arrived[name] - first_s, lengths.get(name) or None, block_size)
    ]
    return sorted(facts, key=lambda one: one.arrival_s)


def _recorded(
    path: str,
) -> tuple[dict[str, common_pb2.Request], dict[str, list[common_pb2.Decision]], dict[str, common_pb2.Outcome]]:
    """Return requests, their decisions, and their last outcomes, by the requests' ids."""
    requests: dict[str, common_pb2.Request] = {}
    decisions: dict[str, list[common_pb2.Decision]] = {}
    outcomes: dict[str, common_pb2.Outcome] = {}
    for place, line in _lines(path):
        if line["event"] == "outcome":
            outcome = _parsed(place, line.get("outcome"), common_pb2.Outcome())
            if outcome.finish_reason in COMPLETED or outcome.request_id not in outcomes:
                outcomes[outcome.request_id] = outcome
            continue
        request, decision = _placed(place, line)
        requests.setdefault(request.request_id, request)
        decisions.setdefault(request.request_id, []).append(decision)
    return requests, decisions, outcomes


def _placed(place: str, line: Mapping[str, Any]) -> tuple[common_pb2.Request, common_pb2.Decision]:
    request = _parsed(place, line.get("request"), common_pb2.Request())
    if not request.request_id or request.prompt_tokens < 1:
        raise ValueError(f"{place}: request: has no request_id or no prompt_tokens")
    return request, _parsed(place, line.get("decision"), common_pb2.Decision())


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


def _members(
    message: common_pb2.Request, arrival_s: float, output_tokens: int | None, block_size: int | None
) -> tuple[RequestFacts, ...]:
    """Return the engine's requests for a recorded one."""
    num = num_responses_of(message)
    if num == 1:
        return (_request(message, arrival_s, output_tokens, block_size),)
    each = None if output_tokens is None else max(1, round(output_tokens / num))
    group = group_of(
        _request(message, arrival_s, each, block_size),
        num_sequences=message.num_sequences or 1,
        prompts=[PromptFacts(tokens=max(1, prompt.prompt_tokens)) for prompt in message.prompts],
        block_size=block_size or 0,
    )
    return members_of(group)


def _lines(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the lines of the older file and of the newer one; an incomplete last line, left by a crash, is skipped."""
    files = [one for one in (Path(f"{path}.1"), Path(path)) if one.exists()]
    if not files:
        raise ValueError(f"{path}: no such file")
    for file in files:
        with file.open("rb") as opened:
            num_bytes = file.stat().st_size
            for number, raw in enumerate(followed(opened, f"reading {file.name}", num_bytes, size=len), 1):
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
        return message_from(value if isinstance(value, dict) else {}, message)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
