"""API keys of the gateway's clients: compared in constant time, never logged."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from simulator.codec import read_text

BEARER = b"bearer "
LONGEST_KEY = 512


class ApiKeys:
    """The accepted keys by digest, each with the name of its holder."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Read lines of `key` or `name key`; a line that starts with # is a comment."""
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
        """Read a file; one without keys would refuse every client, and is an error."""
        keys = cls(read_text(path).splitlines())
        if not keys:
            raise ValueError(f"api_key_file: {path} holds no keys")
        return keys

    def __len__(self) -> int:
        """Return the number of keys; without any, every client is admitted."""
        return len(self._holders)

    def holder(self, authorization: bytes | None) -> str | None:
        """Return the holder of the key in an Authorization header; None where the key is not known."""
        if authorization is None or authorization[: len(BEARER)].lower() != BEARER:
            return None
        digest = _digest(authorization[len(BEARER) :].strip())
        found = None
        for known, name in self._holders:  # always all of them: the time must not depend on the match
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
