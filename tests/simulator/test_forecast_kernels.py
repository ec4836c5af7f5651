"""Lookaheads, which are kept from one forecast to the next, do not change any forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from predictor.batching import BATCHERS, is_compiled
from simulator import forecast_kernels
from simulator.assembly import simulate
from simulator.conditions import Conditions, Outage
from simulator.workload import noisy, tagged
from tests.simulator.small_clusters import families, poisson, specs

ROUNDING_S = 1e-8


class Comparison:
    """Makes every forecast with lookaheads and again without, and compares; counts the lookaheads that were used."""

    def __init__(self, forecast: Callable[..., None]) -> None:
        """Compare the results of this function."""
        self.num_lookaheads = self.num_forecasts = 0
        self._forecast = forecast

    def __call__(self, fleet: Any, *rest: Any) -> None:
        """Compare both results, and return the one with lookaheads."""
        results = rest[-1]
        self._forecast(fleet, *rest)
        with_lookahead = results.copy()
        heads = fleet.stack.engine[:, 0]
        has_queue = heads.num_waiting > heads.max_num_seqs - heads.num_running
        self.num_lookaheads += int((fleet.instances.has_lookahead * has_queue).sum())
        self.num_forecasts += len(fleet.instances)
        deterministic = fleet.instances.deterministic.copy()
        fleet.instances.deterministic = 0
        self._forecast(fleet, *rest)
        fleet.instances.deterministic = deterministic
        for name in results.dtype.names or (...,):
            np.testing.assert_allclose(with_lookahead[name], results[name], rtol=0, atol=ROUNDING_S, err_msg=str(name))
        results[:] = with_lookahead


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Make every forecast of the test's simulations both ways."""
    made = Comparison(forecast_kernels.forecast_directly)
    monkeypatch.setattr(forecast_kernels, "forecast_directly", made)
    return made


# Those that order the queue themselves, or put preempted requests behind it as SGLang does, have no lookahead.
NO_LOOKAHEAD = {name for name, batcher in BATCHERS.items() if batcher.orders_queue or batcher.requeues}
COMPILED = sorted(name for name, batcher in BATCHERS.items() if is_compiled(batcher) and name not in NO_LOOKAHEAD)


@pytest.mark.parametrize("policy", ["block", "marginal"])
@pytest.mark.parametrize("batcher", COMPILED)
def test_by_every_local_scheduler(comparison: Comparison, batcher: str, policy: str) -> None:
    """Forecasts are equal while queues grow and requests are preempted."""
    tokens = 128 if batcher in ("vllm_v1", "sarathi") else 512
    made = specs(batcher=batcher, max_num_batched_tokens=tokens, num_gpu_blocks=61)
    result = simulate(made, poisson(400, 60.0), policy)
    assert comparison.num_lookaheads > 300
    assert result.outcomes.num_preemptions.any() or batcher != "vllm_v1"


@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(num_schedulers=3, decision_s=0.05, network_s=0.2),
        Conditions(num_schedulers=3, decision_s=0.05, network_s=0.2, reservations=False),
        Conditions(outages=tuple(Outage(instance=at % 3, from_s=2.0 + at, until_s=2.5 + at) for at in range(4))),
    ],
    ids=["reservations", "no reservations", "outages"],
)
@pytest.mark.parametrize("policy", ["block", "marginal"])
def test_with_requests_on_their_way(comparison: Comparison, policy: str, conditions: Conditions) -> None:
    """Forecasts are equal with requests that have not arrived or are not visible, and with outages."""
    simulate(specs(async_scheduling=True, num_gpu_blocks=61), poisson(500, 80.0), policy, conditions, seed=1)
    assert comparison.num_lookaheads > 300


@pytest.mark.parametrize("policy", ["block", "marginal"])
def test_requests_that_return_to_an_instance(comparison: Comparison, policy: str) -> None:
    """Forecasts are equal if two instances fail in turn, so that the same requests return to the same slots."""
    outages = tuple(Outage(instance=at % 2, from_s=2.0 + at, until_s=2.5 + at) for at in range(6))
    simulate(specs(2, num_gpu_blocks=61), poisson(500, 60.0), policy, Conditions(outages=outages), seed=1)
    assert comparison.num_lookaheads > 300


@pytest.mark.parametrize("policy", ["block", "marginal"])
def test_with_prefix_caching(comparison: Comparison, policy: str) -> None:
    """Forecasts are equal with cached prompts."""
    work, _ = families(400, 60.0)
    simulate(specs(enable_prefix_caching=True), work, policy)
    assert comparison.num_lookaheads > 300


def test_forecasts_of_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts of when an engine is drained are equal."""
    comparison = Comparison(forecast_kernels.forecast_drain_directly)
    monkeypatch.setattr(forecast_kernels, "forecast_drain_directly", comparison)
    simulate(specs(num_gpu_blocks=61), poisson(500, 80.0), "expr: drained_s")
    assert comparison.num_lookaheads > 300


def test_no_lookahead_if_lengths_or_step_times_are_uncertain(comparison: Comparison) -> None:
    """With predicted lengths or noisy step times, every forecast starts from the current state."""
    simulate(specs(), tagged(poisson(200, 60.0), noisy(0.4), np.random.default_rng(1)), "block")
    simulate(specs(), poisson(200, 60.0), "block", Conditions(step_noise=0.1))
    assert comparison.num_forecasts > 1000
    assert comparison.num_lookaheads == 0
