"""A pooled engine does in one step, in the same time, what several engines do in one step each."""

from __future__ import annotations

import pytest

from predictor.profile import load_profile
from predictor.tabulated_costs import step_seconds, tabulate
from simulator.assembly import simulate
from simulator.pooled_bound import pooled_config, pooled_step_time
from simulator.scenario import Instances
from tests.simulator.small_clusters import A30, config, poisson, specs


def test_a_pooled_step_takes_as_long_as_one_engines_share() -> None:
    """Steps with decodes only, and with prompts, whose constant cost is shared."""
    one, three = tabulate(A30, 512, 64), tabulate(pooled_step_time(A30, 3), 3 * 512, 3 * 64)
    for decodes in (1, 7, 24, 48):
        context = 350.0 * decodes
        alone = step_seconds(one, decodes, decodes, decodes, context, 0, 0.0, 0.0)
        assert step_seconds(three, 3 * decodes, 3 * decodes, 3 * decodes, 3 * context, 0, 0.0, 0.0) == pytest.approx(
            alone
        )
        beside = step_seconds(one, decodes + 100, decodes + 1, decodes, context, 1, 100.0**2, 100.0 * 50)
        pooled = step_seconds(
            three, 3 * decodes + 300, 3 * decodes + 3, 3 * decodes, 3 * context, 3, 3 * 100.0**2, 3 * 100.0 * 50
        )
        assert pooled == pytest.approx(beside - A30.prefill_s * 2 / 3)


def test_a_pool_of_one_is_the_engine_itself() -> None:
    """Nothing changes."""
    assert pooled_config(config(), 1) == config()
    assert pooled_step_time(A30, 1) == A30


def test_instances_can_be_pooled() -> None:
    """One instance has the sequences, the blocks and the step time of all."""
    spec = Instances(profile="llama-2-7b-a30", pooled=12, engine=(("num_gpu_blocks", 1057),)).instance_spec()
    assert spec.config.num_gpu_blocks == 12 * 1056 + 1
    assert spec.config.max_num_seqs == 12 * 48
    assert spec.step_time == pooled_step_time(load_profile("llama-2-7b-a30").step_time, 12)
    with pytest.raises(ValueError, match="pooled"):
        Instances(pooled=0)


def test_a_pool_is_no_slower_than_its_engines() -> None:
    """Under load, one engine as large as three is no slower than three."""
    work = poisson(200, 50.0)
    pooled = [*specs(1)]
    (spec,) = pooled
    large = type(spec)(config=pooled_config(spec.config, 3), step_time=pooled_step_time(spec.step_time, 3))
    assert simulate([large], work, "jsq").end_s < simulate(specs(3), work, "jsq").end_s
