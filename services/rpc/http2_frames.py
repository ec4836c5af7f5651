"""Frames, settings and error codes of HTTP/2 (RFC 9113)."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
FIXED_LENGTHS = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
OF_CONNECTION = frozenset((SETTINGS, PING, GOAWAY))
OF_STREAM = frozenset((DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION))

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED = range(6)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM = range(6, 12)
INADEQUATE_SECURITY = 12

ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 2, 3, 4, 5

FRAME = struct.Struct(">HBBBL")
SETTING = struct.Struct(">HL")
NUMBER = struct.Struct(">L")

MAX_FRAME_BYTES = 16_384  # that we accept; servers may accept more, which small messages do not need
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
MAX_STREAM_ID = 2**31 - 1


class Http2Error(ConnectionError):
    """A stream or the connection failed, with an error code of HTTP/2."""

    def __init__(self, code: int, reason: str) -> None:
        """Keep the code."""
        super().__init__(reason)
        self.code = code


class LostError(Http2Error):
    """The connection ended."""

    def __init__(self, reason: str) -> None:
        """Take what is known about its end."""
        super().__init__(CANCEL, reason)


def frame_of(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return a frame as it is sent."""
    return FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream_id) + payload


def unpadded(payload: bytes) -> bytes:
    """Return what a padded frame carries."""
    if not payload or payload[0] >= len(payload):
        raise Http2Error(PROTOCOL_ERROR, "padding that is longer than its frame")
    return payload[1 : len(payload) - payload[0]]
