"""What is kept from one forecast to the next changes none of them."""

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
from tests.simulator.small_clusters import families, poisson, units

ROUNDING_S = 1e-8


class BothWays:
    """Makes every forecast with what is kept, and again without; counts those that were made from it."""

    def __init__(self, foretell: Callable[..., None]) -> None:
        """Begin without any."""
        self.num_kept = self.num_made = 0
        self._foretell = foretell

    def __call__(self, fleet: Any, *rest: Any) -> None:
        """Compare; leave those made with what is kept."""
        results = rest[-1]
        self._foretell(fleet, *rest)
        kept = results.copy()
        heads = fleet.stack.engine[:, 0]
        deep = heads.num_waiting > heads.max_num_seqs - heads.num_running
        self.num_kept += int((fleet.units.is_ahead * deep).sum())
        self.num_made += len(fleet.units)
        certain = fleet.units.certain.copy()
        fleet.units.certain = 0
        self._foretell(fleet, *rest)
        fleet.units.certain = certain
        for name in results.dtype.names or (...,):
            np.testing.assert_allclose(kept[name], results[name], rtol=0, atol=ROUNDING_S, err_msg=str(name))
        results[:] = kept


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> BothWays:
    """Have every simulation of the test foretell both ways."""
    made = BothWays(forecast_kernels.foretell_directly)
    monkeypatch.setattr(forecast_kernels, "foretell_directly", made)
    return made


COMPILED = sorted(name for name, batcher in BATCHERS.items() if is_compiled(batcher))


@pytest.mark.parametrize("policy", ["block", "marginal"])
@pytest.mark.parametrize("batcher", COMPILED)
def test_by_every_local_scheduler(both_ways: BothWays, batcher: str, policy: str) -> None:
    """Queues grow, requests are preempted, and forecasts stay what they were."""
    tokens = 128 if batcher in ("vllm_v1", "sarathi") else 512
    made = units(batcher=batcher, max_num_batched_tokens=tokens, num_gpu_blocks=61)
    result = simulate(made, poisson(400, 60.0), policy)
    assert both_ways.num_kept > 300
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
def test_by_what_is_on_its_way(both_ways: BothWays, policy: str, conditions: Conditions) -> None:
    """Requests that have not arrived, or are not known of, and instances that lose everything are kept apart."""
    simulate(units(async_scheduling=True, num_gpu_blocks=61), poisson(500, 80.0), policy, conditions, seed=1)
    assert both_ways.num_kept > 300


@pytest.mark.parametrize("policy", ["block", "marginal"])
def test_who_comes_back_is_met_anew(both_ways: BothWays, policy: str) -> None:
    """Two that lose everything in turn hand the same requests to each other, and into the same places."""
    outages = tuple(Outage(instance=at % 2, from_s=2.0 + at, until_s=2.5 + at) for at in range(6))
    simulate(units(2, num_gpu_blocks=61), poisson(500, 60.0), policy, Conditions(outages=outages), seed=1)
    assert both_ways.num_kept > 300


@pytest.mark.parametrize("policy", ["block", "marginal"])
def test_by_cached_prompts(both_ways: BothWays, policy: str) -> None:
    """Blocks are followed, too."""
    work, _ = families(400, 60.0)
    simulate(units(enable_prefix_caching=True), work, policy)
    assert both_ways.num_kept > 300


def test_when_all_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is what is told of an engine as a whole."""
    both_ways = BothWays(forecast_kernels.drain_directly)
    monkeypatch.setattr(forecast_kernels, "drain_directly", both_ways)
    simulate(units(num_gpu_blocks=61), poisson(500, 80.0), "expr: drained_s")
    assert both_ways.num_kept > 300


def test_nothing_is_kept_that_may_come_otherwise(both_ways: BothWays) -> None:
    """Where lengths are guessed, or steps take now longer, now less, each forecast begins with what is seen."""
    simulate(units(), tagged(poisson(200, 60.0), noisy(0.4), np.random.default_rng(1)), "block")
    simulate(units(), poisson(200, 60.0), "block", Conditions(step_noise=0.1))
    assert both_ways.num_made > 1000
    assert both_ways.num_kept == 0
