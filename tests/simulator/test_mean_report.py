"""The mean of reports is that of each number, and groups of one part are not shown."""

from __future__ import annotations

from typing import Any

from simulator.mean_report import group_shares, mean_report


def report(share: float | None, **tiers: float) -> dict[str, Any]:
    """A report of two tiers and one class."""
    return {
        "deadline_attained": share,
        "by_class": {"real-time": {"deadline_attained": share}},
        "by_tier": {name: {"deadline_attained": value} for name, value in tiers.items()},
        "by_prompt_quarter": [{"longest_prompt_tokens": 10}, {"longest_prompt_tokens": 30}],
    }


def test_numbers_are_averaged() -> None:
    """None and groups that a run lacks do not count."""
    mean = mean_report([report(0.5, **{"0.02": 0.25, "none": 1.0}), report(None, **{"0.02": 0.75})])
    assert mean["deadline_attained"] == mean["by_class"]["real-time"]["deadline_attained"] == 0.5
    assert mean["by_prompt_quarter"] == [{"longest_prompt_tokens": 10.0}, {"longest_prompt_tokens": 30.0}]
    assert group_shares(mean) == {"tier 20 ms": 0.5, "tier none": 1.0}
    assert mean_report([report(None)])["deadline_attained"] is None
    assert mean_report([]) == {} == group_shares({})
