"""A reading as lines of text."""

from __future__ import annotations

import pytest

from services.cli.top import SORTS as CHOICES
from services.top.reading import ClusterReading, InstanceReading
from services.top.table import COLUMNS, SORTS, lines_of


def instance(name: str, **values: float) -> InstanceReading:
    """An instance of which only some things are known."""
    return InstanceReading(instance=name, role="both", tier="", state="ready", **values)


def reading(*instances: InstanceReading, **values: object) -> ClusterReading:
    """A cluster of these instances."""
    return ClusterReading(scheduler="s", policy="block", instances=instances, **values)


def test_what_is_known_is_shown() -> None:
    """Numbers with their units, and a dash for what is not known."""
    one = instance("one", running=3, waiting=0, kv_usage=0.251, drained_s=1.234, pace=1.1, forecast_error=0.08)
    lines = lines_of(reading(one, instance("two"), decisions_per_s=12.34, decision_s=0.0021, ttft_p95_s=1.5))
    assert lines[0].startswith("block · 2 of 2 instances ready · 12.3 decisions/s, 2.1 ms each · - held")
    assert "P95 1.50 s" in lines[1]
    assert lines[-3].split() == list(COLUMNS)
    assert lines[-2].split() == ["one", "both", "ready", "3", "0", "-", "25%", "-", "1.23", "s", "1.10", "-", "8%", "-"]
    assert lines[-1].split() == ["two", "both", "ready", *["-"] * 10]
    assert len(set(map(len, lines[-3:-1]))) == 1


def test_problems_are_said() -> None:
    """A server that does not reply is named."""
    assert "! metrics of http://a: no reply in time" in lines_of(
        reading(problems=["metrics of http://a: no reply in time"])
    )


@pytest.mark.parametrize(
    ("sort", "expected"), [("name", "abc"), ("waiting", "cab"), ("kv", "bac"), ("running", "abc"), ("drain", "abc")]
)
def test_order(sort: str, expected: str) -> None:
    """By name, or the busiest first."""
    found = lines_of(reading(instance("c", waiting=5), instance("b", kv_usage=0.5), instance("a")), sort)
    assert "".join(line[0] for line in found[-3:]) == expected


def test_a_short_terminal_shows_the_first_ones() -> None:
    """And says how many it leaves out."""
    many = reading(*(instance(f"i{number:03}") for number in range(100)))
    lines = lines_of(many, max_lines=20)
    assert len(lines) == 20
    assert lines[-1] == "… and 85 more instances"
    assert lines[-2].startswith("i014 ")
    assert len(lines_of(many)) == 104


def test_the_command_offers_all_orders() -> None:
    """It names them without importing them."""
    assert CHOICES == SORTS
