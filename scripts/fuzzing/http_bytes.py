"""Bytes of HTTP requests, many of them wrong, and how they are cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from scripts.fuzzing.bodies import body_of, headers_of

LINES = (
    b"GET / HTTP/1.1", b"POST /v1/completions HTTP/1.1", b"POST /v1/chat/completions HTTP/1.1",
    b"GET /health HTTP/1.1", b"GET /metrics HTTP/1.1", b"GET /v1/models HTTP/1.1", b"OPTIONS * HTTP/1.1",
    b"CONNECT a:1 HTTP/1.1", b"GET / HTTP/1.0", b"PRI * HTTP/2.0", b"GET http://a/health HTTP/1.1",
    b"GET http://a HTTP/1.1", b"GET //health HTTP/1.1", b"GET /" + b"a" * 9000 + b" HTTP/1.1",
    b"GET /%2e%2e/%00?a=b#c HTTP/1.1", b"GET /\xff HTTP/1.1", b"GET  / HTTP/1.1", b"get / HTTP/1.1",
    b"GET / HTTP/9.9", b"GET /", b"", b"\x16\x03\x01\x02\x00", b"HTTP/1.1 200 OK", b"TRACE / HTTP/1.1",
    b"HEAD /health HTTP/1.1", b"QUERY / HTTP/1.1",
)  # fmt: skip
UPGRADE = b"connection: upgrade\r\nupgrade: "
ODD_HEADERS = (
    b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked, identity",
    b"transfer-encoding : chunked", b"content-length: -1", b"content-length: +5", b"content-length: 5, 5",
    b"content-length: 5\r\ncontent-length: 6", b"content-length: 99999999999999999999", b"expect: 100-continue",
    b"expect: x", b"connection: close", UPGRADE + b"h2c",
    UPGRADE + b"websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==", b"a: b\r\n c: d", b": x", b"a",
    b"a\x00b: c", b"a: \x00", b"host:", b"x: " + b"y" * 5000, b"x: y\r\n" * 30 + b"z: z", b"x: \xff",
    b"connection: keep-alive, close, a",
)  # fmt: skip


def chunked(draw: Random, body: bytes) -> bytes:
    """Write a body in chunks, some of them wrong."""
    made, at = b"", 0
    while at < len(body):
        size = draw.choice((1, 7, 100, 5000))
        piece = body[at : at + size]
        written = len(piece) if draw.random() < 0.95 else draw.choice((0, 2**31, 2**64, len(piece) + 1))
        extension = draw.choice((b"", b"", b"", b";a=b", b";" + b"x" * 5000, b" "))
        made += b"%x%s\r\n%s\r\n" % (written, extension, piece)
        at += size
    trailers = draw.choice((b"", b"", b"x-block-priority: 1\r\n", b"a: b\r\n" * 30, b"content-length: 3\r\n"))
    return made + b"0\r\n" + trailers + b"\r\n"


def request_of(draw: Random) -> bytes:
    """Draw one request as bytes."""
    body = body_of(draw, chat=draw.random() < 0.3)[:20_000] if draw.random() < 0.6 else b""
    lines = [draw.choice(LINES) if draw.random() < 0.5 else LINES[1], b"host: a", b"content-type: application/json"]
    lines += [b"%s: %s" % pair for pair in headers_of(draw) if b"\n" not in pair[1]]
    if draw.random() < 0.3:
        lines.append(draw.choice(ODD_HEADERS))
    if body:
        if draw.random() < 0.4:
            lines.append(b"transfer-encoding: chunked")
            body = chunked(draw, body)
        else:
            lines.append(b"content-length: %d" % (len(body) if draw.random() < 0.95 else draw.randrange(2**16)))
    end = b"\r\n" if draw.random() < 0.97 else b"\n"
    return end.join((*lines, b"", b"")) + body


def in_pieces(data: bytes, how: int) -> Iterator[bytes]:
    """Cut bytes: not at all, into single ones at first, or at regular places."""
    if how < 100:
        yield data
        return
    if how < 130:
        for at in range(min(len(data), 64)):
            yield data[at : at + 1]
        if len(data) > 64:
            yield data[64:]
        return
    size = max(1, (how - 129) * 8)
    for at in range(0, len(data), size):
        yield data[at : at + size]
