"""A client's request as the gateway keeps it, and what it passes on to engines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from protos.block.v1 import common_pb2
from services.http.application import REQUEST_ID
from services.http.continued_request import continued_request
from services.http.endpoints import ENDPOINTS, EngineEndpoint
from services.http.engine_arguments import LONG_WAIT_S
from services.http.headers import Headers
from services.http.openai_body import OpenAIRequest
from services.http.proxying import without_hops
from services.http.request_facts import body_to_pass
from services.http.stream_continuation import Continuation
from services.rpc.objectives import with_objective
from services.security.access import KEY_HEADERS
from services.security.usage_limits import NOT_METERED, MeteredRequest
from services.tracing.request_spans import RequestSpans

NOT_PASSED = frozenset((b"accept-encoding", REQUEST_ID))  # the gateway reads responses, and names requests itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request that has been read and admitted."""

    arrived_s: float  # monotonic
    endpoint: EngineEndpoint
    openai: OpenAIRequest
    request: common_pb2.Request  # its request_id is unique among those under way
    target: bytes  # path and query
    spans: RequestSpans
    headers: Headers  # for the engine
    own_body: bytes  # as the client sent it
    client_body: bytes  # with what the gateway asks for in its place
    body: bytes  # for the engine
    usage: MeteredRequest = NOT_METERED  # by the limits of its key
    explain: bool = False  # whether the reply explains the decision
    owner: str = ""  # the tenant of the key, where keys are set
    hides_token_ids: bool = False  # the gateway asks for token ids, and the client did not
    passes_priority: bool = True  # to the engine, where the body has none

    def body_for(self, decision: common_pb2.Decision | None) -> bytes:
        """Return the body for the engine of a decision, which may have changed what the request asks for."""
        waited_s = time.monotonic() - self.arrived_s
        request = self.request
        if decision is not None and decision.HasField("objective"):
            request = with_objective(request, decision.objective)
        elif waited_s < LONG_WAIT_S or not request.slo.HasField("ttft_s"):
            return self.body
        return body_to_pass(self.client_body, self.openai, request, waited_s, passes_priority=self.passes_priority)


def target_of(scope: Mapping[str, Any]) -> bytes:
    """Return path and query."""
    query: bytes = scope["query_string"]
    path: bytes = scope["path"].encode()  # one of the gateway's routes, however it was escaped
    return path + b"?" + query if query else path


def headers_to_pass(headers: Headers, request_id: str, *, with_keys: bool) -> Headers:
    """Return the headers for the engine."""
    passed = without_hops(headers, NOT_PASSED)
    if not with_keys:
        passed = [pair for pair in passed if pair[0] not in KEY_HEADERS]
    passed.append((REQUEST_ID, request_id.encode()))
    return passed


# A request that continues a stream.


def continued(incoming: Incoming, rest: Continuation, *, number: int, tag: common_pb2.Tag | None) -> Incoming:
    """Return the request for the rest of an answer, whose whole length is predicted by `tag`."""
    now_s = time.monotonic()
    endpoint = ENDPOINTS[rest.path.decode()]
    openai = endpoint.read(rest.body, b"")
    elapsed_s = now_s - incoming.arrived_s
    request = continued_request(incoming.request, rest, number=number, elapsed_s=elapsed_s, tag=tag)
    headers = [pair for pair in incoming.headers if pair[0] != REQUEST_ID]
    _, _, query = incoming.target.partition(b"?")
    return replace(
        incoming,
        arrived_s=now_s,
        openai=openai,
        request=request,
        target=rest.path + (b"?" + query if query else b""),
        headers=[*headers, (REQUEST_ID, request.request_id.encode())],
        own_body=rest.body,
        client_body=rest.body,
        body=body_to_pass(rest.body, openai, request, passes_priority=incoming.passes_priority),
        endpoint=endpoint,
    )
