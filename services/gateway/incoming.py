"""A request as it came in: a message for schedulers, bytes for engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.block.v1 import common_pb2
from services.gateway.request_headers import RequestHeaders
from services.http.client import Headers
from services.http.headers import REQUEST_ID, without_hops
from services.http.openai_body import OpenAIRequest

AUTHORIZATION = b"authorization"
OURS = frozenset((b"accept-encoding", REQUEST_ID))  # answers are read, and named by us


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request that has been read and let in."""

    arrived_s: float  # monotonic
    ask: OpenAIRequest
    request: common_pb2.Request  # under a name that no other has that is under way
    target: bytes  # path and query
    headers: Headers  # to pass on
    body: bytes  # likewise
    explain: bool = False  # say in the reply what the decision rests on


def request_message(
    ask: OpenAIRequest, wishes: RequestHeaders, *, request_id: str, client_id: str, prompt_tokens: int
) -> common_pb2.Request:
    """Write a request down for schedulers."""
    return common_pb2.Request(
        request_id=request_id,
        model=ask.model,
        prompt_tokens=prompt_tokens,
        max_tokens=ask.max_tokens,
        min_tokens=ask.min_tokens,
        ignore_eos=ask.ignore_eos,
        expected_output_tokens=ask.expected_tokens,
        priority=priority_of(ask, wishes),
        request_class=wishes.request_class,
        slo=wishes.slo,
        session_id=wishes.session_id,
        client_id=client_id or wishes.fairness_id,
    )


def priority_of(ask: OpenAIRequest, wishes: RequestHeaders) -> int:
    """Choose among the body's priority, the header's and a hint's, in this order; lower runs first."""
    given = (ask.priority, wishes.priority, ask.hinted_priority)
    return next((priority for priority in given if priority is not None), 0)


def body_to_pass(body: bytes, ask: OpenAIRequest, priority: int) -> bytes:
    """Give the engine the body as it came; a priority from elsewhere goes in front, for the engine to heed it."""
    if ask.priority is not None or priority == 0:
        return body
    inside = body.index(b"{") + 1
    return b'%s"priority":%d,%s' % (body[:inside], priority, body[inside:])


def target_of(scope: Mapping[str, Any]) -> bytes:
    """Give path and query."""
    query: bytes = scope["query_string"]
    path: bytes = scope["path"].encode()  # one of our endpoints, however it was spelt
    return path + b"?" + query if query else path


def headers_to_pass(headers: Headers, request_id: str, *, with_authorization: bool) -> Headers:
    """Leave out what is between the client and us."""
    passed = without_hops(headers, OURS)
    if not with_authorization:
        passed = [pair for pair in passed if pair[0] != AUTHORIZATION]
    passed.append((REQUEST_ID, request_id.encode()))
    return passed
