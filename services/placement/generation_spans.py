"""The spans of Generate: that of the call, and those of its legs, which engines' own spans are below."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from protos.block.v1 import common_pb2
from services.http.headers import Headers
from services.http.openai_body import OpenAIRequest
from services.http.origin import origin_of
from services.http.trace_context import TRACEPARENT, TRACESTATE
from services.placement.generation_tracker import GenerationTracker
from services.placement.upstream_engine import EngineRequest
from services.rpc.errors import status_of
from services.tracing.request_spans import RequestSpans

if TYPE_CHECKING:
    from services.tracing.spans import ActiveSpan, RequestTracer

CANCELLED = "CANCELLED"
LEFT = (asyncio.CancelledError, GeneratorExit)  # how a call ends whose caller has left


class GenerationSpans:
    """The spans of one call of Generate; without a tracer, and where it is not sampled, there are none."""

    def __init__(
        self,
        tracer: RequestTracer | None,
        metadata: Iterable[tuple[str, str | bytes]],
        ask: OpenAIRequest,
        request: common_pb2.Request,
        *,
        arrived_unix_s: float,
    ) -> None:
        """Start the span of a call, below that of its caller."""
        own = (TRACEPARENT.decode(), TRACESTATE.decode())
        headers: Headers = [(name.encode(), bytes_of(value)) for name, value in metadata if name in own]
        self.request = RequestSpans(tracer, headers, ask, request, arrived_unix_s)
        self._headers = self.request.headers_from(headers)

    @contextmanager
    def recorded(self, method: str) -> Iterator[None]:
        """End the span of the call with the block, by how the block ends."""
        error = ""
        self.request.set({"rpc.system.name": "grpc", "rpc.method": method})
        try:
            yield
        except LEFT:
            error = CANCELLED
            raise
        except Exception as failure:
            error = status_of(failure).grpc_code.name
            raise
        finally:
            self.request.end(error)

    def leg(self, name: str, instance: common_pb2.Instance, policy: str) -> ActiveSpan | None:
        """Start the span of a leg on an instance."""
        if not self.request.is_recorded:
            return None
        origin = origin_of(instance.engine_url)
        return self.request.leg(name, origin, instance_id=instance.instance_id, policy=policy)

    def traced(self, request: EngineRequest, leg: ActiveSpan | None) -> EngineRequest:
        """Return the request for an engine with the headers of its trace."""
        headers = self.request.headers_below(leg, self._headers)
        return replace(request, trace_headers=tuple(headers)) if headers else request


@contextmanager
def answer_recorded(leg: ActiveSpan | None, tracker: GenerationTracker) -> Iterator[None]:
    """End the span of a leg with the block, by how its answer ends."""
    if leg is None:
        yield
        return
    error = ""
    try:
        yield
    except LEFT:
        error = CANCELLED
        raise
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        leg.set({"block.output_tokens": tracker.num_tokens})
        if tracker.hand_over_s is not None:
            leg.set({"block.hand_over_ms": tracker.hand_over_s * 1e3})
        leg.end(error)


def bytes_of(value: str | bytes) -> bytes:
    """Return the value of an item of metadata as bytes."""
    return value.encode("ascii", "replace") if isinstance(value, str) else value
