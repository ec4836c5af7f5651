"""Blocks are named as vLLM names them."""

from __future__ import annotations

from scheduler.prefix.kv_block_hash import SEED, kv_block_hashes

# Given by vLLM 0.32's own `hash_block_tokens` with `sha256`.
THEIRS = (
    "a9eda94cb2b9926a507582d73b61c7177a750e4855d59f53b6e87f97dce99826",
    "1d26ff7f2dd3c379776bf5ed4100d76c2178e14090bf5bbe586d02da174b3ac8",
)


def test_names_are_vllms() -> None:
    """Each name stands for its block and all before; what does not fill a block has none."""
    ids = [1, 2, 300, 70_000] * 8
    assert [name.hex() for name in kv_block_hashes(ids, 16)] == list(THEIRS)
    assert kv_block_hashes([*ids, 5, 6], 16) == kv_block_hashes(ids, 16)
    assert kv_block_hashes(ids[:15], 16) == []
    other = kv_block_hashes([*ids[:16], 9, *ids[17:]], 16)
    assert other[0].hex() == THEIRS[0]
    assert other[1].hex() != THEIRS[1]
    assert kv_block_hashes(ids, 16, "0") != kv_block_hashes(ids, 16, SEED)
