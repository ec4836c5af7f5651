"""The corrections of a running engine model, each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.config import EngineConfig
from predictor.editable_engine import EXTRA_TOKENS, EditableEngine
from predictor.lengths import Tag
from predictor.profile import load_profile
from predictor.request import RequestFacts

A30 = load_profile("llama-2-7b-a30")
CONFIG = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=64, num_gpu_blocks=65, max_model_len=256, enable_prefix_caching=False
)


def engine_with(*names: str, config: EngineConfig = CONFIG) -> EditableEngine:
    """Make an engine with requests that arrive at once."""
    engine = EditableEngine(config, A30.step_time, 0.0)
    for name in names:
        engine.add(RequestFacts(request_id=name, prompt_tokens=40, max_tokens=20, arrival_s=0.0))
    return engine


def plan(engine: EditableEngine, num_steps: int) -> None:
    """Plan some steps; each ends the one before."""
    for _ in range(num_steps):
        assert engine.plan_step(float("inf")) is not None


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_rewound_steps_are_planned_again_as_they_were(is_async: bool, num_steps: int) -> None:
    """Nothing of a step under way stays behind."""
    engine = engine_with("a", "b", "c", config=replace(CONFIG, async_scheduling=is_async))
    plan(engine, num_steps)
    before = engine.snapshot({}, (), engine.now_s)
    num_under_way = engine.num_steps_under_way
    assert num_under_way >= 1
    engine.rewind_steps()
    assert engine.num_steps_under_way == 0
    assert not engine.is_scheduled("a")
    engine.recount_blocks(0)
    for _ in range(num_under_way):
        engine.plan_step(engine.now_s)
    again = engine.snapshot({}, (), engine.now_s)
    assert again.running == before.running
    assert again.waiting == before.waiting
    assert [step.scheduled for step in again.steps] == [step.scheduled for step in before.steps]


def test_an_ended_step_moves_the_next_one() -> None:
    """The step behind it starts when it ends, and keeps its duration."""
    engine = engine_with("a", config=replace(CONFIG, async_scheduling=True))
    plan(engine, 2)
    assert engine.num_steps_under_way == 2
    duration_s = engine._step(1).end_s - engine._step(1).start_s
    engine.end_oldest_step(5.0)
    assert engine.oldest_step().end_s == 5.0
    assert engine._step(1).start_s == 5.0
    assert engine._step(1).end_s == pytest.approx(5.0 + duration_s)


def test_a_planned_step_has_its_duration_by_the_profile() -> None:
    """The correction of the pace is not part of it."""
    plain, slow = engine_with("a"), engine_with("a")
    slow.set_pace(2.0)
    first, second = plain.plan_step(1.0), slow.plan_step(1.0)
    assert first is not None
    assert second is not None
    assert second.profile_s == pytest.approx(first.profile_s)
    assert second.end_s - second.start_s == pytest.approx(2 * (first.end_s - first.start_s))


def test_a_waiting_request_is_promoted_and_a_running_one_demoted() -> None:
    """They change places, with the blocks that they need."""
    engine = engine_with("a", "b", "c")
    plan(engine, 4)
    assert (engine.running(), engine.waiting()) == (["a", "b"], ["c"])
    engine.rewind_steps()
    engine.demote_to_waiting("b")
    assert (engine.running(), engine.waiting()) == (["a"], ["b", "c"])
    engine.promote_to_running("c", 5)
    assert (engine.running(), engine.waiting()) == (["a", "c"], ["b"])
    assert engine.output_tokens("c") == 5
    assert engine.recount_blocks(0) == engine.num_held_blocks() == 2 * 3  # 44 tokens each, in blocks of 16
    engine.demote_to_waiting("b")  # it waits already
    assert engine.waiting() == ["b"]
    plan(engine, 3)
    assert engine.output_tokens("c") == 5 + 2


def test_a_request_past_its_predicted_end_gets_more_tokens() -> None:
    """Its limit grows with it, up to the model's length."""
    engine = engine_with("a")
    plan(engine, 2)
    engine.rewind_steps()
    engine.promote_to_running("a", 30)
    assert (engine.predicted_tokens("a"), engine.max_tokens("a")) == (30 + EXTRA_TOKENS, 30 + EXTRA_TOKENS)
    engine.promote_to_running("a", 210)
    assert engine.predicted_tokens("a") == CONFIG.max_model_len - 40
    engine.promote_to_running("a", 10_000)
    assert engine.output_tokens("a") == CONFIG.max_model_len - 2


def test_a_prompt_is_corrected_only_while_it_is_computed() -> None:
    """And only to a length that the engine can serve."""
    engine = engine_with("a")
    assert not engine.can_correct_prompt("a", 40)  # it is that long
    assert not engine.can_correct_prompt("a", CONFIG.max_model_len)
    assert engine.can_correct_prompt("a", 250)
    plan(engine, 1)
    engine.rewind_steps()
    engine.correct_prompt("a", 250)
    assert engine.max_tokens("a") == CONFIG.max_model_len - 250
    plan(engine, 5)  # of 64 tokens each
    assert engine.output_tokens("a") == 1
    assert not engine.can_correct_prompt("a", 30)


def test_free_blocks_stay_between_none_and_all() -> None:
    """Blocks that others hold, or that requests share, count as far as there are any."""
    engine = engine_with("a")
    plan(engine, 2)
    head = engine.state.engine[0]
    held = engine.recount_blocks(0)
    assert head.num_free_blocks == engine.num_blocks - held
    engine.recount_blocks(10_000)
    assert head.num_free_blocks == 0
    engine.recount_blocks(-10_000)
    assert head.num_free_blocks == engine.num_blocks


def test_the_oldest_step_is_visible_by_streams_and_by_last_tokens() -> None:
    """Of a request that is not streamed, only the end is observed."""
    engine = engine_with("a")
    assert not engine.oldest_step_is_visible()
    plan(engine, 2)
    assert not engine.oldest_step_is_visible()
    assert engine.num_tokens_of_oldest_step() == 1
    assert engine.will_produce_token("a")
    engine.mark_visible("a", visible=True)
    assert engine.oldest_step_is_visible()
    engine.mark_visible("a", visible=False)
    engine.end_answer_at("a", engine.output_tokens("a") + 1)
    assert engine.oldest_step_is_visible()


def test_a_snapshot_has_corrected_lengths() -> None:
    """Of prompts as corrected, and of answers as predicted."""
    engine = engine_with("a", "b")
    plan(engine, 1)
    engine.rewind_steps()
    engine.correct_prompt("a", 30)
    engine.recount_blocks(0)
    extra = RequestFacts(request_id="c", prompt_tokens=9)
    snapshot = engine.snapshot({"a": (12, None), "b": (0, Tag(median_tokens=8.0))}, (extra,), 1.0)
    a, b = (one.request for one in (*snapshot.running, *snapshot.waiting))
    assert (a.prompt_tokens, a.output_tokens, a.tag) == (30, 12, None)
    assert (b.prompt_tokens, b.output_tokens, b.tag) == (40, None, Tag(median_tokens=8.0))
    assert snapshot.reserved == (extra,)
