"""The client's side of an HTTP/2 connection, as far as gRPC needs it (RFC 9113): frames, streams and flow control.

Headers are compressed by `hpack`. A message on a stream takes a third of the processor time of grpc.aio, and half of
that of the library h2 (scripts/bench_rpc.py); a scheduler sends and receives one per sidecar and decision.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from hpack import Decoder, HPACKError

from services.rpc.http2_frames import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FIXED_LENGTHS,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    INTERNAL_ERROR,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_BYTES,
    MAX_FRAME_SIZE,
    MAX_STREAM_ID,
    MAX_WINDOW,
    NO_ERROR,
    NUMBER,
    OF_CONNECTION,
    OF_STREAM,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Http2Error,
    LostError,
    frame_of,
    unpadded,
)
from services.security.handshakes import reason_in

Headers = list[tuple[bytes, bytes]]

MAX_HEADER_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 16 * 2**20  # of a stream, that wait for the server's flow control
STREAM_WINDOW = 4 * 2**20
CONNECTION_WINDOW = 16 * 2**20
MAX_UNREAD_ACKS = 1000  # of a server that does not read


class StreamListener(Protocol):
    """Is called with what arrives on a stream."""

    def headers_received(self, headers: Headers) -> None:
        """Take headers, or trailers."""

    def data_received(self, data: bytes) -> None:
        """Take a part of the body."""

    def stream_closed(self, error: Http2Error | None) -> None:
        """Take the end of the stream, which is the last call; None after a regular one."""


@dataclass(slots=True, eq=False)
class Http2Stream:
    """One stream; windows are in bytes."""

    id: int
    listener: StreamListener
    send_window: int
    receive_window: int = STREAM_WINDOW
    has_sent_end: bool = False
    unsent: deque[tuple[bytes, bool]] = field(default_factory=deque)  # data, and whether the stream ends with it
    num_unsent_bytes: int = 0


class Http2Connection(asyncio.Protocol):
    """Streams over one connection.

    `on_ready` is called when the server has sent its settings; `on_end` once, with the reason, when no more streams can
    be opened, while those that are open may continue.
    """

    def __init__(self, on_ready: Callable[[], None], on_end: Callable[[str], None]) -> None:
        """Wait for the transport."""
        self.is_ready = False
        self.is_open = True  # new streams may be opened
        self.received_s = 0.0  # when bytes of the server last arrived
        self._on_ready = on_ready
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._closing: asyncio.Transport | None = None  # after our end of the connection
        self._has_closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder()
        self._streams: dict[int, Http2Stream] = {}
        self._next_id = 1
        self._rest = b""  # of a frame that has not arrived whole
        self._block: tuple[int, int, bytes] | None = None  # stream, flags and headers without their end
        self._send_window = DEFAULT_WINDOW
        self._receive_window = CONNECTION_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._max_streams = MAX_STREAM_ID
        self._num_unread_acks = 0
        self._is_paused = False
        self._takes: dict[int, Callable[[int, int, bytes], None]] = {
            DATA: self._take_data,
            HEADERS: self._take_headers,
            RST_STREAM: self._take_reset,
            SETTINGS: self._take_settings,
            PUSH_PROMISE: self._take_push,
            PING: self._take_ping,
            GOAWAY: self._take_going_away,
            WINDOW_UPDATE: self._take_window,
            CONTINUATION: self._take_continuation,
        }

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface and our settings."""
        self._transport = transport = cast("asyncio.Transport", transport)
        settings = SETTING.pack(ENABLE_PUSH, 0) + SETTING.pack(INITIAL_WINDOW_SIZE, STREAM_WINDOW)
        transport.write(
            PREFACE + frame_of(SETTINGS, 0, 0, settings)
            + frame_of(WINDOW_UPDATE, 0, 0, NUMBER.pack(CONNECTION_WINDOW - DEFAULT_WINDOW))
        )  # fmt: skip

    def connection_lost(self, error: Exception | None) -> None:
        """End all streams."""
        self._has_closed.set()
        self._lose(LostError(f"connection lost: {reason_in(error)}" if error else "connection closed by the server"))

    def pause_writing(self) -> None:
        """Count what is written to a server that does not read."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Write without counting."""
        self._is_paused = False
        self._num_unread_acks = 0

    def data_received(self, data: bytes) -> None:
        """Take the frames in it."""
        if self._transport is None:
            return
        self.received_s = self._loop.time()
        if self._rest:
            data = self._rest + data
        start, size = 0, len(data)
        try:
            while size - start >= FRAME.size:
                high, low, kind, flags, stream_id = FRAME.unpack_from(data, start)
                length = high << 8 | low
                if length > MAX_FRAME_BYTES:
                    raise Http2Error(FRAME_SIZE_ERROR, f"the server sent a frame of {length} bytes")
                end = start + FRAME.size + length
                if end > size:
                    break
                self._take_frame(kind, flags, stream_id & MAX_STREAM_ID, data[start + FRAME.size : end])
                if self._transport is None:
                    return
                start = end
        except Http2Error as error:
            self._fail(error)
            return
        self._rest = data[start:]

    # Streams.

    def num_streams(self) -> int:
        """Return how many streams are open."""
        return len(self._streams)

    def open_stream(self, headers: bytes, listener: StreamListener) -> Http2Stream:
        """Open a stream with a compressed header block; Http2Error where the server allows no more."""
        if not self.is_open or self._transport is None:
            raise LostError("the connection is closed")
        if len(self._streams) >= self._max_streams:
            raise Http2Error(REFUSED_STREAM, f"the server allows {self._max_streams} streams")
        if len(headers) > MAX_FRAME_BYTES:
            raise Http2Error(INTERNAL_ERROR, f"the headers have {len(headers)} bytes")
        stream = self._streams[self._next_id] = Http2Stream(self._next_id, listener, self._initial_window)
        self._next_id += 2
        self._transport.write(frame_of(HEADERS, END_HEADERS, stream.id, headers))
        if self._next_id > MAX_STREAM_ID:
            self._stop_opening("all stream numbers are used")
        return stream

    def send(self, stream: Http2Stream, data: bytes, *, end: bool = False) -> None:
        """Send data; what exceeds the server's window waits. Http2Error where too much waits."""
        size = len(data)
        if not size and not end:
            return  # some servers refuse an empty frame while the window is below 0
        if not stream.unsent and size <= min(stream.send_window, self._send_window, self._max_frame_bytes):
            assert self._transport is not None
            stream.send_window -= size
            self._send_window -= size
            stream.has_sent_end |= end
            self._transport.write(frame_of(DATA, END_STREAM if end else 0, stream.id, data))
            return
        if stream.num_unsent_bytes + size > MAX_UNSENT_BYTES:
            raise Http2Error(ENHANCE_YOUR_CALM, f"{stream.num_unsent_bytes} bytes wait for the server")
        stream.unsent.append((data, end))
        stream.num_unsent_bytes += size
        self._send_waiting(stream)

    def reset(self, stream: Http2Stream, code: int = CANCEL) -> None:
        """End a stream now, without a call to its listener."""
        if self._streams.pop(stream.id, None) is not None and self._transport is not None:
            self._transport.write(frame_of(RST_STREAM, 0, stream.id, NUMBER.pack(code)))
            self._close_if_done()

    def ping(self) -> None:
        """Have the server answer."""
        if self._transport is not None:
            self._transport.write(frame_of(PING, 0, 0, bytes(8)))

    def abort(self, reason: str) -> None:
        """Close the connection now; streams end with LostError."""
        self._fail(LostError(reason))

    async def closed(self, within_s: float) -> None:
        """Wait until the transport of an aborted connection is closed: with TLS, until the server has replied."""
        if self._closing is None:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._has_closed.wait()
        except TimeoutError:
            self._closing.abort()

    def _send_waiting(self, stream: Http2Stream) -> None:
        assert self._transport is not None
        while stream.unsent:
            data, end = stream.unsent[0]
            size = max(0, min(len(data), stream.send_window, self._send_window, self._max_frame_bytes))
            if not size and data:
                return
            stream.send_window -= size
            self._send_window -= size
            stream.num_unsent_bytes -= size
            is_last = end and size == len(data)
            stream.has_sent_end |= is_last
            if size == len(data):
                stream.unsent.popleft()
            else:
                stream.unsent[0] = (data[size:], end)
            self._transport.write(frame_of(DATA, END_STREAM if is_last else 0, stream.id, data[:size]))

    # Frames.

    def _take_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self.is_ready and kind != SETTINGS:
            raise Http2Error(PROTOCOL_ERROR, "the server does not speak HTTP/2")
        if self._block is not None and (kind != CONTINUATION or stream_id != self._block[0]):
            raise Http2Error(PROTOCOL_ERROR, "headers without an end")
        if kind in FIXED_LENGTHS and len(payload) != FIXED_LENGTHS[kind]:
            raise Http2Error(FRAME_SIZE_ERROR, f"frame of type {kind} with {len(payload)} bytes")
        if kind in OF_STREAM:
            if not stream_id & 1 or (stream_id >= self._next_id and kind != PRIORITY):
                raise Http2Error(PROTOCOL_ERROR, f"frame of type {kind} on stream {stream_id}, which was never opened")
        elif kind in OF_CONNECTION and stream_id:
            raise Http2Error(PROTOCOL_ERROR, f"frame of type {kind} on stream {stream_id}")
        if (take := self._takes.get(kind)) is not None:  # others are to be ignored
            take(flags, stream_id, payload)

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)  # with its padding
        self._receive_window -= size
        if self._receive_window < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "more data than the connection's window")
        if self._receive_window < CONNECTION_WINDOW // 2:
            self._acknowledge(frame_of(WINDOW_UPDATE, 0, 0, NUMBER.pack(CONNECTION_WINDOW - self._receive_window)))
            self._receive_window = CONNECTION_WINDOW
        stream = self._streams.get(stream_id)
        if stream is None:  # it was reset, which the server did not know yet
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "more data than the stream's window")
        if stream.receive_window < STREAM_WINDOW // 2 and not flags & END_STREAM:
            update = STREAM_WINDOW - stream.receive_window
            self._acknowledge(frame_of(WINDOW_UPDATE, 0, stream_id, NUMBER.pack(update)))
            stream.receive_window = STREAM_WINDOW
        stream.listener.data_received(unpadded(payload) if flags & PADDED else payload)
        if flags & END_STREAM:
            self._end(stream_id, None)

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < FIXED_LENGTHS[PRIORITY]:
                raise Http2Error(FRAME_SIZE_ERROR, "headers that are shorter than their priority")
            payload = payload[FIXED_LENGTHS[PRIORITY] :]
        self._block = (stream_id, flags, b"")
        self._take_continuation(flags, stream_id, payload)

    def _take_continuation(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(PROTOCOL_ERROR, "a continuation of no headers")
        stream_id, first_flags, block = self._block
        block += payload
        if len(block) > MAX_HEADER_BYTES:
            raise Http2Error(ENHANCE_YOUR_CALM, "headers that are too long")
        if not flags & END_HEADERS:
            self._block = (stream_id, first_flags, block)
            return
        self._block = None
        try:
            headers = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except HPACKError as error:
            raise Http2Error(COMPRESSION_ERROR, f"headers that cannot be expanded: {error}") from None
        if (stream := self._streams.get(stream_id)) is not None:
            stream.listener.headers_received(headers)
            if first_flags & END_STREAM:
                self._end(stream_id, None)

    def _take_settings(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if flags & ACK:
            if payload:
                raise Http2Error(FRAME_SIZE_ERROR, "an acknowledgement of settings with a content")
            return
        if len(payload) % SETTING.size:
            raise Http2Error(FRAME_SIZE_ERROR, "settings of a wrong length")
        for name, value in SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise Http2Error(FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
                for stream in self._streams.values():
                    stream.send_window += value - self._initial_window
                self._initial_window = value
            elif name == MAX_FRAME_SIZE:
                if not MAX_FRAME_BYTES <= value < 2**24:
                    raise Http2Error(PROTOCOL_ERROR, f"frames of {value} bytes")
                self._max_frame_bytes = value
            elif name == MAX_CONCURRENT_STREAMS:
                self._max_streams = value
        self._acknowledge(frame_of(SETTINGS, ACK, 0, b""))
        if not self.is_ready:
            self.is_ready = True
            self._on_ready()
        self._send_all_waiting()

    def _take_reset(self, _flags: int, stream_id: int, payload: bytes) -> None:
        code = NUMBER.unpack(payload)[0]
        self._end(stream_id, Http2Error(code, f"the server reset the stream with code {code}"))

    def _take_ping(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if not flags & ACK:
            self._acknowledge(frame_of(PING, ACK, 0, payload))

    def _take_push(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise Http2Error(PROTOCOL_ERROR, "the server pushed, which is switched off")

    def _take_window(self, _flags: int, stream_id: int, payload: bytes) -> None:
        increment = NUMBER.unpack(payload)[0] & MAX_WINDOW
        if stream_id == 0:
            self._send_window += increment
            if not increment or self._send_window > MAX_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR, "the connection's window cannot grow so")
            self._send_all_waiting()
        elif (stream := self._streams.get(stream_id)) is not None:
            stream.send_window += increment
            if not increment or stream.send_window > MAX_WINDOW:
                self.reset(stream, FLOW_CONTROL_ERROR)
                stream.listener.stream_closed(Http2Error(FLOW_CONTROL_ERROR, "the stream's window cannot grow so"))
            elif stream.unsent:
                self._send_waiting(stream)

    def _send_all_waiting(self) -> None:
        for stream in list(self._streams.values()):
            if stream.unsent:
                self._send_waiting(stream)

    def _take_going_away(self, _flags: int, _stream_id: int, payload: bytes) -> None:
        if len(payload) < 2 * NUMBER.size:
            raise Http2Error(FRAME_SIZE_ERROR, "a GOAWAY that is too short")
        last_id, code = NUMBER.unpack_from(payload)[0] & MAX_STREAM_ID, NUMBER.unpack_from(payload, NUMBER.size)[0]
        reason = f"the server closes the connection with code {code}"
        self._stop_opening(reason)
        for stream_id in [one for one in self._streams if one > last_id]:
            self._end(stream_id, Http2Error(REFUSED_STREAM, reason))
        self._close_if_done()

    # The end.

    def _acknowledge(self, frame: bytes) -> None:
        assert self._transport is not None
        if self._is_paused:
            self._num_unread_acks += 1
            if self._num_unread_acks > MAX_UNREAD_ACKS:
                raise Http2Error(ENHANCE_YOUR_CALM, "the server sends pings or settings, and does not read the replies")
        self._transport.write(frame)

    def _end(self, stream_id: int, error: Http2Error | None) -> None:
        """End a stream that the server has ended; the server need not wait for the rest of our data."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if error is None and not stream.has_sent_end:
            self.reset(stream, NO_ERROR)
        else:
            del self._streams[stream_id]
        stream.listener.stream_closed(error)
        self._close_if_done()

    def _stop_opening(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self._on_end(reason)

    def _close_if_done(self) -> None:
        if not self.is_open and not self._streams and self._transport is not None:
            self._transport.close()

    def _fail(self, error: Http2Error) -> None:
        """Close the connection because of an error."""
        if (transport := self._transport) is not None:
            code = NO_ERROR if isinstance(error, LostError) else error.code
            transport.write(frame_of(GOAWAY, 0, 0, NUMBER.pack(0) + NUMBER.pack(code)))
            self._lose(LostError(str(error)))
            self._closing = transport
            transport.close() if not self._is_paused else transport.abort()

    def _lose(self, error: LostError) -> None:
        self._transport = None
        self._stop_opening(str(error))
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.listener.stream_closed(error)
