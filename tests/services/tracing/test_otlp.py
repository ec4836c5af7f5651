"""Where traces go, and that nothing of OpenTelemetry is imported where they go nowhere."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from services.tracing import otlp
from services.tracing.otlp import TracingSettings, traced, tracer_from
from tests.services.waiting import PATIENCE_S

IMPORTED = """
import sys
from services.cli import block
from services.endpoint_picker.server import serving as picker_serving
from services.gateway.server import serving
from services.scheduler_server import scheduling
from services.tracing.otlp import TracingSettings, tracer_from
assert tracer_from(TracingSettings(), "name", {}) is None
assert tracer_from(TracingSettings(otlp_traces_endpoint="http://a:1"), "name", {"OTEL_SDK_DISABLED": "true"}) is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
MISSING = """
import sys
sys.modules["opentelemetry"] = None
from services.tracing.otlp import TracingSettings, tracer_from
assert tracer_from(TracingSettings(), "name", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}) is None
tracer_from(TracingSettings(otlp_traces_endpoint="http://a:1"), "name", {})
"""


def test_nothing_is_imported_without_an_endpoint() -> None:
    """Neither by the command line, nor by gateway, scheduler and picker."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_a_missing_extra_is_named() -> None:
    """A flag is refused; a variable, which may be set for other programs, is warned of."""
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=False)
    error = (
        "ValueError: otlp_traces_endpoint: needs OpenTelemetry; install the extra: pip install 'block-serving[otel]'"
    )
    assert done.stderr.rstrip().endswith(error)
    assert "nothing is traced, as OpenTelemetry is missing" in done.stderr


@pytest.mark.parametrize("url", ["localhost:4317", "http://", "collector"])
def test_bad_endpoints(url: str) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match="^otlp_traces_endpoint: must be a URL like"):
        TracingSettings(otlp_traces_endpoint=url)


def test_a_bad_protocol() -> None:
    """The error names the variable."""
    with pytest.raises(ValueError, match="^OTEL_EXPORTER_OTLP_PROTOCOL: must be grpc or http/protobuf"):
        tracer_from(TracingSettings(otlp_traces_endpoint="http://a:1"), "n", {"OTEL_EXPORTER_OTLP_PROTOCOL": "json"})


def test_a_collector_gets_the_spans() -> None:
    """By OTLP over gRPC, with the name of the service, when tracing ends at the latest."""
    pytest.importorskip("opentelemetry.sdk")
    from tests.otlp_collector import attributes_of, collecting

    async def test(url: str) -> None:
        async with traced(TracingSettings(otlp_traces_endpoint=url), "block-test", {}) as tracer:
            assert tracer is not None
            span = tracer.begin("chat tiny", None, {"block.instance": "one", "left.out": None}, 1.0)
            assert span is not None
            span.child("block.schedule", {}).end("late")
            span.end()

    with collecting() as collector:
        asyncio.run(test(collector.url))
        own, schedule = collector.named("chat tiny"), collector.named("block.schedule")
    assert {service for service, _ in collector.spans} == {"block-test"}
    assert own.start_time_unix_nano == 1_000_000_000
    assert attributes_of(own) == {"block.instance": "one"}
    assert schedule.parent_span_id == own.span_id
    assert schedule.status.code == 2  # error


def test_a_collector_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last spans have a few seconds."""
    monkeypatch.setattr(otlp, "FLUSH_S", 0.05)
    sent = threading.Event()

    class Hanging:
        def close(self) -> None:
            sent.wait(PATIENCE_S)

    assert asyncio.run(otlp.closed(Hanging())) is False
    sent.set()
    assert asyncio.run(otlp.closed(Hanging())) is True
