"""The index of cached blocks, against a plain list of copies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from predictor.kv_events.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch
from predictor.kv_events.index import MAX_MEDIA, KvEventIndex
from tests.predictor.kv_events.making import SIZE, CacheOracle, names_of, new_index, require_equal

PROMPT = tuple(range(1, 3 * SIZE + 1))


def applied(*events: KvEvent, **settings: int) -> KvEventIndex:
    """Return an index after one batch."""
    index = new_index(**settings)
    index.apply(KvEventBatch(published_s=0.0, events=events))
    return index


def stored(first: int, last: int, **fields: object) -> BlocksStored:
    """Return the event of some blocks of the prompt, whose hashes are their numbers."""
    values = {
        "hashes": tuple(range(first, last)), "parent": first - 1 if first else None, "block_size": SIZE,
        "token_ids": PROMPT[first * SIZE : last * SIZE],
    }  # fmt: skip
    return BlocksStored(**{**values, **fields})


@pytest.mark.parametrize("as_ints", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_it_equals_a_list_of_copies(seed: int, as_ints: bool) -> None:
    """After every batch of random stores, repeated copies, evictions and clears, whatever hashes the engine has."""
    oracle, index = CacheOracle(random.Random(seed), as_ints), new_index()
    for _ in range(60):
        index.apply(oracle.step())
        require_equal(index, oracle, 5)


def test_copies_are_counted() -> None:
    """A block is hit until its last copy is removed."""
    index = applied(stored(0, 2), stored(1, 2))
    assert index.hits(names_of(PROMPT)) == 2
    index.apply(KvEventBatch(published_s=0.0, events=(BlocksRemoved(hashes=(1,)),)))
    assert index.hits(names_of(PROMPT)) == 2
    index.apply(KvEventBatch(published_s=0.0, events=(BlocksRemoved(hashes=(1,)),)))
    assert index.hits(names_of(PROMPT)) == 1


def test_off_loaded_blocks_follow_those_on_the_gpu() -> None:
    """They count as hits of their own tier, also where the event has no tokens."""
    index = applied(
        stored(0, 3),
        stored(0, 3, medium="CPU", parent=None, token_ids=(), block_size=0),
        BlocksRemoved(hashes=(1, 2)),
    )
    names = names_of(PROMPT)
    assert (index.hits(names), index.offloaded_hits(names), index.num_offloaded()) == (1, 2, {"CPU": 3})
    index.apply(KvEventBatch(published_s=0.0, events=(BlocksRemoved(hashes=(2,), medium="CPU"),)))
    assert (index.hits(names), index.offloaded_hits(names), index.num_offloaded()) == (1, 1, {"CPU": 2})
    index.apply(KvEventBatch(published_s=0.0, events=(CacheCleared(),)))
    assert (index.hits(names), index.offloaded_hits(names)) == (0, 2)


@pytest.mark.parametrize(
    "event",
    [
        stored(1, 2),
        stored(0, 1, group=1),
        stored(0, 2, token_ids=PROMPT[:SIZE]),
        stored(0, 1, token_ids=(), block_size=0, medium="CPU"),
        stored(0, 1, extra_keys=(None, None)),
    ],
    ids=["unknown parent", "another group", "too few tokens", "without tokens", "too many keys"],
)
def test_what_cannot_be_named_is_counted_and_never_hit(event: BlocksStored) -> None:
    """Also blocks of another KV cache group."""
    index = applied(event)
    assert index.hits(names_of(PROMPT)) == index.num_blocks == 0
    assert index.num_ignored > 0


def test_adapters_have_blocks_of_their_own() -> None:
    """The same tokens with an adapter, or a salt, are other blocks."""
    index = applied(stored(0, 1, extra_keys=(("sql",),)))
    assert index.hits(names_of(PROMPT)) == 0
    assert index.hits(index.names_of(PROMPT, SIZE, ("sql",))) == 1


def test_its_memory_is_bounded() -> None:
    """Further blocks are not hit; what it has it can still remove."""
    index = applied(stored(0, 3), max_blocks=2)
    assert (index.hits(names_of(PROMPT)), index.is_full) == (2, True)
    index.apply(KvEventBatch(published_s=0.0, events=(stored(0, 1), BlocksRemoved(hashes=(0, 1, 2)))))
    assert (index.num_blocks, index.hits(names_of(PROMPT))) == (0, 0)


def test_it_grows_beyond_its_first_arrays() -> None:
    """With as many blocks as an engine has."""
    tokens = tuple(range(4000 * SIZE))
    event = BlocksStored(hashes=tuple(range(4000)), parent=None, token_ids=tokens, block_size=SIZE)
    index = applied(event)
    assert index.hits(names_of(tokens)) == index.num_blocks == 4000
    index.apply(KvEventBatch(published_s=0.0, events=(BlocksRemoved(hashes=tuple(range(4000))),)))
    assert index.num_blocks == 0


def test_the_last_blocks_of_a_request_are_used_longest_ago() -> None:
    """As engines reuse them first."""
    index = applied(stored(0, 3))
    uses = [index.last_uses[index.place_of(name)] for name in names_of(PROMPT)]
    assert uses == sorted(uses, reverse=True)
    index.use(names_of(PROMPT)[:1])
    index.use(names_of(PROMPT))
    uses = [index.last_uses[index.place_of(name)] for name in names_of(PROMPT)]
    assert uses == sorted(uses, reverse=True)


def test_it_knows_which_blocks_followed_since_a_moment() -> None:
    """For the responses of requests, whose tokens nothing else shows."""
    index = applied(stored(0, 1))
    moment = index.moment()
    index.apply(KvEventBatch(published_s=0.0, events=(stored(1, 2),)))
    first, second, _ = names_of(PROMPT)
    assert index.followers_of(first, stored_from=moment) == [second]
    assert index.followers_of(first, stored_from=index.moment()) == []
    assert index.has(first, stored_before=moment)
    assert not index.has(second, stored_before=moment)


def test_off_loading_tiers_are_bounded_and_forgotten_when_they_are_empty() -> None:
    """An engine that names a medium for each block does not fill the memory."""
    index = new_index()

    def take(event: BlocksStored | BlocksRemoved) -> None:
        index.apply(KvEventBatch(published_s=1.0, events=(event,)))

    stored = BlocksStored(hashes=(1,), parent=None, token_ids=tuple(range(SIZE)), block_size=SIZE)
    take(stored)
    for number in range(1000):
        take(replace(stored, medium=f"M{number}"))
    assert len(index.num_offloaded()) == MAX_MEDIA
    assert index.num_ignored == 1000 - MAX_MEDIA
    for number in range(1000):
        take(BlocksRemoved(hashes=(1,), medium=f"M{number}"))
    assert index.num_offloaded() == {}
    take(replace(stored, medium="CPU"))
    assert index.num_offloaded() == {"CPU": 1}
