"""Hashes of the content of KV blocks; each stands for all tokens up to the end of its block."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def block_hashes(token_ids: Sequence[int], block_size: int) -> tuple[str, ...]:
    """Hash the full blocks of a prompt, each together with the hash of the block before it, as prefix caches do."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    hashes: list[str] = []
    parent = b""
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hashlib.blake2b(parent + tokens[end - block_size : end].tobytes(), digest_size=16).digest()
        hashes.append(parent.hex())
    return tuple(hashes)
