"""A tracker beside an engine whose tokens it receives, all on a virtual clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from predictor.config import EngineConfig
from predictor.engine_replica import EngineReplica
from predictor.mirror.tracker import Tracker
from predictor.mirror.unknown_requests import NUM_SCRAPES, UnknownRequests
from predictor.request import RequestFacts
from tests.predictor.mirror.tracked_engine import (
    A30,
    CONFIG,
    DELAY_S,
    RECORDS,
    ROOMY,
    EngineMoment,
    as_seen_by_proxy,
    moments_of,
    random_requests,
)


@dataclass(slots=True, kw_only=True)
class Comparison:
    """How often, and by how much, the tracker differed from its engine."""

    num: int = 0
    num_same_queues: int = 0
    num_same_tokens: int = 0
    worst_tokens: int = 0
    worst_blocks: int = 0


def follow(
    config: EngineConfig, requests: list[RequestFacts], tracker: Tracker, pace: float, *, streamed: bool
) -> Comparison:
    """Report to the tracker what a proxy would see, and compare after every step."""
    comparison = Comparison()
    coming = sorted(requests, key=lambda one: one.arrival_s)
    lengths = {one.request_id: one.output_tokens for one in requests}
    reported = dict.fromkeys(lengths, 0)
    draw = random.Random(1)
    for moment in moments_of(config, requests, pace):
        now_s = moment.at_s + DELAY_S
        while coming and coming[0].arrival_s <= now_s:
            tracker.add(as_seen_by_proxy(coming.pop(0)), streamed=streamed)
        changed = [name for name, count in moment.output_tokens.items() if count != reported[name]]
        draw.shuffle(changed)  # connections are read in any order
        for name in changed:
            reported[name] = moment.output_tokens[name]
            ended = reported[name] == lengths[name]
            if streamed or ended:
                tracker.receive(name, reported[name], now_s, ended=ended)
        tracker.advance(now_s)
        compare(tracker, moment, comparison)
    assert not tracker.requests
    assert num_free_blocks(tracker) == tracker.engine.num_blocks
    return comparison


def compare(tracker: Tracker, moment: EngineMoment, comparison: Comparison) -> None:
    """Count the differences."""
    engine = tracker.engine
    differences = [abs(engine.output_tokens(name) - moment.output_tokens[name]) for name in tracker.requests]
    comparison.num += 1
    same = set(engine.running()) == set(moment.running) and set(engine.waiting()) >= set(moment.waiting)
    comparison.num_same_queues += same
    comparison.num_same_tokens += not any(differences)
    comparison.worst_tokens = max(comparison.worst_tokens, *differences, 0)
    if same:
        difference = abs(num_free_blocks(tracker) - moment.num_free_blocks)
        comparison.worst_blocks = max(comparison.worst_blocks, difference)


def num_free_blocks(tracker: Tracker) -> int:
    """Return how many blocks are free in the model."""
    return int(tracker.engine.state.engine[0].num_free_blocks)


def row_of(tracker: Tracker, name: str) -> Any:
    """Return the model's record of a request."""
    return tracker.engine.state.requests[tracker.engine.slots[name]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_async", [False, True])
def test_streamed_tokens_keep_the_model_in_step(seed: int, is_async: bool) -> None:
    """With every token received, queues, progress and blocks equal the engine's, and its pace is learnt."""
    config = replace(ROOMY, async_scheduling=is_async)
    tracker = Tracker(config, A30.step_time, 0.0)
    comparison = follow(config, random_requests(seed), tracker, 1.6, streamed=True)
    assert comparison.num > 200
    assert comparison.num_same_queues > 0.9 * comparison.num
    assert comparison.worst_tokens <= 1
    assert tracker.correction.factor == pytest.approx(1.6, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_streamed_tokens_keep_the_model_close_where_memory_is_short(seed: int) -> None:
    """Preemptions, which no client sees, lead to short differences only."""
    tracker = Tracker(CONFIG, A30.step_time, 0.0)
    requests = random_requests(seed, num=40, within_s=8.0)
    comparison = follow(CONFIG, requests, tracker, 1.0, streamed=True)
    assert comparison.num_same_queues > 0.6 * comparison.num
    assert comparison.worst_tokens <= 12


@pytest.mark.parametrize("seed", range(3))
def test_whole_answers_keep_the_model_close(seed: int) -> None:
    """Without streams, the lengths of ended answers correct the pace and the other requests."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    comparison = follow(ROOMY, random_requests(seed), tracker, 1.3, streamed=False)
    assert comparison.num_same_queues > 0.6 * comparison.num
    assert tracker.correction.factor == pytest.approx(1.3, rel=0.15)


def one_request(name: str = "a", prompt_tokens: int = 40, arrival_s: float = 1.0) -> RequestFacts:
    """Make a request with room for a long answer."""
    return RequestFacts(request_id=name, prompt_tokens=prompt_tokens, max_tokens=300, arrival_s=arrival_s)


def test_a_step_of_a_streamed_request_waits_for_its_token() -> None:
    """However late the token is, the model does not go further than the client."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one_request(), streamed=True)
    tracker.advance(50.0)
    assert tracker.engine.output_tokens("a") == 0
    assert tracker.overdue_s(50.0) > 40
    tracker.receive("a", 1, 50.0)
    assert tracker.engine.output_tokens("a") == 1
    assert tracker.overdue_s(50.0) == 0


def test_several_tokens_at_once_are_several_steps() -> None:
    """An event of five tokens advances the model by five tokens."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one_request(), streamed=True)
    tracker.receive("a", 1, 1.1)
    tracker.receive("a", 6, 1.3)
    row = row_of(tracker, "a")
    assert row.output_tokens == 6
    assert row.computed_tokens == 40 + 6  # with the step under way


def test_tokens_after_the_predicted_end_continue_the_request() -> None:
    """A request that exceeds its own limit runs for as long as its tokens arrive."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(RequestFacts(request_id="a", prompt_tokens=40, max_tokens=3, arrival_s=1.0), streamed=True)
    for count in range(1, 8):
        tracker.receive("a", count, 1.0 + 0.1 * count)
    assert tracker.engine.running() == ["a"]
    tracker.receive("a", 8, 2.0, ended=True)
    assert tracker.engine.running() == []
    assert num_free_blocks(tracker) == tracker.engine.num_blocks


@pytest.mark.parametrize("after_s", [0.0, 0.01, 5.0])
def test_removed_requests_free_everything(after_s: float) -> None:
    """Whether it waits or runs, an aborted request's seat and blocks are free again."""
    tracker = Tracker(CONFIG, A30.step_time, 0.0)
    for number in range(12):
        tracker.add(one_request(f"r{number}", prompt_tokens=200), streamed=False)
    tracker.advance(1.0 + after_s)
    for number in range(12):
        tracker.remove(f"r{number}", 1.0 + after_s)
    tracker.advance(20.0)
    assert tracker.engine.running() == tracker.engine.waiting() == []
    assert not tracker.engine.slots
    assert num_free_blocks(tracker) == tracker.engine.num_blocks


def test_a_counted_prompt_replaces_the_estimate() -> None:
    """A wrong estimate is corrected while the prompt is still being computed."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one_request(prompt_tokens=300), streamed=True)
    tracker.correct_prompt("a", 30)
    tracker.receive("a", 1, 1.1)
    row = row_of(tracker, "a")
    assert (row.prompt_tokens, row.computed_tokens) == (30, 31)
    assert row.num_blocks == 2


def test_a_stream_without_tokens_is_put_back_to_waiting() -> None:
    """A stream that does not start while others continue is assumed to wait."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one_request("a"), streamed=True)
    tracker.add(one_request("b"), streamed=True)
    for count in range(1, 30):
        tracker.receive("a", count, 1.0 + 0.05 * count)
    assert tracker.silent_since_first_token(3.0, 1.0) == ["b"]
    tracker.set_waiting(["b"])
    assert "b" not in tracker.silent_since_first_token(3.0, 1.0)
    tracker.receive("b", 1, 3.0)
    assert set(tracker.engine.running()) == {"a", "b"}


def test_used_blocks_without_a_known_holder_are_not_free() -> None:
    """Blocks that the engine counts as used and the model does not are held elsewhere."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.set_used_blocks(100)
    assert num_free_blocks(tracker) == tracker.engine.num_blocks - 100
    tracker.set_used_blocks(0)
    assert num_free_blocks(tracker) == tracker.engine.num_blocks


def test_shared_blocks_are_not_freed_twice() -> None:
    """Requests that share a prefix hold fewer blocks than the model counts, and never return more than all."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    for name in "abc":
        tracker.add(one_request(name, prompt_tokens=250), streamed=True)
    for count in range(1, 5):
        for name in "abc":
            tracker.receive(name, count, 1.0 + 0.2 * count)
    tracker.set_used_blocks(20)  # of about 48
    assert tracker.engine.num_blocks - num_free_blocks(tracker) == 20
    for name in "abc":
        tracker.receive(name, 5, 2.0, ended=True)
        tracker.advance(2.0)
        assert num_free_blocks(tracker) <= tracker.engine.num_blocks


def test_unknown_requests_are_added_and_removed_by_the_metrics() -> None:
    """After a few scrapes the model has as many requests as the engine counts, with the blocks it counts."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one_request(), streamed=True)
    unknown = UnknownRequests(tracker)
    for scrape in range(NUM_SCRAPES):
        assert len(unknown) == 0
        unknown.update(4, 0, 0.08, 2.0 + scrape)
    assert len(unknown) == 3
    assert len(tracker.engine.running()) == 4
    held = tracker.engine.num_blocks - num_free_blocks(tracker)
    assert held == pytest.approx(0.08 * tracker.engine.num_blocks, abs=4)
    unknown.update(2, 0, 0.1, 6.0)
    assert len(unknown) == 1
    unknown.update(1, 0, 0.0, 6.5)
    assert tracker.engine.running() == ["a"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_async", [False, True])
def test_the_model_stays_consistent_whatever_is_observed(seed: int, is_async: bool) -> None:
    """Tokens out of order, wrong metrics and ends of requests that never started do not make it inconsistent."""
    config = EngineConfig(
        max_num_seqs=6, max_num_batched_tokens=128, num_gpu_blocks=65, max_model_len=256, enable_prefix_caching=False,
        async_scheduling=is_async,
    )  # fmt: skip
    draw = random.Random(seed)
    tracker, now_s = Tracker(config, A30.step_time, 0.0), 0.0
    twin = EngineReplica(config, A30.step_time, num_slots=256, track_blocks=False)
    unknown = UnknownRequests(tracker)
    for number in range(400):
        now_s += draw.choice([0.0, 0.001, 0.02, 0.3])
        names = [name for name in tracker.requests if name.startswith("r")]
        name = draw.choice(names) if names else ""
        what = draw.random()
        if not names or what < 0.15:
            request = RequestFacts(
                request_id=f"r{number}",
                prompt_tokens=draw.randint(1, 200),
                max_tokens=draw.randint(1, 56),
                arrival_s=now_s,
            )
            tracker.add(request, streamed=draw.random() < 0.7)
        elif what < 0.65:
            count = tracker.requests[name].num_received + draw.choice([0, 1, 1, 1, 2, 9, 60])
            tracker.receive(name, count, now_s, ended=draw.random() < 0.1, exact=draw.random() < 0.5)
        elif what < 0.72:
            tracker.remove(name, now_s)
        elif what < 0.78:
            tracker.correct_prompt(name, draw.randint(1, 400))
        elif what < 0.84:
            unknown.update(draw.randint(0, 9), draw.randint(0, 5), draw.random(), now_s)
        elif what < 0.9:
            tracker.set_used_blocks(draw.randint(0, 64))
        elif what < 0.95:
            tracker.set_waiting(tracker.silent_since_first_token(now_s, 0.1))
        tracker.advance(now_s)
        twin.update(tracker.engine.shown(RECORDS, unknown.lengths(), now_s, 256))
        tracker.engine.snapshot(unknown.lengths(), (), now_s)
    for name in list(tracker.requests):
        tracker.remove(name, now_s)
    tracker.set_used_blocks(0)
    tracker.advance(now_s + 60.0)
    assert not tracker.engine.slots
    assert num_free_blocks(tracker) == tracker.engine.num_blocks
