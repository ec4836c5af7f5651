"""vLLM 0.7.2's rules, compared with the plain oracle, and in small examples."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from predictor.batching import settled
from predictor.config import EngineConfig
from tests.oracle import vllm_v0
from tests.oracle.comparing import expect_oracle, our_steps, scheduled
from tests.strategies import Load, examples, load_of, loads


@pytest.mark.parametrize("policy", ["fcfs", pytest.param("priority", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunked", [False, True], ids=["default", "chunked"])
def test_every_step_is_the_oracles(chunked: bool, policy: str) -> None:
    """Scheduled tokens, queues, preemptions and free blocks are equal at every step, in both modes."""
    seen: Counter[str] = Counter()

    @examples(150)
    @given(loads("vllm_v0", chunked=chunked, policy=policy))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, vllm_v0.replay_steps))

    check()
    assert min(seen["preemptions"], seen["queueing"]) > 20


def test_vllm_fcfs_is_its_default() -> None:
    """The name that ProServe gives the default: no chunked prefill, and no priorities."""

    @examples(50)
    @given(loads("vllm_fcfs"))
    def check(load: Load) -> None:
        expect_oracle(load, vllm_v0.replay_steps)

    check()
    for wrong in ({"enable_chunked_prefill": True}, {"scheduling_policy": "priority"}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: vllm_fcfs supports only "):
            settled(EngineConfig(batcher="vllm_fcfs", max_model_len=512, **wrong))


def test_prefills_go_first_and_alone() -> None:
    """A decoding request pauses while a new one is prefilled."""
    load = load_of("vllm_v0", (5, 3), (6, 2), arrivals=[0, 1])
    assert scheduled(load) == [{"a": 5}, {"b": 6}, {"a": 1, "b": 1}, {"a": 1}]


def test_admission_keeps_the_watermark() -> None:
    """A prompt waits while its blocks would leave fewer free ones than the watermark."""
    load = load_of("vllm_v0", (16, 2), (16, 2), num_gpu_blocks=8, watermark=0.13)
    assert scheduled(load) == [{"a": 16}, {"a": 1}, {"b": 16}, {"b": 1}]
    roomy = load_of("vllm_v0", (16, 2), (16, 2), num_gpu_blocks=9, watermark=0.12)
    assert scheduled(roomy)[0] == {"a": 16, "b": 16}


def test_a_decode_requires_a_free_block_always() -> None:
    """Also with room in its last block, the last request is preempted when no block is free."""
    load = load_of("vllm_v0", (5, 3), (5, 3), num_gpu_blocks=4, watermark=0.0)
    second = list(our_steps(load))[1]
    assert (second["scheduled"], second["preempted"]) == ({"a": 1}, ["b"])


def test_the_last_request_is_preempted_and_recomputed_with_its_output() -> None:
    """A preempted request is admitted again with its output as a part of its prompt."""
    load = load_of("vllm_v0", (7, 8), (7, 8), num_gpu_blocks=5, watermark=0.0)
    steps = list(our_steps(load))
    preempted = next(index for index, step in enumerate(steps) if step["preempted"])
    assert steps[preempted]["preempted"] == ["b"]
    again = next(step["scheduled"]["b"] for step in steps[preempted:] if "b" in step["scheduled"])
    assert again == 7 + sum("b" in step["scheduled"] for step in steps[:preempted])


def test_chunked_prefill_serves_decodes_first() -> None:
    """The rest of the budget goes to the started prompt, then to the next one."""
    load = load_of(
        "vllm_v0", (3, 4), (9, 2), (4, 1),
        arrivals=[0, 1, 1], enable_chunked_prefill=True, max_num_batched_tokens=8,
    )  # fmt: skip
    assert scheduled(load) == [{"a": 3}, {"a": 1, "b": 7}, {"a": 1, "b": 2, "c": 4}, {"a": 1, "b": 1}]


def test_chunked_prefill_admits_others_in_a_step_that_preempts() -> None:
    """The freed blocks can be used for a request behind the preempted one, but not for the preempted one."""
    load = load_of(
        "vllm_v0", (4, 9), (12, 4), (4, 1),
        arrivals=[0, 0, 1], num_gpu_blocks=5, watermark=0.0, enable_chunked_prefill=True,
    )  # fmt: skip
    preempting = next(step for step in our_steps(load) if step["preempted"])
    assert preempting["preempted"] == ["b"]
    assert preempting["scheduled"] == {"a": 1, "c": 4}
    assert preempting["waiting"] == ["b"]


def test_a_higher_priority_preempts_a_lower_one() -> None:
    """With priorities, a running request is preempted for a better head of the queue, which is admitted a step later."""
    load = load_of(
        "vllm_v0", (8, 6), (8, 2),
        arrivals=[0, 1], priorities=[1, 0], scheduling_policy="priority", max_num_seqs=1,
    )  # fmt: skip
    steps = list(our_steps(load))
    assert (steps[1]["scheduled"], steps[1]["preempted"]) == ({}, ["a"])
    assert steps[2]["scheduled"] == {"b": 8}
    assert steps[4]["scheduled"] == {"a": 9}


def test_equal_requests_are_not_preempted_for_each_other() -> None:
    """A head of the queue with the same priority and arrival as a running request waits."""
    load = load_of("vllm_v0", (8, 3), (8, 2), scheduling_policy="priority", max_num_seqs=1)
    for names in ("ab", "ba"):
        specs = [{**spec, "id": name} for spec, name in zip(load.requests, names, strict=True)]
        assert not any(step["preempted"] for step in our_steps(Load(engine=load.engine, requests=specs)))


def test_chunked_prefill_ignores_priorities() -> None:
    """In that mode the queue is first come, first served, whatever the policy."""
    load = load_of(
        "vllm_v0", (4, 1), (4, 1),
        priorities=[1, 0], scheduling_policy="priority", max_num_seqs=1, enable_chunked_prefill=True,
    )  # fmt: skip
    assert scheduled(load) == [{"a": 4}, {"b": 4}]
