"""No placement does better than the bound, and the bound is right where it can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.placement_bound import least_seconds, sustained_rate
from simulator.workload import RequestLengths, Workload, workload
from tests.simulator.small_clusters import SECOND, lengths, poisson, units


def at_once(num: int, prompt_tokens: int, output_tokens: int) -> Workload:
    """Equal requests, all of which come at the beginning."""
    whole = (np.full(num, prompt_tokens), np.full(num, output_tokens))
    return workload(RequestLengths(prompt_tokens=whole[0], output_tokens=whole[1]), np.zeros(num))


def test_seats_bind() -> None:
    """Eight seats decode eight tokens a step, which takes a second; short prompts come along for nothing."""
    (unit,) = units(1, SECOND)
    assert least_seconds(unit, at_once(8, 1, 11)) == pytest.approx(10.0)


def test_memory_binds() -> None:
    """A hundred decodes over 300 tokens and more read 35,050 tokens of context, of which 1,920 fit at a time."""
    (unit,) = units(1, SECOND)
    assert least_seconds(unit, at_once(1, 300, 101)) == pytest.approx(35_050 / 1_920)


def test_prompts_bind() -> None:
    """Answers of one token are nothing but prompts, 128 tokens of which fit a step."""
    (unit,) = units(1, SECOND)
    assert least_seconds(unit, at_once(4, 320, 1)) == pytest.approx(10.0)


@pytest.mark.parametrize("policy", ["llumnix", "jsq", "block", "hold"])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_policy_is_faster(policy: str, seed: int) -> None:
    """Instances that get all at once are busy at least as long as the bound says, and not much longer."""
    made = units(3)
    work = workload(lengths(150, seed), np.zeros(150))
    result = simulate(made, work, policy)
    least_s = least_seconds(made[0], work) / len(made)
    assert least_s <= result.end_s <= 2.5 * least_s


def test_rates_are_as_the_workload_was_drawn() -> None:
    """The same requests in the same pattern have the same bound, at whatever rate they were drawn."""
    made = units(2)
    assert sustained_rate(made, poisson(200, 5.0), 5.0) == pytest.approx(sustained_rate(made, poisson(200, 8.0), 8.0))
    assert sustained_rate(made * 2, poisson(200, 5.0), 5.0) == pytest.approx(
        2 * sustained_rate(made, poisson(200, 5.0), 5.0)
    )


def test_unknown_bounds_are_refused() -> None:
    """Neither mixed instances nor cached prompts have one."""
    work = poisson(10, 5.0)
    with pytest.raises(ValueError, match="equal instances"):
        sustained_rate([*units(1), *units(1, SECOND)], work, 5.0)
    with pytest.raises(ValueError, match="cached"):
        sustained_rate(units(1, enable_prefix_caching=True), work, 5.0)
