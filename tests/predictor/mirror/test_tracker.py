"""The tracker beside an engine whose tokens it is told, all on a virtual clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from predictor.config import EngineConfig
from predictor.mirror.tracker import Tracker
from predictor.mirror.unknown_requests import READINGS, UnknownRequests
from predictor.request import Request
from predictor.twin import Twin
from services.predictor_server.tracked import shown_from, snapshot_from
from tests.predictor.mirror.tracked_engine import (
    A30,
    CONFIG,
    DELAY_S,
    ROOMY,
    Moment,
    lived,
    requests,
    unknown_length,
)


@dataclass(slots=True, kw_only=True)
class Compared:
    """How often the tracker stood as its engine did."""

    num: int = 0
    num_same_queues: int = 0
    num_same_tokens: int = 0
    worst_tokens: int = 0
    worst_blocks: int = 0


def follow(config: EngineConfig, asked: list[Request], tracker: Tracker, pace: float, *, streamed: bool) -> Compared:
    """Tell the tracker what a proxy would see, and compare after every step."""
    compared = Compared()
    coming = sorted(asked, key=lambda one: one.arrival_s)
    lengths = {one.request_id: one.output_tokens for one in asked}
    seen = dict.fromkeys(lengths, 0)
    draw = random.Random(1)
    for moment in lived(config, asked, pace):
        now_s = moment.at_s + DELAY_S
        while coming and coming[0].arrival_s <= now_s:
            tracker.add(unknown_length(coming.pop(0)), streamed=streamed)
        changed = [name for name, count in moment.output_tokens.items() if count != seen[name]]
        draw.shuffle(changed)  # connections are read in any order
        for name in changed:
            seen[name] = moment.output_tokens[name]
            ended = seen[name] == lengths[name]
            if streamed or ended:
                tracker.produced(name, seen[name], now_s, ended=ended)
        tracker.run_to(now_s)
        compare(tracker, moment, compared)
    assert not tracker.requests
    assert tracker.engine.state.engine[0].num_free_blocks == tracker.engine.num_blocks
    return compared


def compare(tracker: Tracker, moment: Moment, compared: Compared) -> None:
    """Count the differences."""
    rows = tracker.engine.state.requests
    mine = {name: int(rows[one.slot].output_tokens) for name, one in tracker.requests.items()}
    differences = [abs(count - moment.output_tokens[name]) for name, count in mine.items()]
    compared.num += 1
    same = set(tracker.engine.running()) == set(moment.running) and set(tracker.engine.waiting()) >= set(moment.waiting)
    compared.num_same_queues += same
    compared.num_same_tokens += not any(differences)
    compared.worst_tokens = max(compared.worst_tokens, *differences, 0)
    if same:
        free = int(tracker.engine.state.engine[0].num_free_blocks)
        compared.worst_blocks = max(compared.worst_blocks, abs(free - moment.num_free_blocks))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_async", [False, True])
def test_streams_keep_it_in_step(seed: int, is_async: bool) -> None:
    """With every token seen, queues, progress and blocks are the engine's own, at a pace that nobody told."""
    config = replace(ROOMY, async_scheduling=is_async)
    tracker = Tracker(config, A30.step_time, 0.0)
    compared = follow(config, requests(seed), tracker, 1.6, streamed=True)
    assert compared.num > 200
    assert compared.num_same_queues > 0.9 * compared.num
    assert compared.worst_tokens <= 1
    assert tracker.correction.factor == pytest.approx(1.6, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_streams_keep_it_in_step_where_memory_is_short(seed: int) -> None:
    """Preemptions, which no client sees, do not lead it astray for long."""
    tracker = Tracker(CONFIG, A30.step_time, 0.0)
    compared = follow(CONFIG, requests(seed, num=40, within_s=8.0), tracker, 1.0, streamed=True)
    assert compared.num_same_queues > 0.6 * compared.num
    assert compared.worst_tokens <= 12


@pytest.mark.parametrize("seed", range(3))
def test_ends_alone_keep_it_near(seed: int) -> None:
    """Where only whole answers are seen, their lengths tell of the pace and put the others right."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    compared = follow(ROOMY, requests(seed), tracker, 1.3, streamed=False)
    assert compared.num_same_queues > 0.6 * compared.num
    assert tracker.correction.factor == pytest.approx(1.3, rel=0.15)


def one(name: str = "a", prompt_tokens: int = 40, arrival_s: float = 1.0) -> Request:
    """A request that may answer at length."""
    return Request(request_id=name, prompt_tokens=prompt_tokens, max_tokens=300, arrival_s=arrival_s)


def test_a_step_that_is_watched_waits_for_its_tokens() -> None:
    """However long nothing comes, the model goes no further than the engine's client has seen."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one(), streamed=True)
    tracker.run_to(50.0)
    row = tracker.engine.state.requests[tracker.requests["a"].slot]
    assert row.output_tokens == 0
    assert tracker.late_s(50.0) > 40
    tracker.produced("a", 1, 50.0)
    assert row.output_tokens == 1
    assert tracker.late_s(50.0) == 0


def test_several_tokens_at_once_are_several_steps() -> None:
    """A chunk of five tokens leaves the model five tokens on."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one(), streamed=True)
    tracker.produced("a", 1, 1.1)
    tracker.produced("a", 6, 1.3)
    row = tracker.engine.state.requests[tracker.requests["a"].slot]
    assert row.output_tokens == 6
    assert row.computed_tokens == 40 + 6  # with the step under way


def test_tokens_of_what_was_thought_to_have_ended_bring_it_back() -> None:
    """A request beyond its own limit goes on running, for as long as its tokens come."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(Request(request_id="a", prompt_tokens=40, max_tokens=3, arrival_s=1.0), streamed=True)
    for count in range(1, 8):
        tracker.produced("a", count, 1.0 + 0.1 * count)
    assert tracker.engine.running() == ["a"]
    tracker.produced("a", 8, 2.0, ended=True)
    assert tracker.engine.running() == []
    assert tracker.engine.state.engine[0].num_free_blocks == tracker.engine.num_blocks


@pytest.mark.parametrize("after_s", [0.0, 0.01, 5.0])
def test_who_leaves_leaves_nothing_behind(after_s: float) -> None:
    """Whether it waits or runs, an aborted request's seat and blocks are free again."""
    tracker = Tracker(CONFIG, A30.step_time, 0.0)
    for number in range(12):
        tracker.add(one(f"r{number}", prompt_tokens=200), streamed=False)
    tracker.run_to(1.0 + after_s)
    for number in range(12):
        tracker.drop(f"r{number}", 1.0 + after_s)
    tracker.run_to(20.0)
    assert tracker.engine.running() == tracker.engine.waiting() == []
    assert not tracker.engine.slots
    assert tracker.engine.state.engine[0].num_free_blocks == tracker.engine.num_blocks


def test_a_prompt_that_was_counted_is_as_long_as_counted() -> None:
    """A wrong estimate is put right while the prompt is still being computed."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one(prompt_tokens=300), streamed=True)
    tracker.counted("a", 30)
    tracker.produced("a", 1, 1.1)
    row = tracker.engine.state.requests[tracker.requests["a"].slot]
    assert (row.prompt_tokens, row.computed_tokens) == (30, 31)
    assert row.num_blocks == 2


def test_who_shows_no_token_though_it_should_is_sent_back() -> None:
    """A stream that never began, while others go on, is thought to wait."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one("a"), streamed=True)
    tracker.add(one("b"), streamed=True)
    for count in range(1, 30):
        tracker.produced("a", count, 1.0 + 0.05 * count)
    assert tracker.unconfirmed(3.0, 1.0) == ["b"]
    tracker.send_back(["b"])
    assert "b" not in tracker.unconfirmed(3.0, 1.0)
    tracker.produced("b", 1, 3.0)
    assert set(tracker.engine.running()) == {"a", "b"}


def test_blocks_that_nobody_known_holds_are_held_elsewhere() -> None:
    """What the engine counts as used and the model does not is not free."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.hold_elsewhere(100)
    assert tracker.engine.state.engine[0].num_free_blocks == tracker.engine.num_blocks - 100
    tracker.hold_elsewhere(0)
    assert tracker.engine.state.engine[0].num_free_blocks == tracker.engine.num_blocks


def test_shared_blocks_are_never_more_than_all() -> None:
    """Where requests share a prefix they hold less than they seem to, and give back no more than there is."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    for name in "abc":
        tracker.add(one(name, prompt_tokens=250), streamed=True)
    for count in range(1, 5):
        for name in "abc":
            tracker.produced(name, count, 1.0 + 0.2 * count)
    tracker.hold_elsewhere(20)  # of about 48
    assert tracker.engine.num_blocks - int(tracker.engine.state.engine[0].num_free_blocks) == 20
    for name in "abc":
        tracker.produced(name, 5, 2.0, ended=True)
        tracker.run_to(2.0)
        assert tracker.engine.state.engine[0].num_free_blocks <= tracker.engine.num_blocks


def test_strangers_stand_in_for_what_only_totals_show() -> None:
    """After a few readings there are as many as the engine counts beyond the known, and they go again."""
    tracker = Tracker(ROOMY, A30.step_time, 0.0)
    tracker.add(one(), streamed=True)
    strangers = UnknownRequests(tracker)
    for reading in range(READINGS):
        assert len(strangers) == 0
        strangers.suppose(4, 0, 0.08, 2.0 + reading)
    assert len(strangers) == 3
    assert len(tracker.engine.running()) == 4
    held = tracker.engine.num_blocks - int(tracker.engine.state.engine[0].num_free_blocks)
    assert held == pytest.approx(0.08 * tracker.engine.num_blocks, abs=4)
    strangers.suppose(2, 0, 0.1, 6.0)
    assert len(strangers) == 1
    strangers.suppose(1, 0, 0.0, 6.5)
    assert tracker.engine.running() == ["a"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_it_is_told_it_can_be_forecast_from(seed: int, is_async: bool) -> None:
    """Tokens out of order, totals without sense, ends of what never began: the picture contradicts itself never."""
    config = EngineConfig(
        max_num_seqs=6, max_num_batched_tokens=128, num_gpu_blocks=65, max_model_len=256, enable_prefix_caching=False,
        async_scheduling=is_async,
    )  # fmt: skip
    draw = random.Random(seed)
    tracker, now_s = Tracker(config, A30.step_time, 0.0), 0.0
    twin = Twin(config, A30.step_time, num_slots=256, track_blocks=False)
    strangers = UnknownRequests(tracker)
    for number in range(400):
        now_s += draw.choice([0.0, 0.001, 0.02, 0.3])
        names = [name for name in tracker.requests if name.startswith("r")]
        name = draw.choice(names) if names else ""
        what = draw.random()
        if not names or what < 0.15:
            asked = Request(
                request_id=f"r{number}",
                prompt_tokens=draw.randint(1, 200),
                max_tokens=draw.randint(1, 56),
                arrival_s=now_s,
            )
            tracker.add(asked, streamed=draw.random() < 0.7)
        elif what < 0.65:
            count = tracker.requests[name].num_seen + draw.choice([0, 1, 1, 1, 2, 9, 60])
            tracker.produced(name, count, now_s, ended=draw.random() < 0.1, exact=draw.random() < 0.5)
        elif what < 0.72:
            tracker.drop(name, now_s)
        elif what < 0.78:
            tracker.counted(name, draw.randint(1, 400))
        elif what < 0.84:
            strangers.suppose(draw.randint(0, 9), draw.randint(0, 5), draw.random(), now_s)
        elif what < 0.9:
            tracker.hold_elsewhere(draw.randint(0, 64))
        elif what < 0.95:
            tracker.send_back(tracker.unconfirmed(now_s, 0.1))
        tracker.run_to(now_s)
        twin.follow(shown_from(tracker, strangers.lengths(), now_s, 256))
        snapshot_from(tracker, strangers.lengths(), (), now_s)
    for name in list(tracker.requests):
        tracker.drop(name, now_s)
    tracker.hold_elsewhere(0)
    tracker.run_to(now_s + 60.0)
    assert not tracker.engine.slots
    assert tracker.engine.state.engine[0].num_free_blocks == tracker.engine.num_blocks
