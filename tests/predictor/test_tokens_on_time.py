"""The number of tokens that come by their deadlines, counted by the loop as a plain step-by-step model counts it."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate, groupby, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.request import RequestFacts, Slo
from predictor.snapshot_of_engine import snapshot_of
from predictor.step_time import Curve, StepTime
from tests.oracle import faster_transformer, lightllm, orca, ordered_rules, sarathi, sglang, vllm_v0, vllm_v1
from tests.oracle.engine import one_second
from tests.strategies import AFFINE, ONE_SECOND, ORDERED, Load, affine_seconds, examples, loads

LONGEST_RUN = 2000
ORACLES: dict[str, Any] = {
    "vllm_v1": vllm_v1,
    "vllm_v0": vllm_v0,
    "vllm_fcfs": vllm_v0,
    "sarathi": sarathi,
    "orca": orca,
    "sglang": sglang,
    "lightllm": lightllm,
    "faster_transformer": faster_transformer,
    **dict.fromkeys(ORDERED, ordered_rules),
}
TTFT_TARGETS = (None, 1 / 64, 1 / 8, 0.5, 1.0, 3.0, 8.0, 64.0)
TPOT_TARGETS = (None, 1 / 64, 1 / 48, 1 / 32, 1 / 24, 1.0, 1.5, 4.0)
# The generic engine stands for no real one, and has no plain model.
every_modelled_batcher = pytest.mark.parametrize("batcher", [name for name in BATCHERS if name != "generic"])


@st.composite
def loads_with_targets(draw: st.DrawFn, batcher: str) -> Load:
    """Draw a load whose requests have targets, or one of both, or none."""
    load = draw(loads(batcher, ending=True))
    for spec in load.requests:
        spec["ttft_slo_s"], spec["tpot_slo_s"] = (
            draw(st.sampled_from(TTFT_TARGETS)),
            draw(st.sampled_from(TPOT_TARGETS)),
        )
    return load


def counted(spec: dict[str, Any], token_s: list[float]) -> int | None:
    """Count the tokens of a response that came by their deadlines."""
    if spec["ttft_slo_s"] is None:
        return None
    count, due_s = 0, spec["arrival_s"] + spec["ttft_slo_s"]
    for number, time_s in enumerate(token_s):
        if number == 0:
            count += time_s <= due_s
        elif spec["tpot_slo_s"] is not None:
            count += time_s <= due_s + number * spec["tpot_slo_s"]
    return count


def token_times(load: Load, seconds: Any) -> dict[str, list[float]]:
    """Run the plain model of a load's batcher to its end; return when each request's tokens came."""
    times: dict[str, list[float]] = {spec["id"]: [] for spec in load.requests}
    batcher = load.engine["batcher"]
    read = () if batcher in ORDERED else ("ttft_slo_s", "tpot_slo_s", "weight", "request_class")
    specs = [
        {**{name: value for name, value in spec.items() if name not in read}, "token_s": times[spec["id"]]}
        for spec in load.requests
    ]
    for _ in islice(ORACLES[batcher].replay_steps(load.engine, specs, seconds), LONGEST_RUN):
        pass
    return times


@every_modelled_batcher
def test_tokens_on_time_are_those_of_the_plain_model(batcher: str) -> None:
    """From event to event, step by step, and cut in two by a snapshot, the loop counts what the plain model counts."""
    seen = Counter[str]()

    @examples(60 if len(BATCHERS[batcher].kv_layouts) < 3 else 90)
    @given(loads_with_targets(batcher), st.floats(0.0, 1.0))
    def check(load: Load, cut: float) -> None:
        for step_time, seconds in ((AFFINE, affine_seconds), (ONE_SECOND, one_second)):
            try:
                times = token_times(load, seconds)
            except sglang.OutOfPagesError:  # SGLang itself fails here
                continue
            fast, stepped = load.loaded(step_time), load.loaded(step_time)
            fast.advance()
            while stepped.next_step() is not None:
                pass
            for spec in load.requests:
                expected = counted(spec, times[spec["id"]])
                assert fast.outcome(spec["id"]).tokens_on_time == expected
                assert stepped.outcome(spec["id"]).tokens_on_time == expected
                seen["none" if expected is None else "all" if expected == len(times[spec["id"]]) else "some"] += 1
            halfway = load.loaded(step_time)
            halfway.advance(cut * fast.now_s)
            resumed = engine_from(snapshot_of(halfway, halfway.now_s), step_time)
            resumed.advance()
            for name in resumed.slots:
                assert resumed.outcome(name).tokens_on_time == fast.outcome(name).tokens_on_time

    check()
    assert min(seen["none"], seen["all"], seen["some"]) > 20


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_response_that_catches_up_and_falls_behind_again(async_scheduling: bool) -> None:
    """In one long repetition the first tokens are late, the next ones on time, and the last ones late again."""
    constant_s, slope_s, prompt, output = 0.01, 2e-6, 100, 3000
    step_time = StepTime(constant_s=constant_s, decode_slope=Curve(x=(1.0,), y=(slope_s,)))
    config = EngineConfig(max_model_len=4096, num_gpu_blocks=1000, async_scheduling=async_scheduling)
    decode_s = [constant_s + slope_s * (prompt + number) for number in range(1, output)]
    token_s = list(accumulate(decode_s, initial=constant_s))
    shapes = Counter[str]()
    draw = random.Random(7)
    for number in range(300):
        ttft_s, tpot_s = draw.uniform(0.001, 0.011), draw.uniform(0.0101, 0.0165)
        engine = Engine(config, step_time)
        slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
        engine.add(RequestFacts(request_id="a", prompt_tokens=prompt, output_tokens=output, slo=slo))
        engine.advance(draw.choice((token_s[-1], draw.uniform(0.0, token_s[-1]))))  # the repetition may be cut in two
        engine.advance()
        on_time = [time_s <= ttft_s + index * tpot_s for index, time_s in enumerate(token_s)]
        assert engine.outcome("a").tokens_on_time == sum(on_time), number
        shapes["".join("+" if one else "-" for one, _ in groupby(on_time))] += 1
    assert min(shapes[shape] for shape in ("+", "+-", "-+", "-+-", "-")) >= 3, shapes
