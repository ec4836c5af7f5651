"""No policy exceeds the placement bound, which equals values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.placement_bound import min_busy_s, sustained_rate
from simulator.workload import RequestLengths, Workload, workload
from tests.simulator.small_clusters import SECOND, lengths, poisson, specs


def at_once(num: int, prompt_tokens: int, output_tokens: int) -> Workload:
    """Equal requests that all arrive at the beginning."""
    lengths = RequestLengths(prompt_tokens=np.full(num, prompt_tokens), output_tokens=np.full(num, output_tokens))
    return workload(lengths, np.zeros(num))


def test_the_number_of_sequences_limits() -> None:
    """Eight sequences decode eight tokens a step, which takes a second; short prompts take no extra time."""
    (spec,) = specs(1, SECOND)
    assert min_busy_s(spec, at_once(8, 1, 11)) == pytest.approx(10.0)


def test_memory_limits() -> None:
    """A hundred decodes after 300 tokens read 35,050 tokens of context, of which 1,920 fit into memory."""
    (spec,) = specs(1, SECOND)
    assert min_busy_s(spec, at_once(1, 300, 101)) == pytest.approx(35_050 / 1_920)


def test_prompts_limit() -> None:
    """Responses of one token need only their prompts, of which 128 tokens fit into a step."""
    (spec,) = specs(1, SECOND)
    assert min_busy_s(spec, at_once(4, 320, 1)) == pytest.approx(10.0)


@pytest.mark.parametrize("policy", ["llumnix", "jsq", "block", "hold"])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_policy_is_faster(policy: str, seed: int) -> None:
    """Instances that get all requests at once are busy at least as long as the bound, and not much longer."""
    made = specs(3)
    work = workload(lengths(150, seed), np.zeros(150))
    result = simulate(made, work, policy)
    least_s = min_busy_s(made[0], work) / len(made)
    assert least_s <= result.end_s <= 2.5 * least_s


def test_the_bound_does_not_depend_on_the_drawn_rate() -> None:
    """The same requests in the same pattern have the same bound at any rate."""
    made = specs(2)
    assert sustained_rate(made, poisson(200, 5.0), 5.0) == pytest.approx(sustained_rate(made, poisson(200, 8.0), 8.0))
    assert sustained_rate(made * 2, poisson(200, 5.0), 5.0) == pytest.approx(
        2 * sustained_rate(made, poisson(200, 5.0), 5.0)
    )


def test_undefined_bounds_are_refused() -> None:
    """The bound is not defined for mixed instances or with prefix caching."""
    work = poisson(10, 5.0)
    with pytest.raises(ValueError, match="equal instances"):
        sustained_rate([*specs(1), *specs(1, SECOND)], work, 5.0)
    with pytest.raises(ValueError, match="prefix caching"):
        sustained_rate(specs(1, enable_prefix_caching=True), work, 5.0)
