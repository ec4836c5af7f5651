"""One request through gateway, scheduler, sidecar and a real vLLM engine: one trace, as a collector gets it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.deploy.engines import MODEL, need_vllm
from tests.deploy.test_vllm_up import LIMIT_S, up
from tests.services.cluster.living import PATIENCE_S, until

pytestmark = pytest.mark.vllm

ENGINE = "llm_request"  # vLLM's span


def test_the_engines_span_is_below_the_leg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes send their spans to one collector: gateway and scheduler by a variable, vLLM by its flag."""
    need_vllm()
    pytest.importorskip("opentelemetry.sdk")
    from tests.otlp_collector import attributes_of, collecting

    async def test(url: str) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        flags = ("--otlp-traces-endpoint", url)
        async with up(tmp_path, "-n", "1", "--schedulers", "1", engine_flags=flags) as running:
            answer = await running.client.completions.create(
                model=MODEL, prompt="one two three", max_tokens=5, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            wanted = {
                f"text_completion {MODEL}",
                "block.schedule",
                "block.v1.Scheduler/Schedule",
                "block.serve",
                ENGINE,
            }
            await until(lambda: wanted <= {span.name for _, span in collector.spans}, 4 * PATIENCE_S, "all spans")
            running.process.send_signal(signal.SIGINT)
            await asyncio.wait_for(running.process.wait(), PATIENCE_S)

    async def limited(url: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            await test(url)

    with collecting() as collector:
        asyncio.run(limited(collector.url))
    own, leg = collector.named(f"text_completion {MODEL}"), collector.named("block.serve")
    engine, schedule = collector.named(ENGINE), collector.named("block.schedule")
    decided = collector.named("block.v1.Scheduler/Schedule")
    assert own.parent_span_id == b""
    assert leg.parent_span_id == schedule.parent_span_id == own.span_id
    assert decided.parent_span_id == schedule.span_id
    assert engine.parent_span_id == leg.span_id
    assert {span.trace_id for span in (own, leg, schedule, decided, engine)} == {own.trace_id}
    assert attributes_of(engine)["gen_ai.usage.completion_tokens"] == 5
    assert attributes_of(own)["gen_ai.usage.output_tokens"] == 5
    assert attributes_of(decided)["block.instance"] == "engine-0"
    services = {
        name: {service for service, span in collector.spans if span.name == name} for name in (own.name, decided.name)
    }
    assert services == {own.name: {"block-gateway"}, decided.name: {"block-scheduler"}}
