"""Static batching, compared with the plain oracle, and in small examples."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from tests.oracle import faster_transformer
from tests.oracle.comparing import expect_oracle, scheduled
from tests.strategies import Load, examples, load_of, loads


def test_every_step_is_the_oracles() -> None:
    """Scheduled tokens, queues and free blocks are equal at every step, and no request is preempted."""
    seen: Counter[str] = Counter()

    @examples(200)
    @given(loads("faster_transformer"))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, faster_transformer.replay_steps))

    check()
    assert seen["queueing"] > 20
    assert seen["preemptions"] == 0


def test_no_request_joins_before_the_last_of_a_batch_has_finished() -> None:
    """A free seat stays empty until the longest response has ended."""
    load = load_of("faster_transformer", (4, 4), (4, 1), (4, 1), max_num_seqs=2)
    assert scheduled(load) == [{"a": 4, "b": 4}, {"a": 1}, {"a": 1}, {"a": 1}, {"c": 4}]


def test_a_batch_has_the_requests_that_wait_when_it_is_formed() -> None:
    """A request that arrives a moment later waits for the next one."""
    load = load_of("faster_transformer", (4, 2), (4, 1), arrivals=[0, 0.5])
    assert scheduled(load) == [{"a": 4}, {"a": 1}, {"b": 4}]
