"""Names of KV blocks as vLLM gives them, so that a prompt can be looked up in an engine's prefix cache from outside."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

SEED = "vllm-none-hash"  # where engines have no PYTHONHASHSEED


def kv_block_hashes(token_ids: Sequence[int], block_size: int, seed: str = SEED) -> list[bytes]:
    """Name the full blocks of a prompt, each together with all before it.

    vLLM 0.32: `hash_block_tokens` in vllm/v1/core/kv_cache_utils.py, `--prefix-caching-hash-algo sha256`, which is its
    default. Adapters, images and cache salts make other names, which nobody can know from tokens alone.
    """
    name, names = _hashed(seed), []
    for end in range(block_size, len(token_ids) + 1, block_size):
        name = _hashed((name, tuple(token_ids[end - block_size : end]), None))
        names.append(name)
    return names


def _hashed(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
