"""Orca's rules, compared with the plain oracle, and in small examples."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from tests.oracle import orca
from tests.oracle.comparing import expect_oracle, our_steps, scheduled
from tests.strategies import Load, examples, load_of, loads


def test_every_step_is_the_oracles() -> None:
    """Scheduled tokens, queues and free blocks are equal at every step, and no request is preempted."""
    seen: Counter[str] = Counter()

    @examples(200)
    @given(loads("orca"))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, orca.replay_steps))

    check()
    assert seen["queueing"] > 20
    assert seen["preemptions"] == 0


def test_an_iteration_mixes_decodes_with_whole_prompts() -> None:
    """A new request joins the next iteration with its whole prompt."""
    load = load_of("orca", (5, 3), (9, 2), arrivals=[0, 1])
    assert scheduled(load) == [{"a": 5}, {"a": 1, "b": 9}, {"a": 1, "b": 1}]


def test_memory_is_reserved_for_the_longest_response() -> None:
    """`max_tokens` count from the start, however early a request really ends."""
    load = load_of("orca", (4, 8), (4, 2), num_gpu_blocks=4)
    load.requests[0]["output_tokens"] = 2
    first, *_ = our_steps(load)
    assert (first["scheduled"], first["free_blocks"]) == ({"a": 4}, 1)


def test_a_prompt_longer_than_the_budget_is_admitted_alone() -> None:
    """Otherwise it would never be admitted; the next one waits for another iteration."""
    load = load_of("orca", (12, 1), (3, 1), max_num_batched_tokens=8)
    assert scheduled(load) == [{"a": 12}, {"b": 3}]
