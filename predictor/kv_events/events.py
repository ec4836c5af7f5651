"""KV events as values: an engine has stored or removed blocks in its prefix cache, or has cleared it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

GPU = "GPU"  # the medium of blocks that prefix hits need no copy for; others are off-loading tiers
EngineHash = bytes | int  # of a block and all blocks before it, as the engine names it
ExtraKeys = tuple[Hashable, ...] | None  # adapter, images and salt, which are parts of a block's hash


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Consecutive blocks of one sequence became available for prefix hits; each is one more copy.

    `parent` is the block before the first one, None at the start of a sequence. `token_ids` are empty where the engine
    names blocks by their hashes alone. `group` numbers the KV cache groups of models with several kinds of layers.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = GPU
    extra_keys: tuple[ExtraKeys, ...] | None = None
    group: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no engine has."""
        if self.block_size < 0 or (self.token_ids and self.block_size == 0):
            raise ValueError(f"block_size: must be above 0, not {self.block_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """One copy of each of these blocks is no longer available on a medium."""

    hashes: tuple[EngineHash, ...]
    medium: str = GPU
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleared:
    """All blocks on the GPU lost their contents."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventBatch:
    """The events of one step of an engine; `digest` identifies the bytes that they came in."""

    published_s: float  # on the engine's wall clock
    events: tuple[KvEvent, ...]
    rank: int | None = None  # the data-parallel rank
    digest: bytes = b""
