"""Who may come in: API keys, compared in constant time, never logged."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from simulator.codec import read_text

BEARER = b"bearer "
LONGEST_KEY = 512


class ApiKeys:
    """The keys, by digest, each with the name of who holds it."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Read lines of `key` or `name key`; what begins with # is a comment."""
        self._holders: list[tuple[bytes, str]] = []
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2 or len(words[-1]) > LONGEST_KEY:
                raise ValueError(f"api_keys: line {number} must be a key, or a name and a key")
            name = words[0] if len(words) == 2 else f"key-{number}"
            self._holders.append((_digest(words[-1].encode()), name))

    @classmethod
    def from_file(cls, path: str) -> ApiKeys:
        """Read a file; one without keys would let nobody in, and is refused."""
        keys = cls(read_text(path).splitlines())
        if not keys:
            raise ValueError(f"api_key_file: {path} holds no keys")
        return keys

    def __len__(self) -> int:
        """How many there are; none means that everybody may come in."""
        return len(self._holders)

    def holder(self, authorization: bytes | None) -> str | None:
        """Name the holder of the key in an Authorization header; None where it is nobody's."""
        if authorization is None or authorization[: len(BEARER)].lower() != BEARER:
            return None
        digest = _digest(authorization[len(BEARER) :].strip())
        found = None
        for known, name in self._holders:  # all of them, whichever matches
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
