"""Sarathi-Serve's rules, compared with the plain oracle, and in small examples."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from tests.oracle import sarathi
from tests.oracle.comparing import expect_oracle, our_steps, scheduled
from tests.strategies import Load, examples, load_of, loads


def test_every_step_is_the_oracles() -> None:
    """Scheduled tokens, queues, preemptions and free blocks are equal at every step."""
    seen: Counter[str] = Counter()

    @examples(250)
    @given(loads("sarathi"))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, sarathi.replay_steps))

    check()
    assert min(seen["preemptions"], seen["queueing"]) > 20


def test_decodes_never_wait_and_chunks_fill_the_budget() -> None:
    """Each step has a token of every decoding request, then prompts in order, within the rest of the budget."""
    load = load_of("sarathi", (4, 4), (9, 2), (5, 1), arrivals=[0, 1, 1], max_num_batched_tokens=8)
    assert scheduled(load) == [{"a": 4}, {"a": 1, "b": 7}, {"a": 1, "b": 2, "c": 5}, {"a": 1, "b": 1}]


def test_all_blocks_of_a_prompt_are_allocated_at_once() -> None:
    """Its first chunk is admitted only where blocks for the whole prompt are free above the watermark."""
    load = load_of("sarathi", (4, 3), (16, 1), num_gpu_blocks=5, watermark=0.0, max_num_batched_tokens=8)
    assert scheduled(load)[0] == {"a": 4, "b": 4}
    tight = load_of("sarathi", (4, 3), (16, 1), num_gpu_blocks=5, watermark=0.2, max_num_batched_tokens=8)
    assert scheduled(tight)[0] == {"a": 4}


def test_admission_continues_in_a_step_that_preempts() -> None:
    """The preempted request is at the head of the queue, so it is admitted first, at once if it fits."""
    load = load_of("sarathi", (2, 9), (8, 6), num_gpu_blocks=4, watermark=0.0)
    preempting = next(step for step in our_steps(load) if step["preempted"])
    assert (preempting["preempted"], preempting["scheduled"]) == (["b"], {"a": 1, "b": 10})
