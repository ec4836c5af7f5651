"""Ranks that step together: passes, waves, and forecasts on one of them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from predictor.config import EngineConfig
from predictor.data_parallel import DataParallelRank, LockstepRules
from predictor.engine import Engine
from predictor.lockstep import LockstepGroup
from predictor.lockstep_forecast import LockstepForecaster, RankPasses
from predictor.request import RequestFacts
from predictor.step_time import StepTime

STEP_TIME = StepTime(constant_s=0.5, empty_s=0.5, token_s=1 / 64)
CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_gpu_blocks=400, max_model_len=512,
    enable_prefix_caching=False, async_scheduling=False,
)  # fmt: skip
LONG_AFTER_S = 1e5


def request(name: str, prompt: int = 1, output: int = 1, arrival_s: float = 0.0) -> RequestFacts:
    """Make a request."""
    return RequestFacts(request_id=name, prompt_tokens=prompt, output_tokens=output, arrival_s=arrival_s)


def group_of(num_ranks: int, config: EngineConfig = CONFIG, **rules: object) -> LockstepGroup:
    """Make idle ranks."""
    return LockstepGroup([Engine(config, STEP_TIME) for _ in range(num_ranks)], LockstepRules(**rules))  # type: ignore[arg-type]


def test_a_pass_lasts_as_long_as_on_its_slowest_rank() -> None:
    """A rank with a short batch, and one with none, wait for the one that prefills."""
    group = group_of(3)
    group.engines[0].add(request("long", prompt=33, output=2))
    group.engines[1].add(request("short", prompt=1, output=2))
    first = group.next_pass()
    assert first is not None
    assert (first.busy, first.start_s, first.end_s) == ((True, True, False), 0.0, 0.5 + 33 / 64)
    group.advance()
    assert group.engines[1].outcome("short").first_token_s == 0.5 + 33 / 64
    assert group.engines[1].outcome("short").finished_s == 0.5 + 33 / 64 + 0.5 + 1 / 64


def test_idle_ranks_run_dummy_batches_until_the_ranks_compare() -> None:
    """After the last request the ranks go on to the next step at which they compare; then another wave starts."""
    group = group_of(2, sync_interval=4)
    group.engines[0].add(request("one", output=2))
    group.engines[1].add(request("later", arrival_s=100.0))
    passes = []
    while (one := group.next_pass(LONG_AFTER_S)) is not None:
        passes.append((one.wave, one.number, one.busy))
    assert passes == [
        (0, 1, (True, False)), (0, 2, (True, False)), (0, 3, (False, False)), (0, 4, (False, False)),
        (1, 1, (False, True)),
    ]  # fmt: skip


def test_early_versions_do_not_compare_after_the_first_step() -> None:
    """Those of vLLM 0.28 and 0.29 compare at every 32nd step only."""
    group = group_of(2, sync_interval=32, syncs_first_step=False)
    group.engines[0].add(request("one"))
    numbers = []
    while (one := group.next_pass(LONG_AFTER_S)) is not None:
        numbers.append(one.number)
    assert numbers == list(range(1, 33))


def test_a_request_for_an_idle_rank_waits_for_the_pass_under_way() -> None:
    """It cannot join a pass that has started."""
    group = group_of(2)
    group.engines[0].add(request("busy", prompt=64, output=10))
    group.engines[1].add(request("new", arrival_s=0.25))
    group.advance()
    assert group.engines[1].outcome("new").scheduled_s == 0.5 + 1.0


def test_ranks_need_the_same_kind_of_scheduling() -> None:
    """A rank that plans ahead cannot step with one that does not."""
    engines = [Engine(replace(CONFIG, async_scheduling=ahead), STEP_TIME) for ahead in (True, False)]
    with pytest.raises(ValueError, match="async_scheduling: must be the same on all ranks"):
        LockstepGroup(engines)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rank": 4, "size": 4}, "data_parallel_rank: must be below data_parallel_size 4, not 4"),
        ({"rank": -1, "size": 4}, "data_parallel_rank: must be at least 0"),
        ({"rank": 0}, "data_parallel: must be an object with rank and size"),
        ("two", "data_parallel: must be an object with rank and size"),
        ({"rank": 0, "size": 2, "sync_interval": 0}, "sync_interval: must be at least 1"),
        ({"rank": 0, "size": 2, "sync_interval": 4, "syncs_first_step": 3}, "syncs_first_step: must be true or false"),
    ],
)
def test_bad_ranks_are_refused_by_name(table: object, message: str) -> None:
    """A state file may say anything."""
    with pytest.raises(ValueError, match=message):
        DataParallelRank.from_table(table)


def test_a_rank_is_written_and_read_again() -> None:
    """With lockstep, and without."""
    for lockstep in (None, LockstepRules(sync_interval=8, syncs_first_step=False)):
        rank = DataParallelRank(rank=1, size=2, group="here", lockstep=lockstep)
        assert DataParallelRank.from_table(rank.table()) == rank


def random_group(rng: Random, config: EngineConfig, num_ranks: int) -> LockstepGroup:
    """Make ranks with random requests, advanced to a random time."""
    group = group_of(num_ranks, config)
    loaded = [rank for rank in range(num_ranks) if rng.random() < 0.8]
    for rank in loaded:
        for number in range(rng.randint(1, 8)):
            facts = request(f"{rank}-{number}", rng.randint(1, 90), rng.randint(1, 40))
            group.engines[rank].add(facts)
    group.advance(rng.uniform(0.0, 20.0))
    return group


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_forecast_equals_the_simulation_of_all_ranks(seed: int, ahead: bool) -> None:
    """The steps of the other ranks, seen first, are all that a forecast on one rank needs."""
    config = replace(CONFIG, async_scheduling=ahead)
    num_ranks = Random(seed).choice((2, 3, 4))
    group, again = (random_group(Random(seed), config, num_ranks) for _ in range(2))
    rng = Random(100 + seed)
    rank = rng.randrange(num_ranks)
    now_s = max(group.now_s, min(group.next_end_s, group.now_s + rng.random()) - 1e-6)
    candidate = request("candidate", rng.randint(1, 90), rng.randint(1, 60))
    engine = group.engines[rank]
    others = []
    for other in group.engines:
        if other is not engine:
            passes = RankPasses()
            passes.follow(other)
            others.append(passes)
    forecaster = LockstepForecaster(engine)
    forecaster.beside(others)
    (made,) = forecaster.forecast([candidate], now_s)
    before = {name: again.engines[rank].outcome(name).finished_s for name in again.engines[rank].slots}
    again.engines[rank].add(replace(candidate, arrival_s=now_s))
    again.advance()
    real = again.engines[rank].outcome("candidate")
    assert real.ttft_s is not None
    assert real.e2e_s is not None
    if again.engines[rank].config.pipeline_depth == 1 or any(one is None for one in before.values()):
        assert made.ttft_s == pytest.approx(real.ttft_s, abs=1e-9)
        assert made.e2e_s == pytest.approx(real.e2e_s, abs=1e-9)
    else:  # an idle rank that plans ahead: which of the two passes under way it can join is not known
        assert abs(made.ttft_s - real.ttft_s) <= 2.0
        assert abs(made.e2e_s - real.e2e_s) <= 2.0


def test_without_others_a_forecast_is_that_of_one_engine() -> None:
    """With nothing beside it, a rank is an engine."""
    engine = Engine(CONFIG, STEP_TIME)
    engine.add(request("one", 40, 20))
    engine.advance(3.0)
    from predictor.forecast import Forecaster

    candidates = [request("a", 10, 10), request("b", 200, 3)]
    forecaster = LockstepForecaster(engine)
    forecaster.beside([])
    assert forecaster.forecast(candidates, 3.0) == Forecaster(engine).forecast(candidates, 3.0)


def test_an_idle_rank_is_forecast_at_the_pace_of_a_busy_one() -> None:
    """Each of its tokens takes as long as a step of the other rank, while that has requests."""
    busy, idle = (Engine(CONFIG, STEP_TIME) for _ in range(2))
    for number in range(4):
        busy.add(request(f"b{number}", 64, 100))
    passes = RankPasses()
    passes.follow(busy)
    assert passes.num >= 100
    forecaster = LockstepForecaster(idle)
    forecaster.beside([passes])
    (beside,) = forecaster.forecast([request("c", 1, 3)], 0.0)
    assert forecaster.forecast([request("c", 1, 3)], 0.0, only_deadlines=True) == [beside]
    forecaster.beside([])
    (alone,) = forecaster.forecast([request("c", 1, 3)], 0.0)
    assert beside.e2e_s == pytest.approx(float(np.sum(passes.seconds[:3])))
    assert math.isclose(alone.e2e_s, 3 * (0.5 + 1 / 64))
