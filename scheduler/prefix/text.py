"""Names of blocks of text, for prompts whose tokens are unknown."""

from __future__ import annotations

import hashlib

BLOCK_BYTES = 256  # about 64 tokens of English


def text_blocks(text: bytes, block_bytes: int = BLOCK_BYTES, *, adapter: str = "") -> tuple[bytes, ...]:
    """Return the names of the full blocks of a text; each covers all blocks before it, as in prefix caches.

    The KV of a LoRA adapter differs from that of the base model.
    """
    digest = hashlib.blake2b(
        digest_size=16, key=hashlib.blake2b(adapter.encode(), digest_size=16).digest() if adapter else b""
    )
    names = []
    for end in range(block_bytes, len(text) + 1, block_bytes):
        digest.update(text[end - block_bytes : end])
        names.append(digest.copy().digest())
    return tuple(names)
