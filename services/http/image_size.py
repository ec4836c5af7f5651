"""The size of an image, read from its first bytes: PNG, JPEG, GIF and WebP."""

from __future__ import annotations

Size = tuple[int, int]

MAX_HEAD_BYTES = 256 * 1024  # of an image that are read; JPEG may have metadata before its size
MAX_SEGMENTS = 256
# Markers of JPEG that begin a frame, and have its size; and those without a length.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
ALONE = frozenset((0x01, *range(0xD0, 0xD9)))


def image_size(head: bytes) -> Size | None:
    """Return the width and the height in pixels; None where they cannot be read."""
    size = None
    if head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR" and len(head) >= 24:
        size = _big(head, 16), _big(head, 20)
    elif head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        size = _little(head, 6, 2), _little(head, 8, 2)
    elif head[:2] == b"\xff\xd8":
        size = _jpeg(head)
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) >= 30:
        size = _webp(head)
    return size if size is not None and min(size) > 0 else None


def _jpeg(head: bytes) -> Size | None:
    at = 2
    for _ in range(MAX_SEGMENTS):
        while at < len(head) and head[at] == 0xFF and at + 1 < len(head) and head[at + 1] == 0xFF:
            at += 1  # padding
        if at + 4 > len(head) or head[at] != 0xFF:
            return None
        marker = head[at + 1]
        if marker in ALONE:
            at += 2
            continue
        if marker in FRAMES:
            return (_big(head, at + 7, 2), _big(head, at + 5, 2)) if at + 9 <= len(head) else None
        at += 2 + _big(head, at + 2, 2)
    return None


def _webp(head: bytes) -> Size | None:
    kind = head[12:16]
    if kind == b"VP8X":
        return 1 + _little(head, 24, 3), 1 + _little(head, 27, 3)
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = _little(head, 21, 4)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        return _little(head, 26, 2) & 0x3FFF, _little(head, 28, 2) & 0x3FFF
    return None


def _big(data: bytes, at: int, size: int = 4) -> int:
    return int.from_bytes(data[at : at + size], "big")


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
