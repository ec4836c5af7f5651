"""BROS, its round robin and its KV layouts in small examples; `test_ordered` compares every step with an oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given

from predictor.batching import settled
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.request import BEST_EFFORT, REAL_TIME, RequestFacts, Slo
from predictor.snapshot import TwoEndedBlock
from predictor.snapshot_of_engine import snapshot_of
from predictor.step_time import StepTime
from tests.inspecting import expect_blocks_conserved, expect_nothing_left
from tests.oracle import ordered_rules
from tests.oracle.comparing import expect_oracle
from tests.strategies import AFFINE, ONE_SECOND, Load, examples, loads

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 64, "num_gpu_blocks": 65}
COPIED = {"kv_bytes_per_token": 1000, "host_link_bytes_per_s": 4000.0}  # four tokens a second


def engine_of(*requests: tuple[str, int, int, float], step_time: StepTime = ONE_SECOND, **settings: Any) -> Engine:
    """Return an engine with requests of a class, prompt and response tokens, and arrival: a, b, c and so on."""
    engine = Engine(EngineConfig(**{"batcher": "bros", **SMALL, **settings}), step_time)
    for name, (request_class, prompt, answer, arrival_s) in zip("abcdefgh", requests, strict=False):
        slo = Slo(ttft_s=8.0, tpot_s=4.0) if request_class == REAL_TIME else None
        engine.add(
            RequestFacts(
                request_id=name, prompt_tokens=prompt, output_tokens=answer, arrival_s=arrival_s,
                request_class=request_class, slo=slo,
            )
        )  # fmt: skip
    return engine


def scheduled(engine: Engine) -> list[dict[str, int]]:
    """List what the steps schedule."""
    return [record.scheduled for record in iter(engine.next_step, None)]


def test_real_time_goes_first_and_best_effort_fills() -> None:
    """Whoever came first, as long as the step has tokens; prompts are computed whole."""
    engine = engine_of((BEST_EFFORT, 40, 2, 0), (REAL_TIME, 30, 1, 0), (BEST_EFFORT, 34, 1, 0))
    assert scheduled(engine) == [{"b": 30, "c": 34}, {"a": 40}, {"a": 1}]


def test_the_least_time_left_goes_first() -> None:
    """A decode whose token is due after a prompt's first comes behind it."""
    engine = engine_of((REAL_TIME, 4, 3, 0), (REAL_TIME, 4, 1, 0), batcher_options={"base_batch_size": 1})
    engine.state.facts[engine.slots["b"]].ttft_slo_s = 3.0
    assert list(scheduled(engine)[0]) == ["b"]


def test_the_batch_doubles_and_falls_back() -> None:
    """From its base to the maximum, and to the base again when real-time requests take too long together."""
    answers = [(BEST_EFFORT, 1, 6, 0)] * 8
    sizes = [len(step) for step in scheduled(engine_of(*answers, batcher_options={"base_batch_size": 2}))]
    assert sizes[:4] == [2, 4, 8, 8]
    slow = StepTime(constant_s=0.1, token_s=1.0)
    engine = engine_of(*[(REAL_TIME, 3, 2, 0)] * 4, step_time=slow, batcher_options={"base_batch_size": 2})
    steps = [(len(record.scheduled), int(engine.state.engine[0].memory[0])) for record in iter(engine.next_step, None)]
    assert steps[:3] == [(2, 4), (1, 2), (1, 2)]


def test_no_step_is_longer_than_the_first_deadline_allows() -> None:
    """Where real-time requests can be on time, best effort does not make a step longer than the least time left."""
    num_bounded = 0

    @examples(150)
    @given(loads("bros"))
    def check(load: Load) -> None:
        nonlocal num_bounded
        settings = {**load.engine, "estimator_factor": 1.0, "estimator_noise": 0.0, "estimator_momentum": 0.0}
        settings["batcher_options"] = {**settings["batcher_options"], "eta": 0.0}
        load = replace(load, engine=settings)
        engine = load.loaded(AFFINE)
        targets = {spec["id"]: spec for spec in load.requests}
        for record in islice(iter(engine.next_step, None), 200):
            if len(record.scheduled) < 2:
                continue
            decodes = [
                targets[name]["tpot_slo_s"]
                for name in record.scheduled
                if targets[name]["request_class"] == REAL_TIME
                and targets[name]["ttft_slo_s"]
                and engine.outcome(name).output_tokens > 0
                and targets[name]["tpot_slo_s"]
            ]
            if decodes:  # a decode has its target left at most
                assert record.end_s - record.start_s <= min(decodes) + 1e-9
                num_bounded += 1

    check()
    assert num_bounded > 10


def test_round_robin_alternates() -> None:
    """A step of each class in turn, and all of them for a class alone."""
    engine = engine_of((REAL_TIME, 4, 3, 0), (BEST_EFFORT, 4, 2, 0), batcher="bros_round_robin")
    assert scheduled(engine) == [{"a": 4}, {"b": 4}, {"a": 1}, {"b": 1}, {"a": 1}]


@pytest.mark.parametrize("batcher", ["bros", "vllm_v1", "edf"])
def test_swapped_requests_continue_where_they_were(batcher: str) -> None:
    """No token is computed twice, and the step that copies lasts as long as the copies."""
    engine = engine_of(
        (BEST_EFFORT, 8, 9, 0), (BEST_EFFORT, 7, 6, 0), batcher=batcher, kv_layout="swap", num_gpu_blocks=6, **COPIED
    )  # fmt: skip
    records = list(iter(engine.next_step, None))
    assert any(record.preempted for record in records)
    computed = Counter[str]()
    for record in records:
        computed.update(record.scheduled)
        assert record.end_s - record.start_s >= 1.0
    assert computed == {"a": 16, "b": 12}
    (out,) = [record for record in records if record.preempted]
    name = out.preempted[0]
    before = sum(record.scheduled.get(name, 0) for record in records[: out.step])
    assert out.end_s - out.start_s == pytest.approx(max(1.0, before / 4))
    back = next(record for record in records[out.step :] if name in record.scheduled)
    assert back.end_s - back.start_s == pytest.approx(max(1.0, before / 4))
    expect_nothing_left(engine)


def two_ended(*requests: tuple[str, int, int, float], **settings: Any) -> Engine:
    """Return an engine with shared blocks."""
    return engine_of(*requests, **{"kv_layout": "bidirectional", **COPIED, **settings})


def blocks_of(engine: Engine) -> list[tuple[str | None, int, str | None, int, int]]:
    """Return the blocks in use: who fills them from the left and from the right, and what is in host memory."""
    return [
        (one.left, one.left_tokens, one.right, one.right_tokens, one.checkpointed_tokens)
        for one in snapshot_of(engine, engine.now_s).two_ended_blocks
    ]


def test_a_real_time_request_takes_the_emptiest_block_of_best_effort() -> None:
    """It leaves the other's tokens where they are until it needs their slots; only these are copied."""
    engine = two_ended((BEST_EFFORT, 5, 3, 0), (REAL_TIME, 2, 4, 1), num_gpu_blocks=3)
    engine.next_step()
    assert blocks_of(engine) == [(None, 0, "a", 4, 0), (None, 0, "a", 1, 0)]
    engine.next_step()  # both are served
    assert blocks_of(engine) == [(None, 0, "a", 4, 0), ("b", 2, "a", 2, 0)]
    record = engine.next_step()  # b needs a slot of a, which has no other
    assert record is not None
    assert record.scheduled == {"b": 1}
    assert blocks_of(engine) == [(None, 0, "a", 4, 0), ("b", 3, "a", 2, 1)]
    assert snapshot_of(engine, engine.now_s).steps[0].swapped_tokens == 1
    engine.next_step()
    assert blocks_of(engine) == [(None, 0, "a", 4, 0), ("b", 4, "a", 2, 2)]
    engine.next_step()  # b starts another block, over a's tokens
    assert blocks_of(engine)[0] == ("b", 1, "a", 4, 1)
    engine.next_step()  # b has ended, and all of a comes back
    assert snapshot_of(engine, engine.now_s).steps[0].swapped_tokens == 3
    assert [one[4] for one in blocks_of(engine)] == [0, 0]
    engine.advance()
    expect_nothing_left(engine)


def test_a_replaced_request_gives_back_the_slot_of_its_token() -> None:
    """A decode that can wait makes room for best effort in a step, also where both share blocks."""
    step_time = StepTime(constant_s=0.01, token_s=0.02)
    engine = two_ended(
        (REAL_TIME, 4, 20, 0), (REAL_TIME, 4, 20, 0), (BEST_EFFORT, 1, 20, 0.3), (BEST_EFFORT, 1, 20, 0.3),
        step_time=step_time, batcher_options={"base_batch_size": 2}, num_gpu_blocks=60,
    )  # fmt: skip
    engine.state.facts["tpot_slo_s"][engine.slots["a"]] = 0.06
    engine.state.facts["tpot_slo_s"][engine.slots["b"]] = 2.0
    records = []
    while (record := engine.next_step()) is not None:
        records.append(record)
        expect_blocks_conserved(engine)
    assert any("b" not in record.scheduled and "b" in record.running for record in records[2:20])
    expect_nothing_left(engine)


def test_the_real_time_request_with_the_most_time_left_is_dropped() -> None:
    """Where real-time requests fill the left of every block."""
    engine = two_ended((REAL_TIME, 7, 9, 0), (REAL_TIME, 8, 9, 0), num_gpu_blocks=6)
    engine.state.facts[engine.slots["b"]].tpot_slo_s = 5.0
    dropped = [name for record in iter(engine.next_step, None) for name in record.preempted]
    assert set(dropped) == {"b"}
    expect_nothing_left(engine)


@pytest.mark.slow
def test_shared_blocks_are_the_oracles_and_conserved() -> None:
    """At every step, with shortage of blocks and tokens in host memory."""
    num_checkpointed = 0

    @examples(150)
    @given(loads("bros", layout="bidirectional", tick_s=0.004, max_requests=12))
    def check(load: Load) -> None:
        nonlocal num_checkpointed
        expect_oracle(load, ordered_rules.replay_steps)
        engine = load.loaded(AFFINE)
        for _ in iter(engine.next_step, None):
            expect_blocks_conserved(engine)
            num_checkpointed += bool(engine.state.two_ended_blocks.checkpointed.any())
        expect_nothing_left(engine)

    check()
    assert num_checkpointed > 100


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kv_layout": "both"}, "kv_layout: must be one of plain, swap, bidirectional, not 'both'"),
        ({"kv_layout": "swap"}, "kv_bytes_per_token: must be above 0 with kv_layout swap"),
        ({"kv_layout": "swap", "batcher": "orca", **COPIED}, "kv_layout: orca supports only plain, not swap"),
        (
            {"kv_layout": "bidirectional", "batcher": "edf", **COPIED},
            "kv_layout: edf supports only plain, swap, not bidirectional",
        ),
        (
            {"kv_layout": "bidirectional", "batcher": "bros", "enable_prefix_caching": True, **COPIED},
            "enable_prefix_caching: kv_layout bidirectional supports only False, not True",
        ),
        ({"host_link_bytes_per_s": 0.0}, "host_link_bytes_per_s: must be above 0, not 0.0"),
        ({"kv_bytes_per_token": -1}, "kv_bytes_per_token: must be at least 0 and at most 2147483647, not -1"),
        ({"batcher": "bros", "async_scheduling": True}, "async_scheduling: bros supports only False, not True"),
        (
            {"batcher": "bros", "batcher_options": {"base_batch_size": 0}},
            "batcher_options.base_batch_size: must be at least 1, not 0",
        ),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], error: str) -> None:
    """One line names the field."""
    with pytest.raises(ValueError, match=f"^{error}$"):
        settled(EngineConfig(**settings))


def test_wrong_shared_blocks_are_refused() -> None:
    """A snapshot's blocks hold what its requests have computed, within their slots."""
    engine = two_ended((BEST_EFFORT, 5, 3, 0), (REAL_TIME, 2, 4, 1), num_gpu_blocks=3)
    for _ in range(3):
        engine.next_step()
    snapshot = snapshot_of(engine, engine.now_s)
    first, second = snapshot.two_ended_blocks

    def error_of(*blocks: TwoEndedBlock) -> str:
        with pytest.raises(ValueError, match="two_ended_blocks") as caught:
            engine_from(replace(snapshot, two_ended_blocks=blocks), ONE_SECOND)
        return str(caught.value)

    assert error_of(first) == "two_ended_blocks: hold 4 of the 6 tokens of 'a'"
    assert error_of(first, first).startswith("two_ended_blocks[1].block_id: 0 lies outside")
    assert error_of(first, replace(second, checkpointed_tokens=0)).startswith("two_ended_blocks[1].checkpointed_tokens")
    assert error_of(first, replace(second, left="a")).startswith("two_ended_blocks[1].left: 'a' is no running request")
    with pytest.raises(ValueError, match="left_tokens: must be above 0 where a request has this side, else 0"):
        TwoEndedBlock(block_id=0, left_tokens=1)
    with pytest.raises(ValueError, match="checkpointed_tokens: 3 are more than right_tokens"):
        TwoEndedBlock(block_id=0, right="a", right_tokens=2, checkpointed_tokens=3)
