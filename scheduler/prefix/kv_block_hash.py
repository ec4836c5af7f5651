"""Hashes of KV blocks as vLLM computes them, so that a prompt can be looked up in the prefix cache of an engine."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

from predictor.request import EncoderInput

SEED = "vllm-none-hash"  # of engines without PYTHONHASHSEED


def kv_block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    seed: str = SEED,
    *,
    adapter: tuple[str, str] | None = None,
    images: Sequence[EncoderInput] = (),
) -> list[bytes]:
    """Return the hashes of the full blocks of a prompt; each covers all blocks before it.

    vLLM 0.32: `hash_block_tokens` in vllm/v1/core/kv_cache_utils.py, `--prefix-caching-hash-algo sha256`, which is its
    default. A LoRA `adapter` (name and path) and images change the hashes; so do cache salts, which are left out.
    """
    parent: bytes | None = None
    hashes: list[bytes] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        start = end - block_size
        keys: list[tuple[Any, ...]] = [] if adapter is None else [("lora", *adapter)]
        keys += [
            ("mm", one.identity, one.position - start)
            for one in images
            if one.position < end and one.position + one.tokens > start
        ]
        parent = next_block_hash(parent, token_ids[start:end], tuple(keys) or None, seed=seed)
        hashes.append(parent)
    return hashes


def next_block_hash(
    parent: bytes | None, token_ids: Sequence[int], extra_keys: object = None, *, seed: str = SEED
) -> bytes:
    """Return the hash of the block after `parent`, None for the first; `extra_keys` name adapters, images or salt."""
    return _hash((_hash(seed) if parent is None else parent, tuple(token_ids), extra_keys))


def _hash(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
