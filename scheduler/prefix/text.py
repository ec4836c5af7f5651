"""Names for blocks of text, for where nobody knows the tokens."""

from __future__ import annotations

import hashlib

BLOCK_BYTES = 256  # about 64 tokens of English


def text_blocks(text: bytes, block_bytes: int = BLOCK_BYTES) -> tuple[bytes, ...]:
    """Name the full blocks of a prompt's text, each together with all before, as prefix caches do with tokens."""
    digest = hashlib.blake2b(digest_size=16)
    names = []
    for end in range(block_bytes, len(text) + 1, block_bytes):
        digest.update(text[end - block_bytes : end])
        names.append(digest.copy().digest())
    return tuple(names)
