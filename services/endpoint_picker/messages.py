"""Messages of Envoy's external processing protocol, read and written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.struct_pb2 import Struct

from protos.envoy.v3 import external_processor_pb2 as wire
from services.http.headers import Headers

ENDPOINT = "x-gateway-destination-endpoint"
SERVED = f"{ENDPOINT}-served"
SUBSET = f"{ENDPOINT}-subset"
LOAD_BALANCING, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"  # namespaces of metadata

MAX_CHUNK_BYTES = 62_000  # of a body; some proxies take no more than 64 KiB in one message
OVERWRITE = wire.OVERWRITE_IF_EXISTS_OR_ADD

Responses = list[wire.ProcessingResponse]


# Reading.


def headers_in(message: wire.HttpHeaders) -> Headers:
    """Read headers, names in lower case."""
    return [
        (header.key.encode("utf-8", "replace"), header.raw_value or header.value.encode("utf-8", "replace"))
        for header in message.headers.headers
    ]


def subset_in(metadata: wire.Metadata) -> frozenset[str] | None:
    """Read the endpoints among which the proxy lets us choose; None where it lets us choose among all.

    They are a list, or one text with commas; an entry may be an address without a port.
    """
    found = _text_of(metadata, SUBSET_HINT, SUBSET)
    return None if found is None else frozenset(entry.strip() for entry in found if entry.strip())


def served_in(metadata: wire.Metadata) -> str | None:
    """Read the endpoint that has served the request; empty where the metadata do not name it, None without them."""
    if LOAD_BALANCING not in metadata.filter_metadata:
        return None
    found = _text_of(metadata, LOAD_BALANCING, SERVED)
    return found[0].strip() if found else ""


def _text_of(metadata: wire.Metadata, namespace: str, name: str) -> Sequence[str] | None:
    if namespace not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[namespace].fields
    if name not in fields:
        return None
    value = fields[name]
    if value.WhichOneof("kind") == "list_value":
        return [one.string_value for one in value.list_value.values]
    return value.string_value.split(",")


# Writing.


def header_mutation(headers: Iterable[tuple[bytes, bytes]], removed: Iterable[str] = ()) -> wire.HeaderMutation:
    """Write headers that replace those of the same names, and names of headers to remove."""
    return wire.HeaderMutation(
        set_headers=[
            wire.HeaderValueOption(
                header=wire.HeaderValue(key=name.decode("ascii"), raw_value=value), append_action=OVERWRITE
            )
            for name, value in headers
        ],
        remove_headers=removed,
    )


def endpoint_metadata(endpoints: str) -> Struct:
    """Write the chosen endpoints as the proxy's load balancer reads them from metadata."""
    metadata = Struct()
    metadata.fields[LOAD_BALANCING].struct_value.fields[ENDPOINT].string_value = endpoints
    return metadata


def body_chunks(body: bytes, *, end: bool) -> list[wire.CommonResponse]:
    """Cut a body into what goes into one message each; `end`: it is complete with these."""
    starts = range(0, len(body), MAX_CHUNK_BYTES) if body else (0,)
    chunks = []
    for start in starts:
        stop = start + MAX_CHUNK_BYTES
        streamed = wire.StreamedBodyResponse(body=body[start:stop], end_of_stream=end and stop >= len(body))
        chunks.append(wire.CommonResponse(body_mutation=wire.BodyMutation(streamed_response=streamed)))
    return chunks


def request_chunks(body: bytes, *, end: bool) -> Responses:
    """Write the body of a request for a proxy that streams it."""
    return [
        wire.ProcessingResponse(request_body=wire.BodyResponse(response=chunk)) for chunk in body_chunks(body, end=end)
    ]


def response_chunks(body: bytes, *, end: bool) -> Responses:
    """Write a part of a response's body for a proxy that streams it; nothing where there is nothing to say."""
    if not body and not end:
        return []
    return [
        wire.ProcessingResponse(response_body=wire.BodyResponse(response=chunk)) for chunk in body_chunks(body, end=end)
    ]


def immediate(status: int, headers: Headers, body: bytes, details: str) -> wire.ProcessingResponse:
    """Write a reply to the client in place of the engine's."""
    return wire.ProcessingResponse(
        immediate_response=wire.ImmediateResponse(
            status=wire.HttpStatus(code=status), headers=header_mutation(headers), body=body, details=details
        )
    )
