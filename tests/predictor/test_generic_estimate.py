"""The parameters of a generic engine, learnt from the traffic of engines whose parameters are known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.generic_estimate import FIRST_GUESS, GenericEstimator, GenericParameters, generic_profile, is_generic
from predictor.request import RequestFacts

TRUE = GenericParameters(step_s=0.008, request_s=0.0006, prefill_s=0.015, prefill_token_s=0.00004)


def learnt_from(true: GenericParameters, *, num_requests: int, pause_s: float, seed: int = 1) -> GenericEstimator:
    """Let an engine with these parameters serve random requests, and show their tokens to an estimator."""
    engine = Engine(EngineConfig(**{**true.settings, "num_gpu_blocks": 1 << 16, "max_model_len": 8192}), true.step_time)
    draw, estimator, now_s = random.Random(seed), GenericEstimator(), 0.0
    arrivals: list[RequestFacts] = []
    for number in range(num_requests):
        now_s += draw.expovariate(1 / pause_s)
        arrivals.append(
            RequestFacts(
                request_id=str(number), prompt_tokens=draw.randint(20, 2000), output_tokens=draw.randint(5, 120),
                arrival_s=now_s,
            )
        )  # fmt: skip
    for request in arrivals:
        engine.add(request)
    waiting, seen = list(arrivals), dict.fromkeys((one.request_id for one in arrivals), 0)
    while (record := engine.next_step()) is not None:
        while waiting and waiting[0].arrival_s <= record.start_s:
            request = waiting.pop(0)
            estimator.arrive(request.request_id, request.prompt_tokens, request.arrival_s)
        engine.advance(record.end_s)
        show(engine, estimator, seen, record.end_s)
    engine.advance()
    show(engine, estimator, seen, engine.now_s)
    return estimator


def show(engine: Engine, estimator: GenericEstimator, seen: dict[str, int], now_s: float) -> None:
    """Show the tokens that have come since the last step."""
    for name in list(seen):
        outcome = engine.outcome(name)
        if outcome.output_tokens > seen[name]:
            seen[name] = outcome.output_tokens
            if outcome.finished_s is None:
                estimator.receive(name, outcome.output_tokens, now_s)
            else:
                estimator.end(name, outcome.output_tokens, now_s, completed=True)
                del seen[name]


def test_step_times_are_learnt() -> None:
    """From small batches: decodes within 20 %, prefills within 30 %, and the error is known."""
    got = learnt_from(TRUE, num_requests=40, pause_s=0.4).parameters()
    for num in (1, 4):
        assert got.step_s + num * got.request_s == pytest.approx(TRUE.step_s + num * TRUE.request_s, rel=0.2)
    assert got.prefill_s + 1000 * got.prefill_token_s == pytest.approx(0.015 + 0.04, rel=0.3)
    assert got.num_requests == 40
    assert got.error < 0.3


def test_requests_that_are_not_streamed_teach_the_time_of_a_decode_alone() -> None:
    """Their first token is not seen: all their time would count as that of their prompt."""
    estimator, clock = GenericEstimator(), 0.0
    for number in range(20):
        tokens = 20 + 5 * number
        estimator.arrive(f"r{number}", 100, clock, streamed=False)
        clock += FIRST_GUESS.prefill_s + 100 * FIRST_GUESS.prefill_token_s + 0.01 * (tokens - 1)
        estimator.end(f"r{number}", tokens, clock, completed=True)
    got = estimator.parameters()
    assert (got.prefill_s, got.prefill_token_s) == (FIRST_GUESS.prefill_s, FIRST_GUESS.prefill_token_s)
    assert got.step_s + got.request_s == pytest.approx(0.01, rel=0.05)
    assert got.max_num_seqs is None
    assert got.num_requests == 20
    assert got.error < 0.1


def test_a_long_request_that_is_not_streamed_does_not_stop_the_others() -> None:
    """While its tokens are not seen, those of streamed ones are learnt from, as decodes beside it."""
    estimator = GenericEstimator()
    estimator.arrive("long", 100, 0.0, streamed=False)
    clock = 1.0
    for number in range(10):
        estimator.arrive(f"r{number}", 100, clock)
        clock += 0.05
        for token in range(1, 30):
            clock += 0.01
            estimator.receive(f"r{number}", token, clock)
        estimator.end(f"r{number}", 30, clock + 0.01, completed=True)
        clock += 0.5
    got = estimator.parameters()
    assert got.step_s + 2 * got.request_s == pytest.approx(0.01, rel=0.1)
    assert got.prefill_s + 100 * got.prefill_token_s == pytest.approx(0.06, rel=0.2)


def test_nothing_learnt_is_said() -> None:
    """Before any request has ended the error is unknown, which counts as 100 %."""
    assert GenericEstimator().parameters() == FIRST_GUESS
    assert FIRST_GUESS.error == 1.0
    assert is_generic(generic_profile())


def test_the_number_of_seats_is_learnt_from_requests_that_waited() -> None:
    """An engine that runs four requests at once lets others wait; one that was never full has no limit."""
    true = GenericParameters(**{**_plain(TRUE), "max_num_seqs": 4})
    calm = learnt_from(true, num_requests=12, pause_s=3.0).parameters()
    assert calm.max_num_seqs is None
    estimator = learnt_from(true, num_requests=12, pause_s=3.0)
    for number in range(40):  # a burst
        estimator.arrive(f"b{number}", 100, 1000.0)
    clock = 1000.0
    for number in range(40):
        clock += 0.8
        estimator.receive(f"b{number}", 1, clock)
        if number >= 3:
            estimator.end(f"b{number - 3}", 30, clock + 0.1, completed=True)
    assert estimator.parameters().max_num_seqs == 4


@pytest.mark.parametrize("num_whole", [0, 5])
@pytest.mark.parametrize("prefill_first", [False, True])
def test_interrupted_decodes_are_noticed(prefill_first: bool, num_whole: int) -> None:
    """While a long prompt is computed the tokens of others flow, or they do not; some are not streamed."""
    estimator = GenericEstimator()
    clock = 0.0
    for number in range(num_whole):
        estimator.arrive(f"whole{number}", 50, clock, streamed=False)
    for number in range(12):
        estimator.arrive(f"a{number}", 50, clock)
        for token in range(1, 20):
            clock += 0.02
            estimator.receive(f"a{number}", token, clock)
        estimator.arrive(f"b{number}", 4000, clock)
        for step in range(20):
            clock += 0.02
            if not prefill_first:
                estimator.receive(f"a{number}", 20 + step, clock)
        estimator.receive(f"b{number}", 1, clock)
        for name in ("a", "b"):
            estimator.end(f"{name}{number}", 50, clock + 0.02, completed=True)
        clock += 1.0
    assert estimator.parameters().prefill_first == prefill_first


def test_aborted_and_unknown_requests_teach_nothing() -> None:
    """They leave no trace."""
    estimator = GenericEstimator()
    estimator.receive("unknown", 3, 1.0)
    estimator.arrive("a", 10, 1.0)
    estimator.end("a", 0, 2.0, completed=False)
    estimator.end("a", 5, 2.0, completed=True)
    assert estimator.parameters() == FIRST_GUESS
    assert estimator.num_decoding == 0


def _plain(parameters: GenericParameters) -> dict[str, Any]:
    names = ("step_s", "request_s", "prefill_s", "prefill_token_s")
    return {name: getattr(parameters, name) for name in names}
