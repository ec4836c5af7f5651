"""Sarathi-Serve's rules, against the plain oracle and by small examples."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from tests.oracle import sarathi
from tests.oracle.comparing import expect_oracle, our_steps, scheduled
from tests.strategies import Load, examples, load_of, loads


def test_every_step_is_the_oracles() -> None:
    """Scheduled tokens, queues, preemptions and free blocks agree at every step."""
    seen: Counter[str] = Counter()

    @examples(250)
    @given(loads("sarathi"))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, sarathi.replay_steps))

    check()
    assert min(seen["preemptions"], seen["queueing"]) > 20


def test_decodes_never_wait_and_chunks_fill_the_budget() -> None:
    """Each step has a token of all that decode, then as much of the prompts, in order, as the budget leaves."""
    load = load_of("sarathi", (4, 4), (9, 2), (5, 1), arrivals=[0, 1, 1], max_num_batched_tokens=8)
    assert scheduled(load) == [{"a": 4}, {"a": 1, "b": 7}, {"a": 1, "b": 2, "c": 5}, {"a": 1, "b": 1}]


def test_a_prompt_takes_its_blocks_as_a_whole() -> None:
    """Its first chunk enters only where blocks for all of it are free above the watermark."""
    load = load_of("sarathi", (4, 3), (16, 1), num_gpu_blocks=5, watermark=0.0, max_num_batched_tokens=8)
    assert scheduled(load)[0] == {"a": 4, "b": 4}
    tight = load_of("sarathi", (4, 3), (16, 1), num_gpu_blocks=5, watermark=0.2, max_num_batched_tokens=8)
    assert scheduled(tight)[0] == {"a": 4}


def test_admission_goes_on_in_a_step_that_preempts() -> None:
    """The victim heads the queue, so it is the first to come back, at once if it fits."""
    load = load_of("sarathi", (2, 9), (8, 6), num_gpu_blocks=4, watermark=0.0)
    preempting = next(step for step in our_steps(load) if step["preempted"])
    assert (preempting["preempted"], preempting["scheduled"]) == (["b"], {"a": 1, "b": 10})
