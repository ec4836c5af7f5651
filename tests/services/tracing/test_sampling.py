"""Which requests are recorded, by OpenTelemetry's variables."""

from __future__ import annotations

import pytest

from services.http.trace_context import TraceParent
from services.tracing.sampling import Sampling


def sampled_by(name: str, argument: str, parent: TraceParent | None, draw: float) -> bool:
    """Decide by a sampler."""
    environment = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    return Sampling.from_environment(environment).takes(parent, draw)


def parent_of(*, is_sampled: bool, random_part: int = 0) -> TraceParent:
    """A span of a client."""
    return TraceParent(trace_id=f"{1:016x}{random_part:016x}", span_id="b7ad6b7169203331", is_sampled=is_sampled)


@pytest.mark.parametrize(
    ("name", "draw", "expected"),
    [
        ("", 0.999, True),
        ("always_on", 0.999, True),
        ("always_off", 0.0, False),
        ("traceidratio", 0.24, True),
        ("traceidratio", 0.26, False),
        ("parentbased_always_on", 0.999, True),
        ("parentbased_always_off", 0.0, False),
        ("parentbased_traceidratio", 0.24, True),
        ("parentbased_traceidratio", 0.26, False),
    ],
)
def test_without_a_parent_a_share_is_drawn(name: str, draw: float, expected: bool) -> None:
    """All requests by default."""
    assert sampled_by(name, "0.25", None, draw) is expected


@pytest.mark.parametrize("name", ["", "parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"])
@pytest.mark.parametrize("is_sampled", [True, False])
def test_the_parent_decides(name: str, is_sampled: bool) -> None:
    """Whatever the share is."""
    assert sampled_by(name, "0.25", parent_of(is_sampled=is_sampled), 0.5) is is_sampled


def test_a_ratio_that_ignores_the_parent_goes_by_the_trace() -> None:
    """So that all servers with this ratio record the same traces."""
    for random_part, expected in ((0, True), (2**62 - 1, True), (2**62, False), (2**64 - 1, False)):
        for is_sampled in (True, False):
            parent = parent_of(is_sampled=is_sampled, random_part=random_part)
            assert sampled_by("traceidratio", "0.25", parent, 0.0) is expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "^OTEL_TRACES_SAMPLER: must be one of always_on, .*, not 'sometimes'"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "^OTEL_TRACES_SAMPLER_ARG: must be"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"}, "^OTEL_TRACES_SAMPLER_ARG: must be"),
    ],
)
def test_bad_variables(environment: dict[str, str], message: str) -> None:
    """The error names the variable."""
    with pytest.raises(ValueError, match=message):
        Sampling.from_environment(environment)
