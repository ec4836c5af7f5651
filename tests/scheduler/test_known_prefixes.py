"""Prefix hits of instances whose KV events are followed: what the engine has, where that is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from predictor.kv_events.events import BlocksStored, KvEventBatch
from predictor.kv_events.stream import KvEventStream
from scheduler.candidates import RequestIndicators
from scheduler.instance_table import InstanceTable
from scheduler.prefix.kv_block_hash import kv_block_hashes
from scheduler.prefix.prompt import MAX_NAMES, PromptBlocks, PromptPrefixes
from tests.predictor.kv_events.making import SIZE, CacheOracle, new_index


def followed(oracle: CacheOracle, *, first: int = 0) -> KvEventStream:
    """Return a stream that has got an engine's batches from the `first` one on."""
    stream = KvEventStream(new_index(), can_replay=False)
    for number, batch in enumerate(oracle.batches[first:], first):
        stream.receive(number, batch)
    return stream


def prompt_of(tokens: tuple[int, ...]) -> PromptBlocks:
    """Name a prompt as a gateway does that has the tokenizer."""
    return PromptBlocks(names=kv_block_hashes(tokens, SIZE, "names"), block_tokens=SIZE, by_tokens=True)


def hits(prefixes: PromptPrefixes, prompt: PromptBlocks, table: InstanceTable) -> dict[str, float]:
    """Look a prompt up; return its hits by instance."""
    known = table.candidates(RequestIndicators(prompt_tokens=100), 0.0)
    prefixes.look_up(prompt, known)
    return dict(zip(known.instance_ids, known.columns["prefix_hit_tokens"].tolist(), strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_events_replace_the_estimate(seed: int) -> None:
    """Of instances without events, or with some that cannot be used now, the estimate stays."""
    oracle = CacheOracle(random.Random(seed), clears=False)
    for _ in range(40):
        oracle.step()
    table = InstanceTable(("complete", "partial", "unsure", "without"))
    prefixes = PromptPrefixes(table, dict.fromkeys(table.known.instance_ids, 1000))
    lost = followed(oracle)
    lost.disconnect()
    partial = followed(oracle, first=20)
    prefixes.follow_events({"complete": followed(oracle), "partial": partial, "unsure": lost})
    for _ in range(30):
        tokens = oracle.prompt()
        prompt = prompt_of(tokens)
        if random.Random(len(tokens)).random() < 0.3:
            for name in table.known.instance_ids:
                prefixes.sent(name, prompt)
        estimate = hits(prefixes, PromptBlocks(names=prompt.names, block_tokens=SIZE), table)
        found = hits(prefixes, prompt, table)
        assert found["complete"] == oracle.hits(tokens) * SIZE
        assert found["unsure"] == found["without"] == estimate["without"]
        lower = partial.index.hits([partial.index.short_name(name) for name in prompt.names]) * SIZE
        assert found["partial"] == max(lower, estimate["partial"])


def test_prompts_that_are_named_otherwise_are_estimated() -> None:
    """By their text, or by blocks of another size than the engine's."""
    oracle = CacheOracle(random.Random(1))
    while not oracle.copies:
        oracle.step()
    table = InstanceTable(("one",))
    prefixes = PromptPrefixes(table, {"one": 100})
    prefixes.follow_events({"one": followed(oracle)})
    for prompt in (
        PromptBlocks(names=[b"a", b"b"], block_tokens=SIZE),
        PromptBlocks(names=[b"a", b"b"], block_tokens=2 * SIZE, by_tokens=True),
    ):
        prefixes.sent("one", prompt)
        assert hits(prefixes, prompt, table) == {"one": 2 * prompt.block_tokens}


def test_a_long_prompt_is_found_by_every_second_block() -> None:
    """As only some of its names are kept."""
    tokens = tuple(np.random.default_rng(1).integers(0, 1000, 3 * MAX_NAMES * SIZE).tolist())
    hashes = tuple(range(3 * MAX_NAMES))
    event = BlocksStored(hashes=hashes, parent=None, token_ids=tokens, block_size=SIZE)
    stream = KvEventStream(new_index(), can_replay=False)
    stream.receive(0, KvEventBatch(published_s=0.0, events=(event,)))
    table = InstanceTable(("one",))
    prefixes = PromptPrefixes(table, {"one": 100})
    prefixes.follow_events({"one": stream})
    assert hits(prefixes, prompt_of(tokens), table) == {"one": len(tokens)}
