"""One HTTP request and its response, as the messages of a proxy's stream tell them; without I/O.

What is answered when depends on the proxy's mode, which its first message has (`protocol_config`):

- FULL_DUPLEX_STREAMED: the headers are answered when the whole body is there, and the body is sent back in pieces.
- BUFFERED: the proxy waits for the answer to the headers before it shows the body; the answer to the body has the
  endpoint.
- NONE: the endpoint is chosen by the headers alone; so it is in STREAMED and BUFFERED_PARTIAL, where the headers are on
  their way before the body is whole.
"""

from __future__ import annotations

import time
from dataclasses import replace

from protos.envoy.v3 import external_processor_pb2 as wire
from services.endpoint_picker import conformance
from services.endpoint_picker.messages import (
    Responses,
    endpoint_metadata,
    header_mutation,
    headers_in,
    immediate,
    request_chunks,
    response_chunks,
    served_in,
    subset_in,
)
from services.endpoint_picker.model_names import ModelNames
from services.endpoint_picker.picking import HttpRequest, Pick, Picker
from services.http.endpoints import errors_of
from services.http.error_shape import PLAIN_ERRORS
from services.http.errors import ApiError
from services.http.headers import Headers
from services.http.proxying import is_event_stream

NONE, BUFFERED = wire.BODY_SEND_MODE_NONE, wire.BODY_SEND_MODE_BUFFERED
FULL_DUPLEX = wire.BODY_SEND_MODE_FULL_DUPLEX_STREAMED


class Exchange:
    """Takes the messages of one stream in turn; `receive` returns what to send back.

    Where it returns None, the request is whole: `place` has the rest.
    """

    def __init__(self, picker: Picker) -> None:
        """Wait for the headers of the request."""
        self._picker = picker
        self._settings = picker.settings
        self._request_mode, self._response_mode = FULL_DUPLEX, FULL_DUPLEX
        self._request: HttpRequest | None = None
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._has_body = False  # that is shown before the choice
        self._is_waiting_for_body = False
        self._has_trailers = False
        self._pick: Pick | None = None
        self._is_over = False  # the client got a reply of ours, or nothing may be answered
        self._names: ModelNames | None = None  # to be replaced in the response

    def receive(self, message: wire.ProcessingRequest) -> Responses | None:
        """Take a message; return the messages to send, or None where `place` is to be called."""
        if message.observability_mode or self._is_over:
            return []
        kind = message.WhichOneof("request")
        if kind == "response_body":
            return self._response_body(message.response_body)
        if kind == "request_headers":
            return self._request_headers(message)
        if kind == "request_body":
            return self._request_body(message.request_body)
        if kind == "response_headers":
            return self._response_headers(message)
        if kind == "request_trailers":
            return self._request_trailers()
        if kind == "response_trailers":
            return self._response_trailers()
        raise ValueError("request: is missing, or of a kind that is not known")

    def close(self) -> None:
        """Take the end of the stream; without the end of the response, the client has left."""
        if self._pick is not None:
            self._picker.ended(self._pick, is_shown=self._response_mode != NONE)

    # The request.

    def _request_headers(self, message: wire.ProcessingRequest) -> Responses | None:
        if self._request is not None:
            raise ValueError("request_headers: have been sent before")
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._request_mode, self._response_mode = config.request_body_mode, config.response_body_mode
        shown = message.request_headers
        self._has_body = not shown.end_of_stream and self._request_mode in (FULL_DUPLEX, BUFFERED)
        self._request = HttpRequest(
            headers=headers_in(shown),
            body=b"" if shown.end_of_stream else None,
            subset=subset_in(message.metadata_context),
            arrived_s=time.monotonic(),
            arrived_unix_s=time.time(),
        )
        if not self._has_body:
            return None
        self._is_waiting_for_body = True
        if self._request_mode == BUFFERED:
            return [wire.ProcessingResponse(request_headers=wire.HeadersResponse())]
        return []

    def _request_body(self, shown: wire.HttpBody) -> Responses | None:
        if not self._is_waiting_for_body:
            return [wire.ProcessingResponse(request_body=wire.BodyResponse())]
        self._num_bytes += len(shown.body)
        if self._num_bytes > self._settings.max_body_bytes:
            limit = self._settings.max_body_bytes
            return self._refused(ApiError(413, f"the body is larger than {limit} bytes"))
        if shown.body:
            self._pieces.append(shown.body)
        is_whole = shown.end_of_stream or shown.end_of_stream_without_message or self._request_mode == BUFFERED
        if not is_whole:
            return []
        self._take_whole()
        return None

    def _request_trailers(self) -> Responses | None:
        if not self._is_waiting_for_body:
            return [wire.ProcessingResponse(request_trailers=wire.TrailersResponse())]
        self._has_trailers = True
        self._take_whole()
        return None

    def _take_whole(self) -> None:
        assert self._request is not None
        self._is_waiting_for_body = False
        self._request = replace(self._request, body=b"".join(self._pieces))
        self._pieces = []

    async def place(self) -> Responses:
        """Choose the endpoints of the request; return the messages that say so."""
        request = self._request
        assert request is not None
        try:
            self._pick = pick = await self._picker.pick(request)
        except ApiError as error:
            return self._refused(error)
        if pick.models is not None:
            of_client, of_engine = pick.models
            self._names = ModelNames(of_client=of_client, of_engine=of_engine)
        responses = self._chosen(pick, request)
        self._request, pick.body = replace(request, body=None), None  # a response may take minutes
        return responses

    def _chosen(self, pick: Pick, request: HttpRequest) -> Responses:
        common = wire.CommonResponse(
            header_mutation=header_mutation(pick.set_headers, pick.removed_headers), clear_route_cache=True
        )
        metadata = endpoint_metadata(pick.destination)
        if self._has_body and self._request_mode == BUFFERED:
            if pick.body is not None:
                common.body_mutation.body = pick.body
                length = header_mutation([(b"content-length", b"%d" % len(pick.body))])
                common.header_mutation.MergeFrom(length)
            return [wire.ProcessingResponse(request_body=wire.BodyResponse(response=common), dynamic_metadata=metadata)]
        responses = [
            wire.ProcessingResponse(request_headers=wire.HeadersResponse(response=common), dynamic_metadata=metadata)
        ]
        if self._has_body:
            assert request.body is not None
            responses += request_chunks(request.body if pick.body is None else pick.body, end=not self._has_trailers)
        if self._has_trailers:
            responses.append(wire.ProcessingResponse(request_trailers=wire.TrailersResponse()))
        return responses

    def _refused(self, error: ApiError) -> Responses:
        """Have the proxy reply by itself, which ends the stream."""
        self._is_over = True
        self._pieces = []
        shape = PLAIN_ERRORS if self._request is None else errors_of(self._request.path)
        return [immediate(error.status, error.headers(), shape.body(error), "endpoint_picker")]

    # The response.

    def _response_headers(self, message: wire.ProcessingRequest) -> Responses:
        shown, pick = message.response_headers, self._pick
        headers = headers_in(shown)
        added: Headers = []
        if pick is not None:
            status = next((value for name, value in headers if name == b":status"), b"")
            served = served_in(message.metadata_context)
            self._picker.metrics.responses.labels(status.decode("latin-1")).inc()
            added += pick.response_headers
            if pick.reader is not None:
                code = int(status) if status.isdigit() else 0
                pick.reader.started(code, served, is_stream=is_event_stream(headers))
            if self._settings.conformance_pool:
                pool = self._settings.conformance_pool
                added += conformance.response_headers(pool, pick.destination, served)
        if shown.end_of_stream:
            self._response_ended()
        removed = ["content-length"] if self._names is not None and self._response_mode != NONE else []
        common = wire.CommonResponse(header_mutation=header_mutation(added, removed))
        return [wire.ProcessingResponse(response_headers=wire.HeadersResponse(response=common))]

    def _response_body(self, shown: wire.HttpBody) -> Responses:
        piece, end = shown.body, shown.end_of_stream or shown.end_of_stream_without_message
        reader = None if self._pick is None else self._pick.reader
        if reader is not None:
            reader.received(piece)
        if self._names is not None:
            piece = self._names.replaced(piece, end=end or self._response_mode == BUFFERED)
        if end:
            self._response_ended()
        if self._response_mode == FULL_DUPLEX:
            return response_chunks(piece, end=end)
        common = wire.CommonResponse()
        if piece != shown.body:
            common.body_mutation.body = piece
        return [wire.ProcessingResponse(response_body=wire.BodyResponse(response=common))]

    def _response_trailers(self) -> Responses:
        rest: Responses = []
        if self._names is not None and self._response_mode == FULL_DUPLEX:
            rest = response_chunks(self._names.replaced(b"", end=True), end=False)
        self._response_ended()
        return [*rest, wire.ProcessingResponse(response_trailers=wire.TrailersResponse())]

    def _response_ended(self) -> None:
        if self._pick is not None and self._pick.reader is not None:
            self._pick.reader.ended()
