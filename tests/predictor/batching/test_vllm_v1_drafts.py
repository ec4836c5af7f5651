"""Speculative decoding in the engine model, compared with the oracle that is compared with vLLM itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.request import RequestFacts
from predictor.snapshot_of_engine import snapshot_of
from predictor.speculation import METHODS, configured_drafts
from predictor.step_time import Curve, StepTime
from tests.oracle import vllm_v1
from tests.oracle.comparing import expect_same_steps, our_steps, scheduled
from tests.strategies import MAX_STEPS, ONE_SECOND, Load, examples, load_of, loads

NGRAM = {"speculative_method": "ngram", "num_speculative_tokens": 3}


@st.composite
def speculating(draw: st.DrawFn, load: Load) -> Load:
    """Give an engine speculative decoding; sums of its expectations are exact in binary."""
    method, count = draw(st.sampled_from(tuple(METHODS))), draw(st.integers(1, 4))
    engine = load.engine
    threshold = engine["long_prefill_token_threshold"]
    more = {
        "speculative_method": method,
        "num_speculative_tokens": count,
        "speculative_acceptance": draw(st.sampled_from((0.0, 0.5, 0.75, 1.0))),
        "speculative_proposals": draw(st.sampled_from((0.5, 1.0))),
        # vLLM fails where the threshold cuts a request that is filled up
        "long_prefill_token_threshold": min(max(threshold, 1 + count), engine["max_model_len"]) if threshold else 0,
        "max_num_batched_tokens": engine["max_num_batched_tokens"] + METHODS[method].draft_slots + count,
        "num_gpu_blocks": engine["num_gpu_blocks"] + -(-count // engine["block_size"]),
    }
    return Load(engine={**engine, **more}, requests=load.requests)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_every_step_is_the_oracles(is_async: bool) -> None:
    """Scheduled tokens, queues, preemptions and free blocks are equal at every step, as drafts are accepted or not."""
    seen: Counter[str] = Counter()

    @examples(120)
    @given(loads("vllm_v1", is_async=is_async, layout="plain").flatmap(speculating))
    def check(load: Load) -> None:
        theirs = list(islice(vllm_v1.replay_steps(load.engine, load.requests), MAX_STEPS))
        for step in theirs:
            seen["drafts"] += bool(step.pop("drafts"))
            seen["preemptions"] += len(step["preempted"])
        expect_same_steps(islice(our_steps(load), MAX_STEPS), theirs)

    check()
    assert min(seen["drafts"], seen["preemptions"]) > 20


def test_accepted_tokens_save_steps() -> None:
    """With all drafts accepted, each decode step but the first brings four tokens."""
    load = load_of("vllm_v1", (5, 9), **NGRAM, speculative_acceptance=1.0)
    assert scheduled(load) == [{"a": 5}, {"a": 4}, {"a": 4}]


def test_rejected_tokens_are_computed_in_vain() -> None:
    """With all drafts rejected, each step brings one token, and computes four."""
    load = load_of("vllm_v1", (5, 3), **NGRAM, speculative_acceptance=0.0)
    assert scheduled(load) == [{"a": 5}, {"a": 4}, {"a": 4}]
    engine = load.loaded()
    engine.advance()
    assert engine.outcome("a").output_tokens == 3


def test_the_budget_cuts_drafts() -> None:
    """Draft tokens count as tokens of the step."""
    load = load_of("vllm_v1", (3, 9), (3, 9), **NGRAM, max_num_seqs=4, max_num_batched_tokens=6)
    assert scheduled(load)[1] == {"a": 4, "b": 2}


def test_drafters_with_a_cache_need_blocks_ahead() -> None:
    """A request of a full block holds another one for the tokens that the drafter writes."""
    ngram = next(our_steps(load_of("vllm_v1", (4, 2), **NGRAM)))
    eagle = next(our_steps(load_of("vllm_v1", (4, 2), **{**NGRAM, "speculative_method": "eagle"})))
    assert ngram["free_blocks"] - eagle["free_blocks"] == 1


def test_the_last_block_of_a_hit_is_computed_again_for_its_hidden_states() -> None:
    """EAGLE drops the last block that is hit; a request that needs one token is filled up with draft tokens."""
    requests: dict[str, Any] = {"hashes": [[1, 2], [1, 2]], "arrivals": [0, 1]}
    assert scheduled(load_of("vllm_v1", (9, 2), (9, 2), **NGRAM, **requests))[1]["b"] == 4
    eagle = {**NGRAM, "speculative_method": "eagle"}
    assert scheduled(load_of("vllm_v1", (9, 2), (9, 2), **eagle, **requests))[1]["b"] == 5


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("acceptance", [0.2, 0.62, 0.9])
def test_expected_tokens_add_up_to_the_mean(acceptance: float, is_async: bool) -> None:
    """A long response takes as many steps as the mean number of tokens of a step says."""
    load = load_of(
        "vllm_v1", (5, 1000), **NGRAM, speculative_acceptance=acceptance, max_model_len=2000, num_gpu_blocks=600,
        async_scheduling=is_async,
    )  # fmt: skip
    mean = 1 + configured_drafts(3, acceptance, 1.0).accepted[3]
    assert len(scheduled(load)) - 1 == pytest.approx(999 / mean, abs=2)


def test_drafts_that_are_seldom_proposed_save_as_little() -> None:
    """Half the steps have a draft."""
    load = load_of(
        "vllm_v1", (5, 1000), **NGRAM, speculative_acceptance=1.0, speculative_proposals=0.5, max_model_len=2000,
        num_gpu_blocks=600,
    )  # fmt: skip
    assert len(scheduled(load)) - 1 == pytest.approx(999 / 2.5, abs=2)


def test_what_is_learnt_changes_the_steps_to_come() -> None:
    """An engine whose drafts turn out to fail needs a step for each token."""
    load = load_of("vllm_v1", (5, 41), **NGRAM, speculative_acceptance=1.0)
    engine = load.loaded()
    engine.expect_drafts(configured_drafts(3, 0.0, 1.0))
    engine.advance()
    assert engine.outcome("a").finished_s == 41


def test_a_verified_decode_reads_its_context_once() -> None:
    """The time of a step counts the draft tokens, and one context for each request."""
    step_time = StepTime(constant_s=1.0, token_s=2.0**-6, decode_slope=Curve(x=(0.0, 64.0), y=(2.0**-10, 2.0**-10)))
    steps = our_steps(load_of("vllm_v1", (8, 9), **NGRAM, draft_step_s=0.5), step_time)
    _, second = islice(steps, 2)
    assert second["end_s"] - second["start_s"] == 1 + 4 * 2.0**-6 + 12 * 2.0**-10 + 0.5


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_snapshot_continues_with_the_same_steps(is_async: bool) -> None:
    """Draft tokens of the next step, and of those in flight, are in the snapshot."""
    load = load_of("vllm_v1", (5, 30), (7, 30), **NGRAM, speculative_acceptance=0.0, async_scheduling=is_async)
    engine = load.loaded()
    for _ in range(4):
        engine.next_step()
    copy = engine_from(snapshot_of(engine, engine.now_s), ONE_SECOND)
    ours, theirs = iter(engine.next_step, None), iter(copy.next_step, None)
    for step, other in zip(ours, theirs, strict=True):
        assert (step.scheduled, step.end_s, step.free_blocks) == (other.scheduled, other.end_s, other.free_blocks)


def test_a_forecast_is_what_happens() -> None:
    """Where acceptance is as expected, the forecast of a request is its real time."""
    load = load_of("vllm_v1", (5, 30), **NGRAM, speculative_acceptance=0.75)
    engine = load.loaded()
    engine.next_step()
    arriving = RequestFacts(request_id="new", prompt_tokens=9, output_tokens=20)
    (forecast,) = Forecaster(engine).forecast([arriving], engine.now_s)
    engine.add(replace(arriving, arrival_s=engine.now_s))
    engine.advance()
    outcome = engine.outcome("new")
    assert (forecast.ttft_s, forecast.e2e_s) == (outcome.ttft_s, outcome.e2e_s)


def test_other_local_schedulers_refuse_speculation() -> None:
    """What they would do with draft tokens is not known."""
    with pytest.raises(ValueError, match="speculative_method: sarathi does not schedule draft tokens"):
        Engine(EngineConfig(batcher="sarathi", speculative_method="ngram", num_speculative_tokens=2), ONE_SECOND)


def test_a_step_must_have_room_beside_a_draft_model() -> None:
    """A draft model uses one input token for each request."""
    config = EngineConfig(
        speculative_method="draft_model", num_speculative_tokens=2, max_num_batched_tokens=1, max_num_seqs=1
    )
    with pytest.raises(ValueError, match="max_num_batched_tokens: 1 leaves no token beside the 1 that"):
        Engine(config, ONE_SECOND)
