"""LightLLM's rules, against the plain oracle and by small examples."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from tests.oracle import lightllm
from tests.oracle.comparing import expect_oracle, our_steps, scheduled
from tests.strategies import Load, examples, load_of, loads


def test_every_step_is_the_oracles() -> None:
    """Scheduled tokens, queues and free blocks agree at every step."""
    seen: Counter[str] = Counter()

    @examples(250)
    @given(loads("lightllm"))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, lightllm.replay_steps))

    check()
    assert seen["queueing"] > 20


def test_the_queue_is_looked_at_every_ten_decodes() -> None:
    """Who arrives while others decode waits for the next look, however much is free."""
    load = load_of("lightllm", (4, 30), (4, 1), arrivals=[0, 3])
    assert [step["step"] for step in our_steps(load) if "b" in step["scheduled"]] == [11]
    late = load_of("lightllm", (4, 30), (4, 1), arrivals=[0, 13])
    assert [step["step"] for step in our_steps(late) if "b" in step["scheduled"]] == [21]


def test_a_look_in_vain_is_a_look() -> None:
    """When nobody could enter, ten more decodes go by before the next look."""
    load = load_of("lightllm", (4, 13), (4, 30), (4, 1), arrivals=[0, 0, 1], max_num_seqs=2)
    assert [step["step"] for step in our_steps(load) if "c" in step["scheduled"]] == [21]


def test_admission_looks_at_the_peak_to_come() -> None:
    """A prompt that fits now waits where those that run would outgrow the pool with it, and none is preempted."""
    load = load_of("lightllm", (4, 8), (4, 8), num_gpu_blocks=5)
    steps = list(our_steps(load))
    assert steps[0]["scheduled"] == {"a": 4}
    assert not any(step["preempted"] for step in steps)


def test_requests_that_end_soon_make_room_for_the_peak() -> None:
    """What counts is how many are left when each ends: a short one beside a long one needs little more."""
    load = load_of("lightllm", (4, 12), (4, 4), num_gpu_blocks=5)
    assert scheduled(load)[0] == {"a": 4, "b": 4}
