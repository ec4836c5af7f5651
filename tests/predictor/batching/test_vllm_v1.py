"""vLLM's rules, compared with an oracle that `tests/conformance` compares with vLLM itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from tests.oracle import vllm_v1
from tests.oracle.comparing import expect_oracle, our_steps, scheduled
from tests.strategies import Load, examples, load_of, loads


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_every_step_is_the_oracles(chunked: bool, policy: str) -> None:
    """Scheduled tokens, queues, preemptions and free blocks are equal at every step, for all rules."""
    seen: Counter[str] = Counter()

    @examples(150)
    @given(loads("vllm_v1", chunked=chunked, policy=policy))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, vllm_v1.replay_steps))

    check()
    assert min(seen["preemptions"], seen["queueing"]) > 20


def test_running_requests_go_first_and_a_prompt_fills_the_budget() -> None:
    """A chunk of the new prompt shares the step with the decode."""
    load = load_of("vllm_v1", (3, 3), (9, 2), arrivals=[0, 1], max_num_batched_tokens=8)
    assert scheduled(load) == [{"a": 3}, {"a": 1, "b": 7}, {"a": 1, "b": 2}, {"b": 1}]


def test_a_long_prefill_is_cut_at_the_threshold_unless_alone() -> None:
    """The threshold leaves budget for other requests, and does not apply without them."""
    load = load_of("vllm_v1", (9, 1), (9, 1), long_prefill_token_threshold=4)
    assert scheduled(load) == [{"a": 4, "b": 4}, {"a": 4, "b": 4}, {"a": 1, "b": 1}]
    assert scheduled(load_of("vllm_v1", (9, 1), long_prefill_token_threshold=4)) == [{"a": 9}]


def test_a_long_prefill_alone_was_cut_until_0_30() -> None:
    """From 0.31 on the threshold does not apply to a request that is alone."""
    load = load_of("vllm_v1", (9, 1), long_prefill_token_threshold=4, vllm_version="0.30.0")
    assert scheduled(load) == [{"a": 4}, {"a": 4}, {"a": 1}]
    assert scheduled(load_of("vllm_v1", (9, 1), long_prefill_token_threshold=4, vllm_version="0.31.0")) == [{"a": 9}]


def test_an_adaptive_threshold_is_at_least_a_fair_share_of_a_step() -> None:
    """Two requests get half of the tokens each, where the threshold is lower."""
    load = load_of(
        "vllm_v1", (9, 1), (9, 1), long_prefill_token_threshold=2, max_num_batched_tokens=12,
        long_prefill_token_threshold_adaptive=True,
    )  # fmt: skip
    assert scheduled(load) == [{"a": 6, "b": 6}, {"a": 3, "b": 3}]


def test_a_shared_prefix_is_computed_once() -> None:
    """Full blocks can be hit from the step that schedules them; the last token is always computed."""
    load = load_of("vllm_v1", (8, 1), (8, 1), (9, 1), hashes=[[1, 2], [1, 2], [1, 2]])
    assert scheduled(load) == [{"a": 8, "b": 4, "c": 1}]


def test_shared_prefixes_have_no_effect_without_caching() -> None:
    """An engine without prefix caching ignores hashes."""
    load = load_of("vllm_v1", (8, 1), (8, 1), hashes=[[1, 2], [1, 2]], enable_prefix_caching=False)
    assert scheduled(load) == [{"a": 8, "b": 8}]


def test_async_scheduling_plans_a_step_ahead() -> None:
    """The second step is planned before the first has ended, and starts at its end."""
    first, second, *_ = our_steps(load_of("vllm_v1", (4, 3), async_scheduling=True))
    assert (first["end_s"], second["start_s"]) == (1.0, 1.0)
    assert second["scheduled"] == {"a": 1}


def test_an_early_end_costs_async_scheduling_a_slot() -> None:
    """A request that ends before `max_tokens` is still in the step that is already planned."""
    load = load_of("vllm_v1", (4, 2), async_scheduling=True)
    load.requests[0]["max_tokens"] = 8
    assert scheduled(load) == [{"a": 4}, {"a": 1}, {"a": 1}]


@pytest.mark.parametrize(("reserve", "first"), [(True, {"a": 8}), (False, {"a": 8, "b": 8})])
def test_a_whole_prompt_must_fit_where_configured(reserve: bool, first: dict[str, int]) -> None:
    """With `scheduler_reserve_full_isl`, a first chunk is admitted only if the whole prompt fits."""
    load = load_of(
        "vllm_v1", (8, 1), (16, 1),
        num_gpu_blocks=6, max_num_batched_tokens=16, scheduler_reserve_full_isl=reserve, max_num_seqs=2,
    )  # fmt: skip
    assert scheduled(load)[0] == first


def test_the_lowest_ranked_request_is_preempted_even_for_itself() -> None:
    """With priorities, the lowest ranked request is preempted, also where it needs the blocks itself."""
    load = load_of(
        "vllm_v1", (4, 9), (8, 8),
        priorities=[1, 0], scheduling_policy="priority", num_gpu_blocks=5, max_num_batched_tokens=12,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert any(step["preempted"] == ["a"] and "a" not in step["scheduled"] for step in our_steps(load))


@pytest.mark.parametrize(("version", "goes_on"), [("0.32.0", False), ("0.33.0", True)])
def test_after_a_request_that_preempts_itself_the_others_go_on_since_0_33(version: str, goes_on: bool) -> None:
    """Until 0.32 it ended the step, which others could have used."""
    load = load_of(
        "vllm_v1", (4, 9), (5, 8),
        arrivals=[0, 1], priorities=[1, 0], scheduling_policy="priority", num_gpu_blocks=5, max_num_batched_tokens=12,
        enable_prefix_caching=False, vllm_version=version,
    )  # fmt: skip
    (step,) = [step for step in our_steps(load) if step["preempted"] == ["a"]]
    assert step["scheduled"] == ({"b": 1} if goes_on else {})
