"""What schedulers believe of prefix caches: against a plain reckoning, and against what engines then find there."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.request import RequestFacts
from predictor.step_time import StepTime
from scheduler.prefix import PrefixIndex, text_blocks
from scheduler.prefix.text import BLOCK_BYTES


def plain_hits(cache: OrderedDict[Hashable, float], names: Sequence[Hashable]) -> int:
    """How many leading blocks are in a cache, counted one by one."""
    return next((place for place, name in enumerate(names) if name not in cache), len(names))


def plain_sent(cache: OrderedDict[Hashable, float], names: Sequence[Hashable], size: int, each: float = 1.0) -> None:
    """Put blocks in, and drop the oldest that are too many, of one prompt the last first."""
    for name in reversed(names):
        cache[name] = cache.pop(name, each)
    while sum(cache.values()) > size:
        cache.popitem(last=False)


def prompt(rng: random.Random, most: int = 12) -> list[tuple[int, ...]]:
    """Blocks of a prompt from a small tree of prefixes, each naming all before it."""
    path = [rng.randrange(3) for _ in range(rng.randint(0, most))]
    return [tuple(path[:end]) for end in range(1, len(path) + 1)]


def test_the_index_knows_what_a_plain_reckoning_knows() -> None:
    """Through sending, evicting, instances that come, shrink, restart and go."""
    rng = random.Random(1)
    index, plain, sizes = PrefixIndex(), {}, {}
    for step in range(6000):
        if step % 300 == 0:
            sizes = {f"i{rng.randrange(40):02}": rng.choice([0, 3, 20, 60]) for _ in range(rng.randint(1, 20))}
            index.follow(sizes)
            plain = {name: plain.get(name, OrderedDict()) for name in sizes}
            for name, cache in plain.items():
                plain_sent(cache, [], sizes[name])
        name = rng.choice(sorted(sizes))
        if rng.random() < 0.02:
            index.forget(name)
            plain[name].clear()
        names = prompt(rng)
        each = rng.choice([1.0, 1.0, 4.0, 0.5])
        index.sent(name, names, each)
        plain_sent(plain[name], names, sizes[name], each)
        assert index.num_held(name) == sum(plain[name].values())
        asked = prompt(rng)
        ids = (*sorted(sizes), "nobody")
        hits = index.look_up(asked, ids)
        expected = [plain_hits(plain[one], asked) for one in sorted(sizes)]
        assert hits.num_blocks.tolist() == [*expected, 0]
        deepest = max(expected)
        assert hits.deepest == (asked[deepest - 1] if deepest else None)
    index.follow({})
    assert not index._holders


def test_very_long_prompts_and_many_instances() -> None:
    """Numbers beyond those of a byte, also of instances."""
    ids = tuple(f"i{number:03}" for number in range(300))
    index = PrefixIndex(dict.fromkeys(ids, 2000))
    names = list(range(1500))
    for place, name in enumerate(ids):
        index.sent(name, names[: 5 * place])
    assert index.look_up(names, ids).num_blocks.tolist() == [5 * place for place in range(300)]
    assert index.look_up([], ids).num_blocks.tolist() == [0] * 300


CONFIG = EngineConfig(
    max_num_seqs=16, max_num_batched_tokens=512, num_gpu_blocks=401, max_model_len=2048, enable_prefix_caching=True
)
QUICK = StepTime(constant_s=0.01, empty_s=0.001, token_s=0.00001)


def test_it_is_close_to_what_engines_find() -> None:
    """Conversations over four small engines: the guess is the truth for most requests, and rarely far off."""
    rng = random.Random(3)
    engines = {name: Engine(CONFIG, QUICK) for name in "abcd"}
    index = PrefixIndex(dict.fromkeys(engines, 400))
    talks: list[list[str]] = [[f"{number:08x}"] for number in range(40)]
    guesses: dict[str, int] = {}
    now_s = 0.0
    for number in range(1500):
        now_s += rng.expovariate(8.0)
        which = rng.randrange(len(talks))
        talk = talks[which]
        if len(talk) > 30:
            del talk[1:]
        talk += [f"{number:08x}{place:02x}" for place in range(rng.randint(1, 6))]
        names = ["5757", *talk]
        home = "abcd"[which % 4] if rng.random() < 0.8 else rng.choice("abcd")
        hits = index.look_up(names, tuple(engines))
        guesses[str(number)] = int(hits.num_blocks["abcd".index(home)])
        request = RequestFacts(
            request_id=str(number), prompt_tokens=16 * len(names) + 1, output_tokens=rng.randint(2, 30), arrival_s=now_s,
            prefix_hashes=tuple(names),
        )  # fmt: skip
        for engine in engines.values():
            engine.advance(now_s)
        engines[home].add(request)
        index.sent(home, names)
    truths = {}
    for engine in engines.values():
        engine.advance()
        truths |= {outcome.request_id: outcome.prefix_hit_tokens // 16 for outcome in engine.forget_finished()}
    assert len(truths) == 1500
    errors = np.array([guesses[number] - truths[number] for number in truths])
    held = np.array(list(truths.values()))
    assert held.mean() > 3  # there is something to find
    assert (errors == 0).mean() > 0.8
    assert np.abs(errors).mean() < 0.1 * held.mean()


def test_text_is_cut_into_blocks_that_stand_for_all_before_them() -> None:
    """Equal beginnings have equal names up to where they part, and none after that; a rest is not named."""
    one = b"You are helpful. " * 60
    other = one[:700] + b"X" + one[701:]
    assert len(text_blocks(one)) == len(one) // BLOCK_BYTES == 3
    assert text_blocks(one)[:2] == text_blocks(other)[:2]
    assert text_blocks(one)[2] != text_blocks(other)[2]
    assert text_blocks(one[:256] * 2)[0] != text_blocks(one[:256] * 2)[1]
    assert text_blocks(b"") == text_blocks(b"x" * 255) == ()
    assert len(text_blocks(b"x" * 100, block_bytes=10)) == 10
