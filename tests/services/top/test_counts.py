"""Rates, means and quantiles between two readings of /metrics."""

from __future__ import annotations

import pytest

from services.top.counts import Counted, MetricSamples

PLACED = 'block_placements_total{{instance="{0}",leg="serve"}} {1}\n'
TTFT = """\
# TYPE block_gateway_ttft_seconds histogram
block_gateway_ttft_seconds_bucket{{model="m",le="0.1"}} {0}
block_gateway_ttft_seconds_bucket{{model="m",le="0.2"}} {1}
block_gateway_ttft_seconds_bucket{{model="m",le="+Inf"}} {2}
block_gateway_ttft_seconds_count{{model="m"}} {2}
block_gateway_ttft_seconds_sum{{model="m"}} {3}
"""


def placed(*numbers: float) -> str:
    """Placements on the instances a and b."""
    lines = [PLACED.format(name, number) for name, number in zip("ab", numbers, strict=False)]
    return "# TYPE block_placements_total counter\n" + "".join(lines)


def counted(before: list[str], after: list[str]) -> Counted:
    """Two readings, two seconds apart."""
    return Counted(before=MetricSamples.read(before, 1.0), after=MetricSamples.read(after, 3.0))


def test_rates_of_counters() -> None:
    """Of one label or of all; equal series of two processes are added."""
    found = counted([placed(10, 5), placed(1)], [placed(16, 5), placed(3)])
    assert found.rate("block_placements_total", instance="a") == 4
    assert found.rate("block_placements_total", instance="b") == 0
    assert found.rate("block_placements_total") == 4
    assert found.rate("block_placements_total", instance="c") is None
    assert found.rate("block_scheduler_shed_total") is None


def test_a_restarted_process_counts_from_zero() -> None:
    """Its count since then is the increase."""
    assert counted([placed(100)], [placed(6)]).rate("block_placements_total") == 3


def test_the_first_reading_has_no_rates_of_the_past() -> None:
    """What was counted before it began is no rate."""
    found = MetricSamples.read([placed(100)], 1.0)
    assert Counted(before=found, after=found).rate("block_placements_total") is None


def test_quantiles_and_means_of_what_came_in_between() -> None:
    """Interpolated in the bucket; beyond the last bound, that bound; of all, if nothing came in between."""
    first, second = TTFT.format(10, 10, 10, 0.5), TTFT.format(10, 14, 14, 1.1)
    found = counted([first], [second])
    assert found.quantile(0.5, "block_gateway_ttft_seconds") == pytest.approx(0.15)
    assert found.mean("block_gateway_ttft_seconds") == pytest.approx(0.15)
    idle = counted([first], [first])
    assert idle.quantile(0.5, "block_gateway_ttft_seconds") == pytest.approx(0.05)
    assert idle.mean("block_gateway_ttft_seconds") == pytest.approx(0.05)
    slow = counted([first], [TTFT.format(10, 10, 14, 9)])
    assert slow.quantile(0.5, "block_gateway_ttft_seconds") == 0.2
    assert counted([], []).quantile(0.5, "block_gateway_ttft_seconds") is None
    assert counted([], []).mean("block_gateway_ttft_seconds") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html> no metrics {", "."),
        ('a{, ="}b"} 3 1\n', "a line ends early"),
        (
            "# TYPE block_gateway_ttft_seconds histogram\nblock_gateway_ttft_seconds_bucket 3\n",
            "block_gateway_ttft_seconds_bucket: has no label le",
        ),
    ],
)
def test_what_is_no_metrics_page(text: str, message: str) -> None:
    """Is refused."""
    with pytest.raises(ValueError, match=message):
        MetricSamples.read([text], 0.0)
