"""Names that state files share with others: of requests, and of the contents of KV blocks."""

from __future__ import annotations

import re

# vLLM 0.32: `cmpl-ID-0-1a2b3c4d` for the first prompt of a completion, `chatcmpl-ID-1a2b3c4d` for a chat. ID is the
# client's X-Request-Id, or one that the engine generated; the last part makes it unique.
COMPLETION = re.compile(r"cmpl-(.*)-\d+-[0-9a-f]{8}", re.DOTALL)
CHAT = re.compile(r"chatcmpl-(.*)-[0-9a-f]{8}", re.DOTALL)


def client_id(engine_id: str) -> str:
    """Return the X-Request-Id in an engine's own id; an id of another form is returned unchanged."""
    found = COMPLETION.fullmatch(engine_id) or CHAT.fullmatch(engine_id)
    return found[1] if found else engine_id


def short_hash(digest: bytes) -> int:
    """Return the name of a block's content in state files: the first eight bytes of its hash, and never 0."""
    return int.from_bytes(digest[:8], "little") or 1
