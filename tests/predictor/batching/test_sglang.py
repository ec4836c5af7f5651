"""SGLang's rules, compared with the plain oracle, and as traces worked out by hand from its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import Any

import pytest
from hypothesis import given

from predictor.batching import settled
from predictor.config import EngineConfig
from tests.oracle import sglang
from tests.oracle.comparing import our_steps, scheduled
from tests.oracle.engine import Step, one_second
from tests.strategies import AFFINE, MAX_STEPS, ONE_SECOND, Load, affine_seconds, crowded, examples, load_of, loads


def until_out_of_pages(steps: Iterator[Step]) -> Iterator[Step | None]:
    """Yield the oracle's steps; None where SGLang fails for lack of memory."""
    try:
        yield from steps
    except sglang.OutOfPagesError:
        yield None


def expect_same(load: Load, step_time: Any, seconds: Any) -> Counter[str]:
    """Compare a run with the oracle's, step by step; return event counts."""
    seen: Counter[str] = Counter()
    theirs = until_out_of_pages(sglang.replay_steps(load.engine, load.requests, seconds))
    for our, their in islice(zip_longest(our_steps(load, step_time), theirs, fillvalue={}), MAX_STEPS):
        if their is None:
            seen["failures"] += 1
            break
        assert our
        assert their
        for name in ("start_s", "end_s"):
            assert our.pop(name) == pytest.approx(their.pop(name), rel=1e-9)
        our["running"], their["running"] = sorted(our["running"]), sorted(their["running"])
        assert our == their
        assert list(our["scheduled"]) == list(their["scheduled"])
        seen["steps"] += 1
        seen["retractions"] += len(our["preempted"])
        seen["queueing"] += bool(our["waiting"] and our["running"])
    return seen


@pytest.mark.parametrize("is_async", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_every_step_is_the_oracles(chunked: bool, is_async: bool) -> None:
    """Scheduled tokens, queues, retractions and free pages are equal at every step, with both event loops."""
    seen: Counter[str] = Counter()

    @examples(25)
    @given(loads("sglang", chunked=chunked, is_async=is_async))
    def check(load: Load) -> None:
        seen.update(expect_same(load, AFFINE, affine_seconds))
        seen.update(expect_same(crowded(load), ONE_SECOND, one_second))

    check()
    assert min(seen["retractions"], seen["queueing"]) > 20
    assert seen["failures"] < 20


# Golden traces: `NAME: tokens` of each step, from `scheduler.py`, `schedule_policy.py` and `schedule_batch.py` of 0.5.23.

NORMAL = {"async_scheduling": False, "block_size": 1, "num_gpu_blocks": 256}


def test_prefills_go_first_and_alone() -> None:
    """`get_next_batch_to_run`: a new prompt interrupts the decodes of all others."""
    load = load_of("sglang", (5, 3), (6, 2), arrivals=[0, 1], **NORMAL)
    assert scheduled(load) == [{"a": 5}, {"b": 6}, {"a": 1, "b": 1}, {"a": 1}]


def test_a_chunked_prompt_interrupts_decodes_until_it_ends() -> None:
    """`add_chunked_req`: the chunks of a long prompt follow each other; the rest of the last one goes to the queue."""
    load = load_of("sglang", (4, 3), (20, 2), (3, 1), arrivals=[0, 1, 1], max_num_batched_tokens=8, **NORMAL)
    assert scheduled(load) == [{"a": 4}, {"b": 8}, {"b": 8}, {"b": 4, "c": 3}, {"a": 1, "b": 1}, {"a": 1}]


def test_mixed_chunks_carry_decodes() -> None:
    """`mix_with_running`: with enable_mixed_chunk, decodes take their tokens from the chunk's budget, and go behind it."""
    options = {"mixed_chunk": 1.0}
    load = load_of(
        "sglang", (4, 3), (20, 2), arrivals=[0, 1], max_num_batched_tokens=8, batcher_options=options, **NORMAL
    )
    steps = scheduled(load)
    assert steps == [{"a": 4}, {"b": 7, "a": 1}, {"b": 7, "a": 1}, {"b": 6}, {"b": 1}]
    assert list(steps[1]) == ["b", "a"]


def test_admission_reserves_a_part_of_the_running_responses() -> None:
    """`rem_total_tokens`: 0.7 of what a may still produce is reserved, so b waits until a request has left."""
    wanted = {**NORMAL, "max_model_len": 64}
    # a holds 10 and reserves 0.7 · 39 = 27.3; b needs 10 + 10 + 1 < n - 10 - 27.3
    waits = load_of("sglang", (10, 40), (10, 10), arrivals=[0, 1], **{**wanted, "num_gpu_blocks": 58})
    assert scheduled(waits)[:2] == [{"a": 10}, {"a": 1}]
    enters = load_of("sglang", (10, 40), (10, 10), arrivals=[0, 1], **{**wanted, "num_gpu_blocks": 59})
    assert scheduled(enters)[:2] == [{"a": 10}, {"b": 10}]


def test_a_full_batch_admits_nothing_until_a_request_leaves() -> None:
    """`batch_is_full`: once a request did not fit, the queue is not looked at again before a running one ends."""
    options = {"new_token_ratio_decay_steps": 1.0}  # from the first decode on b would fit
    load = load_of(
        "sglang", (10, 12), (10, 10), arrivals=[0, 1], batcher_options=options,
        **{**NORMAL, "num_gpu_blocks": 38},
    )  # fmt: skip
    assert [sorted(step) for step in scheduled(load)][:13] == [["a"]] * 12 + [["b"]]


def test_retraction_takes_the_shortest_outputs_to_the_end_of_the_queue() -> None:
    """`retract_decode`: the request with the fewest output tokens goes; of equal ones, that with the longest prompt."""
    options = {"init_new_token_ratio": 0.0, "retract_decode_steps": 2.0}
    load = load_of(
        "sglang", (4, 12), (5, 12), (6, 1), arrivals=[0, 0, 2],
        batcher_options=options, **{**NORMAL, "num_gpu_blocks": 25, "enable_prefix_caching": False},
    )  # fmt: skip
    steps = list(our_steps(load))
    retracting = next(step for step in steps if step["preempted"])
    assert retracting["preempted"] == ["b"]
    assert retracting["scheduled"] == {"a": 1}
    again = next(step for step in steps if step["step"] > retracting["step"] and "b" in step["scheduled"])
    done = sum("b" in step["scheduled"] for step in steps[: retracting["step"]])
    assert again["scheduled"]["b"] == 5 + done


def test_a_retraction_sets_the_ratio() -> None:
    """`estimate_new_token_ratio_after_retract`: output and 20 tokens for each that is left, over the maximum output."""
    options = {"init_new_token_ratio": 0.0, "retract_decode_steps": 2.0}
    load = load_of(
        "sglang", (4, 12), (5, 12), batcher_options=options,
        **{**NORMAL, "num_gpu_blocks": 25, "enable_prefix_caching": False},
    )  # fmt: skip
    engine = load.loaded()
    while (record := engine.next_step()) is not None and not record.preempted:
        pass
    output = engine.outcome("a").output_tokens
    assert float(engine.state.engine[0].memory[0]) == pytest.approx((output + 2) / 13)


def test_overlap_plans_before_the_last_result() -> None:
    """`event_loop_overlap`: a slot that frees now is used two steps later; a last token by length costs no more steps."""
    load = load_of(
        "sglang", (4, 2), (4, 1), max_num_seqs=1, **{**NORMAL, "async_scheduling": True},
    )  # fmt: skip
    steps = list(our_steps(load))
    assert [step["scheduled"] for step in steps] == [{"a": 4}, {"a": 1}, {"b": 4}]
    assert [step["start_s"] for step in steps] == [0.0, 1.0, 2.0]


def test_overlap_waits_instead_of_an_empty_step() -> None:
    """Where nothing can be planned, the loop processes the result in flight: no empty batch is executed."""
    load = load_of("sglang", (4, 1), (4, 1), arrivals=[0, 0.5], **{**NORMAL, "async_scheduling": True})
    assert [(step["scheduled"], step["start_s"]) for step in our_steps(load)] == [({"a": 4}, 0.0), ({"b": 4}, 1.0)]


def test_a_prompt_is_shared_once_its_prefill_has_ended() -> None:
    """`checkpoint_kv_cache`: in the same batch both compute the prefix, one copy is kept; later requests hit it."""
    load = load_of("sglang", (8, 4), (8, 4), (8, 2), arrivals=[0, 0, 1], hashes=[list(range(1, 9))] * 3, **NORMAL)
    steps = list(our_steps(load))
    assert [step["scheduled"] for step in steps[:2]] == [{"a": 8, "b": 8}, {"c": 1}]
    assert steps[0]["free_blocks"] == 256 - 16
    assert steps[1]["free_blocks"] == 256 - 8 - 1  # a and b share 8 pages, c hits 7 of them


def test_outputs_are_cached_when_a_request_ends() -> None:
    """`release_kv_cache`: prompt and output but the last token are inserted; a follow-up hits them."""
    history = list(range(1, 12))
    load = load_of("sglang", (8, 4), (12, 1), arrivals=[0, 9], hashes=[history, [*history, 99]], **NORMAL)
    assert scheduled(load)[-1] == {"b": 1}


def test_longest_prefix_goes_first() -> None:
    """`_sort_by_longest_prefix`: with lpm a request with cached tokens overtakes; with fcfs it does not."""
    first, others = list(range(1, 9)), list(range(101, 109))
    for policy, order in ((0.0, ["b", "c"]), (1.0, ["c", "b"])):
        load = load_of(
            "sglang", (8, 1), (8, 1), (8, 1), arrivals=[0, 1, 1], hashes=[first, others, first], max_num_seqs=1,
            batcher_options={"longest_prefix_match": policy}, **NORMAL,
        )  # fmt: skip
        assert [name for step in scheduled(load)[1:] for name in step] == order


def test_requests_that_share_an_uncached_prefix_wait_for_the_first() -> None:
    """In-batch prefix caching: with lpm the second of two equal long prompts goes behind all others."""
    shared, other = list(range(1, 41)), list(range(101, 141))
    load = load_of(
        "sglang", (40, 1), (40, 1), (40, 1), hashes=[shared, shared, other], max_num_seqs=1,
        batcher_options={"longest_prefix_match": 1.0}, **NORMAL,
    )  # fmt: skip
    assert [name for step in scheduled(load) for name in step] == ["a", "b", "c"]  # b hits what a has computed by then
    wide = Load(engine={**load.engine, "max_num_seqs": 2, "max_num_batched_tokens": 100}, requests=load.requests)
    assert list(scheduled(wide)[0]) == ["a", "c"]


def test_pages_hold_several_tokens() -> None:
    """With a page size above 1, prompts are charged and chunks are cut in whole pages, and prefixes are hit in them."""
    load = load_of(
        "sglang", (10, 2), (10, 1), arrivals=[0, 2], hashes=[[1, 2], [1, 2]], async_scheduling=False,
        block_size=4, max_num_batched_tokens=8,
    )  # fmt: skip
    assert scheduled(load) == [{"a": 8}, {"a": 2}, {"b": 2}, {"a": 1}]


def test_wrong_settings_are_refused() -> None:
    """One line names the field."""
    for wrong, message in (
        ({"scheduling_policy": "priority"}, "^scheduling_policy: sglang supports only fcfs"),
        ({"max_num_batched_tokens": 100, "block_size": 16}, "^max_num_batched_tokens: 100 must be a multiple"),
        ({"batcher_options": {"lpm": 1.0}}, r"^batcher_options\."),
        ({"watermark": 0.1}, "^watermark: sglang supports only 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            settled(EngineConfig(batcher="sglang", **wrong))
