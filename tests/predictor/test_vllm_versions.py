"""The table of versions: exact and nearest rules, and texts that are no versions."""

from __future__ import annotations

from itertools import pairwise

import pytest

from predictor.config import EngineConfig
from predictor.vllm_versions import DEFAULT, RULES, approximations_of, release_of, rules_for


@pytest.mark.parametrize(
    ("version", "release", "is_exact"),
    [
        ("0.28.0", (0, 28), True),
        ("v0.31.1", (0, 31), True),
        ("0.32.0+cpu", (0, 32), True),
        ("0.33.1rc2.dev5+gabcdef", (0, 33), True),
        ("", DEFAULT, True),
        ("0.27.3", (0, 28), False),
        ("0.9.2", (0, 28), False),
        ("0.34.0", (0, 33), False),
        ("0.320.0", (0, 33), False),
        ("1.2.0", (0, 33), False),
    ],
)
def test_rules_are_those_of_the_release_or_of_the_nearest(
    version: str, release: tuple[int, int], is_exact: bool
) -> None:
    """Older versions than the first in the table have its rules, newer ones than the last have the last's."""
    chosen = rules_for(version)
    assert (chosen.release, chosen.is_exact) == (release, is_exact)
    assert chosen.rules is RULES[release]
    assert release_of(chosen.name) == release


def test_the_nearest_rules_are_an_approximation() -> None:
    """Forecasts name it; those of a known version have none."""
    unknown = "vLLM 0.34 is not known, and is forecast by the rules of 0.33"
    drafts = "speculative decoding of vLLM 0.33 is forecast by the rules of 0.32"
    assert approximations(version="0.34.1+cpu") == (unknown,)
    assert approximations(version="0.34.1+cpu", speculates=True) == (unknown, drafts)
    assert approximations(version="0.33.1", speculates=True) == (drafts,)
    assert approximations(version="0.33.1") == approximations(version="", speculates=True) == ()


def test_late_frees_are_an_approximation() -> None:
    """0.28 and 0.29 preempt where blocks are free only a step later; that matters where fetches overlap with steps."""
    late = "preemption in vLLM 0.29 with a KV connector that fetches is forecast by the rules of 0.30"
    assert approximations(version="0.29.1", overlaps_fetches=True) == (late,)
    assert approximations(version="0.29.1") == approximations(version="0.30.0", overlaps_fetches=True) == ()
    for role, async_scheduling, overlaps in [
        ("kv_consumer", True, True), ("kv_both", True, True), ("kv_producer", True, False), ("kv_both", False, False),
        ("", True, False),
    ]:  # fmt: skip
        assert EngineConfig(kv_role=role, async_scheduling=async_scheduling).overlaps_fetches == overlaps


def approximations(*, version: str, speculates: bool = False, overlaps_fetches: bool = False) -> tuple[str, ...]:
    """Return what forecasts of an engine approximate."""
    return approximations_of(version, speculates=speculates, overlaps_fetches=overlaps_fetches)


def test_each_release_differs_only_where_it_is_said() -> None:
    """0.31 and 0.33 changed what the scheduler decides for requests of text."""
    releases = sorted(RULES)
    changed = [new for old, new in pairwise(releases) if RULES[old] != RULES[new]]
    assert changed == [(0, 31), (0, 33)]


@pytest.mark.parametrize("version", ["dev", "0", "0.x", "abc0.32", " 0.32"])
def test_other_texts_are_refused_by_field(version: str) -> None:
    """One line names the field and an example."""
    with pytest.raises(ValueError, match=r"^vllm_version: .* is not a version of vLLM such as 0\.32\.0$"):
        EngineConfig(vllm_version=version)


def test_other_types_are_refused_by_field() -> None:
    """A number could lose a digit: 0.30 is not 0.3."""
    with pytest.raises(ValueError, match=r"^vllm_version: must be a text such as 0\.32\.0, not 0\.3$"):
        EngineConfig(vllm_version=0.30)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^long_prefill_token_threshold_adaptive: must be true or false, not 2$"):
        EngineConfig(long_prefill_token_threshold_adaptive=2)  # type: ignore[arg-type]
