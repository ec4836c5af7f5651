"""Forecasts with several lengths of a response: equal to forecasts with each of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.lengths import Tag, quantile_medians
from predictor.request import RequestFacts, Slo
from tests.inspecting import frozen
from tests.predictor.test_forecast import CLOSE, LOADS, at_moment, every_batcher, expect_close, moments, split
from tests.strategies import AFFINE, Load, examples

QUANTILE_TAG = Tag(median_tokens=20.0, spread=0.7)


def test_several_lengths_are_equally_likely() -> None:
    """Their middle one is the median; the others are as far from it, by ratio, on both sides."""
    short, middle, long = quantile_medians(20.0, 0.7, 3)
    assert middle == 20.0
    assert short * long == pytest.approx(400.0)
    assert math.log(long / 20.0) / 0.7 == pytest.approx(0.9674, abs=1e-4)  # where the last sixth begins: 0.9674 sigma
    assert quantile_medians(20.0, 0.7, 1) == (20.0,)
    drawn = np.random.default_rng(1).lognormal(math.log(20.0), 0.7, 200_000)
    for part, length in enumerate(quantile_medians(20.0, 0.7, 5)):
        assert (drawn < length).mean() == pytest.approx((part + 0.5) / 5, abs=0.01)


@every_batcher
def test_a_forecast_with_several_lengths_is_the_mean_of_forecasts(batcher: str) -> None:
    """Of what concerns deadlines; its times are those of the median, and others are forecast as before beside it."""

    @examples(20)
    @given(LOADS[batcher], moments, st.booleans())
    def check(load: Load, moment: float, delays: bool) -> None:
        others, (candidate,) = split(load, 1)
        engine, now_s = at_moment(others, moment, reserve=False)
        forecaster = Forecaster(engine)
        tagged = replace(candidate, output_tokens=None, tag=QUANTILE_TAG, max_tokens=None)
        try:
            lengths = quantile_medians(QUANTILE_TAG.median_tokens, QUANTILE_TAG.spread, 3)
            parts = [replace(tagged, tag=Tag(median_tokens=length)) for length in lengths]
            each = [forecaster.forecast([part], now_s, delays=delays)[0] for part in parts]
        except ValueError:  # it does not fit
            return
        before = frozen(engine)
        beside = replace(tagged, request_id="beside")
        both = forecaster.forecast([replace(tagged, length_quantiles=3), beside], now_s, delays=delays)
        assert frozen(engine) == before
        several, plain = both
        assert several.request_id == candidate.request_id
        expect_close(replace(plain, request_id=candidate.request_id), each[1])
        for name in ("attained", "others_missed", "gain_before", "gain_after"):
            values = [getattr(one, name) for one in each]
            expected = None if None in values else pytest.approx(sum(values) / 3, rel=CLOSE, abs=CLOSE)
            assert getattr(several, name) == expected, name
        for name in ("ttft_s", "e2e_s", "tpot_s", "queue_s", "output_tokens", "num_preemptions", "delay_sum_s"):
            assert getattr(several, name) == getattr(plain, name), name

    check()


def test_attained_is_a_probability_where_several_lengths_are_tried() -> None:
    """Tokens come a little slower than they are due: short responses are on time, long ones fall behind."""
    engine = Engine(EngineConfig(max_model_len=4096, num_gpu_blocks=512), AFFINE)
    candidate = RequestFacts(request_id="c", prompt_tokens=16, tag=Tag(median_tokens=50.0, spread=1.0))
    (free,) = Forecaster(engine).forecast([candidate], 0.0)
    slack_s, short_by_s = 0.1, 0.1 / 60  # the slack of the first token is used up after 60 tokens
    slo = Slo(ttft_s=free.ttft_s + slack_s, tpot_s=free.tpot_s - short_by_s)
    (forecast,) = Forecaster(engine).forecast([replace(candidate, slo=slo, length_quantiles=3)], 0.0)
    assert forecast.attained == pytest.approx(2 / 3)
    assert (forecast.ttft_s, forecast.e2e_s) == (free.ttft_s, free.e2e_s)
    (known,) = Forecaster(engine).forecast([replace(candidate, output_tokens=50, slo=slo, length_quantiles=3)], 0.0)
    assert known.attained == 1.0
