"""Pairs of a prefill and a decode instance that `block` chooses, beside all pairs, on engines of the engine model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from predictor.config import CONSUMER, PRODUCER, EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.profile import load_profile
from predictor.request import DECODE, PREFILL, SERVE, RequestFacts
from scheduler.candidate import CandidateStatus
from scheduler.candidates import RequestIndicators
from scheduler.core import SchedulerCore
from scheduler.instance_table import InstanceTable
from scheduler.instances import InstanceDirectory
from scheduler.intentions import Answer, Ask, AskLegs, Placed, Reserve
from scheduler.placement import PlacementRequest

NUM_CLUSTERS = 40
PROMPT_TOKENS, OUTPUT_TOKENS = 700, 120


def engine(kv_role: str, num_running: int, rng: random.Random) -> Engine:
    """An engine in the middle of requests."""
    config = EngineConfig(
        max_num_seqs=16,
        max_num_batched_tokens=512,
        num_gpu_blocks=900,
        max_model_len=2048,
        kv_role=kv_role,
        kv_bytes_per_token=524_288,
        kv_transfer_bytes_per_s=5e9,
    )
    made = Engine(config, load_profile("llama-2-7b-a30").step_time)
    for number in range(num_running):
        prompt_tokens, output_tokens = rng.randint(20, 900), rng.randint(5, 300)
        made.add(RequestFacts(request_id=f"r{number}", prompt_tokens=prompt_tokens, output_tokens=output_tokens))
    made.advance(rng.uniform(0.1, 2.0))
    return made


class Cluster:
    """Three prefill and three decode instances, whose forecasts are made when they are asked for."""

    def __init__(self, seed: int) -> None:
        """Load them at random."""
        rng = random.Random(seed)
        self.roles = {"p0": "prefill", "p1": "prefill", "p2": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}
        self.forecasters = {
            name: Forecaster(engine(PRODUCER if role == "prefill" else CONSUMER, rng.randint(0, 24), rng))
            for name, role in self.roles.items()
        }

    def answer(self, name: str, leg: str, in_s: float = 0.0) -> Answer:
        """Forecast a leg."""
        forecaster = self.forecasters[name]
        facts = RequestFacts(
            request_id="new",
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            arrival_s=forecaster.engine.now_s,
            leg=leg,
            in_s=in_s,
        )
        (forecast,) = forecaster.forecast([facts], forecaster.engine.now_s)
        return Answer(CandidateStatus.FORECAST, forecast)

    def e2e_s(self, name: str, leg: str, in_s: float = 0.0) -> float:
        """The end of a leg."""
        forecast = self.answer(name, leg, in_s).forecast
        assert forecast is not None
        return forecast.e2e_s

    def decided_e2e_s(self, policy: str) -> float:
        """The predicted end of a request that a policy places."""
        directory = InstanceDirectory(InstanceTable(self.roles), self.roles)
        core = SchedulerCore(policy, directory, random=lambda: 0.5)
        indicators = RequestIndicators(prompt_tokens=PROMPT_TOKENS, tag_tokens=OUTPUT_TOKENS)
        decision = core.decision(PlacementRequest(indicators=indicators))
        intention = decision.start(0.0)
        while not isinstance(intention, Placed):
            if isinstance(intention, Ask | AskLegs):
                answers = {n: self.answer(n, ask.leg, ask.in_s) for ask in intention.asks for n in ask.instance_ids}
                intention = decision.answers(answers, 0.0)
            else:
                assert isinstance(intention, Reserve)
                intention = decision.reserved(10.0, 0.0)
        forecast = decision.placement.forecast
        assert forecast is not None
        return forecast.e2e_s

    def best_e2e_s(self, *, whole: bool) -> float:
        """The earliest end of every pair, and of the whole request anywhere."""
        hand_over_s = 0.003
        prefills = [name for name, role in self.roles.items() if role == "prefill"]
        decodes = [name for name, role in self.roles.items() if role == "decode"]
        arrivals_s = [self.e2e_s(name, PREFILL) + hand_over_s for name in prefills]
        pairs = [self.e2e_s(name, DECODE, in_s) for name in decodes for in_s in arrivals_s]
        return min([*pairs, *(self.e2e_s(name, SERVE) for name in decodes if whole)])


@pytest.mark.parametrize(("policy", "whole"), [("block", True), ("block: disaggregate = 'always'", False)])
def test_one_prefill_instance_for_all_pairs_is_as_good_as_all_pairs(policy: str, whole: bool) -> None:
    """Engines are full of other requests, and a decode leg that arrives earlier does not end later there."""
    for seed in range(NUM_CLUSTERS):
        cluster = Cluster(seed)
        assert cluster.decided_e2e_s(policy) == pytest.approx(cluster.best_e2e_s(whole=whole), rel=1e-6), seed


def test_forecasts_of_pairs_are_what_the_engines_then_do() -> None:
    """The prefill leg ends when it was predicted, and so does the decode leg that arrives after it."""
    cluster = Cluster(1)
    prefill_s = cluster.e2e_s("p0", PREFILL)
    in_s = prefill_s + 0.003
    predicted_s = cluster.e2e_s("d0", DECODE, in_s)
    facts = RequestFacts(request_id="new", prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)
    ends_s = []
    for name, leg, arrives_s in (("p0", PREFILL, 0.0), ("d0", DECODE, in_s)):
        there = cluster.forecasters[name].engine
        start_s = there.now_s
        there.advance(start_s + arrives_s)
        there.add(replace(facts, leg=leg, arrival_s=start_s + arrives_s))
        there.advance()
        ends_s.append(there.outcome("new").finished_s - start_s)
    assert ends_s == [pytest.approx(prefill_s, rel=0.01), pytest.approx(predicted_s, rel=0.01)]
