"""Headers, and the head of a request that is written with them."""

from __future__ import annotations

from services.http.origin import Origin

Headers = list[tuple[bytes, bytes]]  # names in lower case


def request_head(method: bytes, origin: Origin, target: bytes, headers: Headers, length: int) -> bytes:
    """Write the head of a request with a body of `length` bytes."""
    lines = [method, b" ", origin.prefix.encode(), target, b" HTTP/1.1\r\nhost: ", origin.host_header, b"\r\n"]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"content-length: %d\r\n\r\n" % length)
    return b"".join(lines)
