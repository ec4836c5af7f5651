"""LightLLM's rules, compared with the plain oracle, and in small examples."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from tests.oracle import lightllm
from tests.oracle.comparing import expect_oracle, our_steps, scheduled
from tests.strategies import Load, examples, load_of, loads


def test_every_step_is_the_oracles() -> None:
    """Scheduled tokens, queues and free blocks are equal at every step."""
    seen: Counter[str] = Counter()

    @examples(250)
    @given(loads("lightllm"))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, lightllm.replay_steps))

    check()
    assert seen["queueing"] > 20


def test_the_queue_is_checked_every_ten_decodes() -> None:
    """A request that arrives while others decode waits for the next check, however many blocks are free."""
    load = load_of("lightllm", (4, 30), (4, 1), arrivals=[0, 3])
    assert [step["step"] for step in our_steps(load) if "b" in step["scheduled"]] == [11]
    late = load_of("lightllm", (4, 30), (4, 1), arrivals=[0, 13])
    assert [step["step"] for step in our_steps(late) if "b" in step["scheduled"]] == [21]


def test_a_check_without_an_admission_counts() -> None:
    """Without an admission, there are ten more decodes before the next check."""
    load = load_of("lightllm", (4, 13), (4, 30), (4, 1), arrivals=[0, 0, 1], max_num_seqs=2)
    assert [step["step"] for step in our_steps(load) if "c" in step["scheduled"]] == [21]


def test_admission_considers_the_future_peak() -> None:
    """A prompt that fits now waits where the running requests with it will exceed the pool; none is preempted."""
    load = load_of("lightllm", (4, 8), (4, 8), num_gpu_blocks=5)
    steps = list(our_steps(load))
    assert steps[0]["scheduled"] == {"a": 4}
    assert not any(step["preempted"] for step in steps)


def test_requests_that_end_soon_reduce_the_peak() -> None:
    """The peak counts the requests that are left when each one ends: a short one adds little to a long one."""
    load = load_of("lightllm", (4, 12), (4, 4), num_gpu_blocks=5)
    assert scheduled(load)[0] == {"a": 4, "b": 4}
