"""A collector of traces: an OTLP server that keeps the spans it receives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """The spans so far, each with the name of the service that it is of."""

    def __init__(self) -> None:
        """Start without any."""
        self.spans: list[tuple[str, Any]] = []
        self.url = ""

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802, ARG002 - the wire names it
        """Take spans."""
        for resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names.get("service.name", ""), span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> Any:
        """The only span of a name."""
        (found,) = (span for _, span in self.spans if span.name == name)
        return found


@contextmanager
def collecting() -> Iterator[OtlpCollector]:
    """Serve OTLP over gRPC on any free port while the block runs."""
    collector = OtlpCollector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)


def attributes_of(span: Any) -> dict[str, Any]:
    """The attributes of a span as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
