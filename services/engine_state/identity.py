"""What a client called the request that an engine shows."""

from __future__ import annotations

import re

# vLLM 0.32: `cmpl-ID-0-1a2b3c4d` for the first prompt of a completion, `chatcmpl-ID-1a2b3c4d` for a chat. ID is the
# client's X-Request-Id, or one that the engine made up; the last part keeps two of the same apart.
COMPLETION = re.compile(r"cmpl-(.*)-\d+-[0-9a-f]{8}", re.DOTALL)
CHAT = re.compile(r"chatcmpl-(.*)-[0-9a-f]{8}", re.DOTALL)


def client_id(engine_id: str) -> str:
    """Recover the X-Request-Id from an engine's own id; an id of another form is its own."""
    found = COMPLETION.fullmatch(engine_id) or CHAT.fullmatch(engine_id)
    return found[1] if found else engine_id


def short_hash(digest: bytes) -> int:
    """Name a block's content as state files do: by the first eight bytes of its hash, and never 0."""
    return int.from_bytes(digest[:8], "little") or 1
