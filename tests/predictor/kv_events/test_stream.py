"""The sequence of batches: whatever happens on their way, the index equals the engine's cache, or says that it does not."""

from __future__ import annotations

import random

import pytest

from predictor.kv_events.stream import COMPLETE, PARTIAL, UNSURE, KvEventStream
from tests.predictor.kv_events.making import CacheOracle, new_index, require_below, require_equal


def stream(*, can_replay: bool = True) -> KvEventStream:
    """Return a stream with an empty index."""
    return KvEventStream(new_index(), can_replay=can_replay)


def replay(of: KvEventStream, oracle: CacheOracle, *, keeps: int = 10_000) -> None:
    """Let an engine that keeps its last batches repeat what is asked for, until no more is needed."""
    for _ in range(3):
        start = of.replay_from()
        for number, batch in list(enumerate(oracle.batches))[-keeps:]:
            if number >= start:
                of.replay(number, batch)
        if not of.end_replay():
            return
    raise AssertionError("it asks for ever more replays")


@pytest.mark.parametrize("seed", range(40))
def test_lost_repeated_and_reordered_batches_are_repaired(seed: int) -> None:
    """With an engine that restarts meanwhile, the index equals the cache after every replay."""
    draw = random.Random(seed)
    oracle, here = CacheOracle(random.Random(seed)), stream()
    life = 0
    late: list[tuple[int, object]] = []
    for _ in range(150):
        if draw.random() < 0.02:
            life += 1
            oracle, late = CacheOracle(random.Random(f"{seed} {life}"), started_s=life * 1e6), []
        number, batch = len(oracle.batches), oracle.step()
        way = draw.choices(("come", "get lost", "come twice", "come late"), (8, 1, 1, 1))[0]
        if way == "come late":
            late.append((number, batch))
        elif way != "get lost":
            for _ in range(2 if way == "come twice" else 1):
                here.receive(number, batch)
        while late and draw.random() < 0.5:
            here.receive(*late.pop())
        if draw.random() < 0.1 or (here.needs_replay and draw.random() < 0.5):
            replay(here, oracle)
            assert here.certainty == COMPLETE
            require_equal(here.index, oracle, 5)
    replay(here, oracle)
    assert (here.certainty, here.needs_replay, here.has_gap) == (COMPLETE, False, False)
    require_equal(here.index, oracle)


@pytest.mark.parametrize("seed", range(20))
def test_without_replays_it_promises_no_hit_that_is_not_there(seed: int) -> None:
    """A gap leaves a part of the cache unknown, until the engine clears it or restarts."""
    draw = random.Random(seed)
    oracle, here = CacheOracle(random.Random(seed)), stream(can_replay=False)
    for _ in range(100):
        number, batch = len(oracle.batches), oracle.step()
        if draw.random() > 0.1:
            here.receive(number, batch)
        if here.has_gap and draw.random() < 0.5:
            here.give_up()
    here.give_up()
    number, batch = len(oracle.batches), oracle.step()
    here.receive(number, batch)
    here.give_up()
    require_below(here.index, oracle)
    fresh = CacheOracle(random.Random(-seed - 1), started_s=1e6)
    here.receive(0, fresh.step())
    assert here.certainty == COMPLETE
    require_equal(here.index, fresh)


def test_a_reordered_batch_closes_its_gap_without_a_replay() -> None:
    """The later one is buffered until then."""
    oracle, here = CacheOracle(random.Random(1)), stream(can_replay=False)
    first, second, third = (oracle.step() for _ in range(3))
    here.receive(0, first)
    here.receive(2, third)
    assert (here.certainty, here.has_gap) == (UNSURE, True)
    here.receive(1, second)
    assert (here.certainty, here.has_gap, here.counts.gaps, here.counts.lost) == (COMPLETE, False, 1, 0)
    require_equal(here.index, oracle)


def test_what_the_engine_did_before_is_asked_for() -> None:
    """A subscriber that comes late knows everything if the engine still has it, and a part otherwise."""
    for keeps, state in ((100, COMPLETE), (5, PARTIAL)):
        oracle, here = CacheOracle(random.Random(2), clears=False), stream()
        for _ in range(20):
            oracle.step()
        assert (here.certainty, here.needs_replay) == (UNSURE, True)
        replay(here, oracle, keeps=keeps)
        assert here.certainty == state
        (require_equal if state == COMPLETE else require_below)(here.index, oracle)
    here = stream()
    replay(here, CacheOracle(random.Random(3)))
    assert here.certainty == COMPLETE  # the engine has published nothing


def test_a_late_subscriber_without_replays_knows_a_part() -> None:
    """And all as soon as the engine clears its cache."""
    oracle, here = CacheOracle(random.Random(4), clears=False), stream(can_replay=False)
    for _ in range(20):
        oracle.step()
    here.receive(20, oracle.step())
    assert here.certainty == PARTIAL
    require_below(here.index, oracle)


def test_a_restart_is_noticed_where_no_number_shows_it() -> None:
    """The new engine has published as many batches as the old one, or more, or none at all."""
    for num_batches in (0, 3, 5, 9):
        oracle, here = CacheOracle(random.Random(5)), stream()
        for number in range(5):
            here.receive(number, oracle.step())
        here.disconnect()
        assert (here.certainty, here.needs_replay) == (UNSURE, True)
        new = CacheOracle(random.Random(6), started_s=1e6)
        for _ in range(num_batches):
            new.step()
        replay(here, new)
        assert (here.certainty, here.counts.restarts) == (COMPLETE, 1)
        require_equal(here.index, new)


def test_a_connection_that_comes_back_to_the_same_engine_costs_nothing() -> None:
    """Its last batch is still the same."""
    oracle, here = CacheOracle(random.Random(7)), stream()
    for number in range(5):
        here.receive(number, oracle.step())
    here.disconnect()
    replay(here, oracle)
    assert (here.certainty, here.counts.restarts, here.counts.replayed) == (COMPLETE, 0, 0)


def test_a_replay_that_breaks_off_changes_nothing() -> None:
    """And live batches after it are applied as before."""
    oracle, here = CacheOracle(random.Random(8)), stream()
    here.receive(0, oracle.step())
    here.replay_from()
    here.replay(7, oracle.batches[0])
    here.cancel_replay()
    assert not here.end_replay()
    here.receive(1, oracle.step())
    require_equal(here.index, oracle)


def test_the_buffer_behind_a_gap_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never repeats what was lost costs a part of the cache, and no memory."""
    monkeypatch.setattr("predictor.kv_events.stream.MAX_BUFFERED", 10)
    oracle, here = CacheOracle(random.Random(9), clears=False), stream()
    for number in range(60):
        batch = oracle.step()
        if number not in (3, 5):
            here.receive(number, batch)
    assert (here.certainty, here.counts.lost) == (PARTIAL, 2)
    require_below(here.index, oracle)


def test_a_late_batch_of_an_engine_before_a_restart_is_ignored() -> None:
    """Whether it comes before or after the new engine's batches."""
    old, new, here = CacheOracle(random.Random(10)), CacheOracle(random.Random(11), started_s=1e6), stream()
    for number in range(5):
        here.receive(number, old.step())
    late = old.step()
    here.receive(0, new.step())
    here.receive(5, late)
    assert (here.certainty, here.counts.restarts, here.has_gap) == (COMPLETE, 1, False)
    require_equal(here.index, new)
