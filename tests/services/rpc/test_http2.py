"""The HTTP/2 connection beside the library h2 as its server, which refuses whatever the protocol does not allow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.rpc.grpc_call import header_block
from services.rpc.http2 import (
    CONNECTION_WINDOW,
    MAX_UNREAD_ACKS,
    MAX_UNSENT_BYTES,
    STREAM_WINDOW,
    Headers,
    Http2Connection,
)
from services.rpc.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME,
    GOAWAY,
    HEADERS,
    NUMBER,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Error,
    LostError,
)

BLOCK = header_block("/block.v1.Predictor/Predict", "127.0.0.1:1")
HEAD = [(":status", "200"), ("content-type", "application/grpc")]
TRAILERS = [("grpc-status", "0"), ("grpc-message", "fine")]


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        """Keep it."""
        self.written += data

    def close(self) -> None:
        """Note it."""
        self.is_closed = True

    def abort(self) -> None:
        """Note it."""
        self.is_closed = True

    def taken(self) -> bytes:
        """Return what was written since."""
        written, self.written = bytes(self.written), bytearray()
        return written


class Listener:
    """Keeps what arrives on a stream."""

    def __init__(self) -> None:
        self.headers: list[Headers] = []
        self.data = bytearray()
        self.ends: list[Http2Error | None] = []

    def headers_received(self, headers: Headers) -> None:
        """Keep them."""
        assert not self.ends
        self.headers.append(headers)

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        assert not self.ends
        self.data += data

    def stream_closed(self, error: Http2Error | None) -> None:
        """Keep it."""
        self.ends.append(error)


class Pair:
    """A connection, and h2 as its server; `cut` says where the server's bytes are cut."""

    def __init__(self, cut: int = 1 << 30, **options: int) -> None:
        self.ready: list[None] = []
        self.reasons: list[str] = []
        self.connection = Http2Connection(lambda: self.ready.append(None), self.reasons.append)
        self.transport = Transport()
        self.server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.events: list[h2.events.Event] = []
        self._cut = cut
        self.server.initiate_connection()
        self.connection.connection_made(self.transport)
        self.exchange()
        self.server.update_settings({h2.settings.SettingCodes[name]: value for name, value in options.items()})
        self.exchange()

    def exchange(self) -> list[h2.events.Event]:
        """Pass on all bytes both ways until there are none; return what the server saw."""
        seen = []
        while (sent := self.transport.taken()) or (returned := self.server.data_to_send()):
            if sent:
                seen += self.server.receive_data(sent)
                continue
            for start in range(0, len(returned), self._cut):
                self.connection.data_received(returned[start : start + self._cut])
        self.events += seen
        return seen

    def received(self, stream_id: int) -> bytes:
        """Return what the server has received on a stream."""
        return b"".join(
            one.data for one in self.events if isinstance(one, h2.events.DataReceived) and one.stream_id == stream_id
        )

    def acknowledge(self) -> None:
        """Give back the windows for all that the server has received."""
        for one in self.events:
            if isinstance(one, h2.events.DataReceived) and one.flow_controlled_length:
                self.server.acknowledge_received_data(one.flow_controlled_length, one.stream_id)
                one.flow_controlled_length = 0


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    """A running loop, for its clock."""
    running = asyncio.new_event_loop()
    asyncio._set_running_loop(running)
    yield
    asyncio._set_running_loop(None)
    running.close()


@pytest.mark.parametrize("cut", [1, 7, 1 << 30])
def test_a_call_there_and_back(cut: int) -> None:
    """Headers, data and trailers arrive both ways, wherever the bytes are cut."""
    pair, listener = Pair(cut), Listener()
    assert pair.ready == [None]
    stream = pair.connection.open_stream(BLOCK, listener)
    pair.connection.send(stream, b"request", end=True)
    request, *_ = pair.exchange()
    assert isinstance(request, h2.events.RequestReceived)
    assert dict(request.headers)[":path"] == "/block.v1.Predictor/Predict"
    assert pair.received(stream.id) == b"request"
    pair.server.send_headers(stream.id, HEAD)
    pair.server.send_data(stream.id, b"response")
    pair.server.send_data(stream.id, b"padded", pad_length=9)
    pair.server.send_headers(stream.id, TRAILERS, end_stream=True)
    pair.exchange()
    assert [dict(one) for one in listener.headers] == [
        {name.encode(): value.encode() for name, value in each} for each in (HEAD, TRAILERS)
    ]
    assert (bytes(listener.data), listener.ends) == (b"responsepadded", [None])
    assert pair.connection.num_streams() == 0


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_order_of_any_sizes(data: st.DataObject) -> None:  # noqa: PLR0915 - one script of all operations
    """Streams in any order, with data of any size both ways and changing windows, carry the same bytes to both ends."""
    window = data.draw(st.sampled_from([1, 100, 65_535, 10**6]))
    cut = data.draw(st.sampled_from([1, 13, 1000, 1 << 30]))
    pair = Pair(cut, INITIAL_WINDOW_SIZE=window)
    streams: dict[int, tuple[Any, Listener]] = {}
    sent: dict[int, bytes] = {}
    returned: dict[int, bytes] = {}
    sizes = st.sampled_from([0, 1, 5, 100] if cut < 100 or window < 100 else [0, 5, 16_384, 16_385, 70_000])
    for number in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["open", "send", "return", "end", "reset", "ping", "window", "ack"]))
        if what == "open" or not streams:
            listener = Listener()
            stream = pair.connection.open_stream(BLOCK, listener)
            streams[stream.id], sent[stream.id], returned[stream.id] = (stream, listener), b"", b""
            pair.exchange()
            pair.server.send_headers(stream.id, HEAD)
            continue
        stream, listener = streams[data.draw(st.sampled_from(sorted(streams)))]
        payload = bytes([number]) * data.draw(sizes)
        match what:
            case "send":
                pair.connection.send(stream, payload)
                sent[stream.id] += payload
            case "return":
                room = pair.server.local_flow_control_window(stream.id)
                for start in range(0, min(room, len(payload)), 16_384):
                    part = payload[start : start + min(16_384, room - start)]
                    pair.server.send_data(stream.id, part)
                    returned[stream.id] += part
            case "end":
                pair.server.send_headers(stream.id, TRAILERS, end_stream=True)
                pair.exchange()
                assert listener.ends == [None]
                assert listener.data == returned[stream.id]
                del streams[stream.id]
            case "reset":
                pair.connection.reset(stream)
                assert listener.ends == []
                del streams[stream.id]
            case "ping":
                pair.server.ping(b"12345678")
            case "window":
                window = data.draw(st.sampled_from([0, 50, 65_535, 10**6]))
                pair.server.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        pair.exchange()
        if what == "ack":
            pair.acknowledge()
            pair.exchange()
    pair.server.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 24})
    pair.exchange()
    pair.server.increment_flow_control_window(1 << 24)
    pair.exchange()
    for stream_id, (_, listener) in streams.items():
        assert pair.received(stream_id) == sent[stream_id]
        assert listener.data == returned[stream_id]
    pair.connection.abort("over")
    assert all(isinstance(one.ends[0], LostError) and len(one.ends) == 1 for _, one in streams.values())
    assert pair.reasons == ["over"]


def test_the_windows_are_given_back() -> None:
    """A server may send much more than a window, as long as it is read."""
    pair, listener = Pair(), Listener()
    stream = pair.connection.open_stream(BLOCK, listener)
    pair.exchange()
    pair.server.send_headers(stream.id, HEAD)
    total = 0
    while total < 3 * CONNECTION_WINDOW:
        size = min(16_384, pair.server.local_flow_control_window(stream.id))
        assert size > 0
        pair.server.send_data(stream.id, bytes(size))
        total += size
        pair.exchange()
    assert len(listener.data) == total


def test_data_of_streams_that_were_reset_count_for_the_connection() -> None:
    """Otherwise the connection would stop after many cancelled calls."""
    pair = Pair()
    for _ in range(3 * CONNECTION_WINDOW // 65_535):
        stream = pair.connection.open_stream(BLOCK, Listener())
        pair.exchange()
        pair.server.send_headers(stream.id, HEAD)
        for _ in range(4):
            pair.server.send_data(stream.id, bytes(16_000))
        late = pair.server.data_to_send()
        pair.connection.reset(stream)
        pair.connection.data_received(late)
        pair.exchange()
    assert pair.server.outbound_flow_control_window > CONNECTION_WINDOW // 4


def test_a_server_that_ends_first_need_not_read_the_rest() -> None:
    """Its trailers end the stream, and ours is closed without an error."""
    pair, listener = Pair(), Listener()
    stream = pair.connection.open_stream(BLOCK, listener)
    pair.connection.send(stream, b"one of many")
    pair.exchange()
    pair.server.send_headers(stream.id, HEAD)
    pair.server.send_headers(stream.id, TRAILERS, end_stream=True)
    pair.exchange()
    assert listener.ends == [None]
    assert any(isinstance(one, h2.events.StreamReset) and one.error_code == 0 for one in pair.events)


def test_a_server_that_goes_away_finishes_what_it_has() -> None:
    """Streams that it knows continue, later ones are refused, and the connection closes after the last."""
    pair, known, late = Pair(), Listener(), Listener()
    first = pair.connection.open_stream(BLOCK, known)
    pair.exchange()
    pair.connection.open_stream(BLOCK, late)
    pair.connection.data_received(frame(GOAWAY, 0, 0, NUMBER.pack(first.id) + NUMBER.pack(0)))
    assert len(pair.reasons) == 1
    assert isinstance(late.ends[0], Http2Error)
    assert late.ends[0].code == REFUSED_STREAM
    with pytest.raises(LostError):
        pair.connection.open_stream(BLOCK, Listener())
    assert not pair.transport.is_closed
    pair.connection.data_received(frame(HEADERS, END_HEADERS | END_STREAM, first.id, b"\x88"))
    assert known.ends == [None]
    assert pair.transport.is_closed


def test_a_limit_of_streams_is_kept() -> None:
    """The server's limit refuses a stream, until another one ends."""
    pair = Pair(MAX_CONCURRENT_STREAMS=1)
    first = pair.connection.open_stream(BLOCK, Listener())
    with pytest.raises(Http2Error, match="allows 1 streams"):
        pair.connection.open_stream(BLOCK, Listener())
    pair.connection.reset(first)
    pair.connection.open_stream(BLOCK, Listener())


def test_what_waits_for_the_server_is_bounded() -> None:
    """A server that gives no window back fails the stream before memory does."""
    pair = Pair()
    stream = pair.connection.open_stream(BLOCK, Listener())
    with pytest.raises(Http2Error, match="wait for the server"):
        for _ in range(2 * MAX_UNSENT_BYTES // 2**20):
            pair.connection.send(stream, bytes(2**20))


def test_a_server_that_asks_and_does_not_read_is_left() -> None:
    """Answers to pings are not kept without bound."""
    pair = Pair()
    pair.connection.pause_writing()
    for _ in range(MAX_UNREAD_ACKS):
        pair.connection.data_received(frame(PING, 0, 0, bytes(8)))
    assert not pair.transport.is_closed
    pair.connection.data_received(frame(PING, 0, 0, bytes(8)))
    assert pair.transport.is_closed


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Write a frame, whatever it says."""
    return FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream_id) + payload


OPEN = 1  # the number of the stream that is open in the tests below


@pytest.mark.parametrize(
    "wrong",
    [
        frame(DATA, 0, 0, b"x"),
        frame(DATA, 0, 3, b"x"),
        frame(DATA, 0, 2, b"x"),
        frame(DATA, PADDED, OPEN, b"\x05abc"),
        frame(DATA, PADDED, OPEN, b""),
        frame(HEADERS, END_HEADERS, OPEN, b"\xff\xff\xff\xff\xff\xff"),
        frame(HEADERS, END_HEADERS | 0x20, OPEN, b"ab"),
        frame(HEADERS, 0, OPEN, b"\x88") + frame(PING, 0, 0, bytes(8)),
        frame(CONTINUATION, END_HEADERS, OPEN, b"\x88"),
        frame(HEADERS, 0, OPEN, b"") + 5 * frame(CONTINUATION, 0, OPEN, bytes(16_384)),
        frame(PRIORITY, 0, OPEN, b"1234"),
        frame(RST_STREAM, 0, OPEN, b"123"),
        frame(SETTINGS, 0, OPEN, b""),
        frame(SETTINGS, 0, 0, b"12345"),
        frame(SETTINGS, 1, 0, b"123456"),
        frame(SETTINGS, 0, 0, b"\x00\x04\xff\xff\xff\xff"),
        frame(SETTINGS, 0, 0, b"\x00\x05\x00\x00\x00\x01"),
        frame(PUSH_PROMISE, END_HEADERS, OPEN, b"\x00\x00\x00\x02\x88"),
        frame(PING, 0, 0, b"1"),
        frame(GOAWAY, 0, 0, b"1234"),
        frame(WINDOW_UPDATE, 0, 0, bytes(4)),
        frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
        FRAME.pack(0xFFFF, 0, DATA, 0, OPEN),
        b"".join(frame(DATA, 0, OPEN, bytes(16_384)) for _ in range(9)) + b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_a_wrong_frame_ends_the_connection(wrong: bytes) -> None:
    """Its streams end with one error each, and nothing is raised to the event loop."""
    pair, listener = Pair(), Listener()
    pair.connection.open_stream(BLOCK, listener)
    pair.connection.data_received(wrong)
    assert pair.transport.is_closed
    assert [type(one) for one in listener.ends] == [LostError]
    assert len(pair.reasons) == 1
    pair.connection.data_received(b"more")
    pair.connection.connection_lost(None)
    assert len(listener.ends) == 1


@pytest.mark.parametrize("increment", [0, 2**31 - 1])
def test_a_window_that_cannot_be_ends_its_stream_only(increment: int) -> None:
    """The connection goes on."""
    pair, listener = Pair(), Listener()
    pair.connection.open_stream(BLOCK, listener)
    pair.connection.data_received(frame(WINDOW_UPDATE, 0, OPEN, NUMBER.pack(increment)))
    assert listener.ends[0] is not None
    assert listener.ends[0].code == FLOW_CONTROL_ERROR
    pair.connection.open_stream(BLOCK, Listener())


def test_more_than_the_window_is_refused() -> None:
    """A server that ignores flow control cannot fill the memory."""
    pair, listener = Pair(), Listener()
    pair.connection.open_stream(BLOCK, listener)
    stream = pair.connection._streams[OPEN]
    stream.receive_window = 10  # as if it had been used up
    pair.connection.data_received(frame(DATA, 0, OPEN, bytes(11)))
    assert isinstance(listener.ends[0], LostError)
    assert STREAM_WINDOW < CONNECTION_WINDOW


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                frame,
                st.integers(0, 12),
                st.integers(0, 255),
                st.sampled_from([0, 1, 1, 2, 3, 5]),
                st.one_of(st.binary(max_size=30), st.sampled_from([b"\x88", bytes(4), bytes(8), bytes(6)])),
            ),
        ),
        max_size=12,
    ),
    st.integers(1, 50),
)
def test_garbage_never_raises_and_ends_each_stream_at_most_once(pieces: Sequence[bytes], cut: int) -> None:
    """Whatever a server sends, wherever it is cut."""
    pair, listeners = Pair(), [Listener(), Listener()]
    for one in listeners:
        pair.connection.open_stream(BLOCK, one)
    garbage = b"".join(pieces)
    for start in range(0, len(garbage), cut):
        pair.connection.data_received(garbage[start : start + cut])
    pair.connection.connection_lost(None)
    assert all(len(one.ends) == 1 for one in listeners)
    assert len(pair.reasons) == 1
