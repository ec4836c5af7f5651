"""Forecasts of an engine whose draft tokens are accepted at random, with what is learnt of them meanwhile."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.profile import load_profile
from predictor.request import RequestFacts
from predictor.speculation import AcceptanceLearner, DraftTotals
from services.emulator.speculation import DraftDraws

A30 = load_profile("llama-2-7b-a30")
ASSUMED, REAL = (0.2, 1.0), (0.75, 0.5)  # acceptance and share of proposals


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_forecasts_are_right_on_average_though_acceptance_is_random(is_async: bool) -> None:
    """The configured values are far off; after some requests, the forecasts are not."""
    config = EngineConfig(
        speculative_method="ngram", num_speculative_tokens=3, speculative_acceptance=ASSUMED[0],
        speculative_proposals=ASSUMED[1], num_gpu_blocks=2000, max_num_seqs=16, async_scheduling=is_async,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(config, A30.step_time)
    draws = DraftDraws(replace(config, speculative_acceptance=REAL[0], speculative_proposals=REAL[1]), seed=1)
    learner, forecaster, rng = AcceptanceLearner(config.configured_drafts), Forecaster(engine), random.Random(2)
    forecasts: dict[str, float] = {}
    now_s = 0.0
    for number in range(40):
        now_s += rng.expovariate(1.0)
        advance(engine, draws, now_s)
        counts = draws.counts
        learner.observe(
            DraftTotals(
                num_drafts=counts.num_drafts, num_draft_tokens=counts.num_draft_tokens,
                accepted=tuple(counts.accepted), num_chances=counts.num_chances,
            )
        )  # fmt: skip
        engine.expect_drafts(learner.expected)
        request = RequestFacts(
            request_id=str(number), prompt_tokens=rng.randint(5, 200), output_tokens=rng.randint(50, 250),
            arrival_s=now_s,
        )  # fmt: skip
        (forecast,) = forecaster.forecast([request], now_s, delays=False)
        forecasts[request.request_id] = forecast.e2e_s
        engine.add(request)
    advance(engine, draws, 1e9)
    errors = []
    for name in list(forecasts)[8:]:
        e2e_s = engine.outcome(name).e2e_s
        assert e2e_s is not None
        errors.append(forecasts[name] / e2e_s - 1)
    assert statistics.median(map(abs, errors)) < 0.12, errors
    assert abs(statistics.mean(errors)) < 0.12, errors


def advance(engine: Engine, draws: DraftDraws, until_s: float) -> None:
    """Run an engine until a time, and draw what is accepted in each of its steps."""
    while engine.next_step(until_s) is not None:
        head = engine.state.engine[0]
        draws.draw(engine.state, (int(head.oldest) + int(head.num_in_flight) - 1) % 2)
