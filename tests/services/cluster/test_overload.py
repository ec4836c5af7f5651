"""A running cluster under far more load than it can serve: nobody goes without an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from predictor.request import BEST_EFFORT, REAL_TIME, Slo
from scheduler.instances import LATE, QUEUE_FULL, TENANT_LIMIT, TIMEOUT
from services.cluster import ClusterSettings, running
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from simulator.load_plan import Planned
from simulator.load_report import SHED
from tests.services.waiting import PATIENCE_S

TABLES = """
[engine]
profile = "llama-2-7b-a30"
served-model-name = "tiny"
batcher = "decode_then_edf"
max-num-seqs = 4
max-model-len = 512
num-gpu-blocks = 129
[scheduler]
sidecar-deadline-ms = 5000
tagger-deadline-ms = 5000
[gateway]
schedule-s = 100.0
"""
NUM, EVERY = 48, 6  # each sixth request is best effort


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
def test_overload_is_answered(tmp_path: Path) -> None:
    """Real-time requests are served or shed with a reason and a time; best effort is served in the end."""
    tables = tmp_path / "cluster.toml"
    tables.write_text(TABLES, encoding="utf-8")
    settings = ClusterSettings(instances=1, schedulers=1, policies=("slo",), port=0, tables_file=str(tables))
    plan = [
        Planned(
            request_id=str(number), due_s=0.02 * number, prompt_tokens=100, output_tokens=40, when_late="shed",
            slo=None if number % EVERY == 0 else Slo(ttft_s=4.0, tpot_s=1.0), tenant=f"tenant-{number % 2}",
            request_class=BEST_EFFORT if number % EVERY == 0 else REAL_TIME,
        )
        for number in range(NUM)
    ]  # fmt: skip

    async def test() -> None:
        async with running(settings) as cluster:
            origin = origin_of(cluster.gateway_urls["slo"])
            limits = LoadLimits(timeout_s=3 * PATIENCE_S)
            results = await run_plan(plan, origin, RequestFormat(model="tiny"), limits, lambda _: None)
        assert len(results) == NUM
        assert {one.failure for one in results} == {None, SHED}
        shed = [one for one in results if one.failure == SHED]
        assert all(one.retry_after_s is not None and one.retry_after_s > 0 for one in shed)
        assert {one.shed_reason for one in shed} <= {LATE, TIMEOUT, QUEUE_FULL, TENANT_LIMIT}
        assert all(one.plan.request_class == REAL_TIME for one in shed)
        assert any(one.plan.request_class == REAL_TIME for one in results if one.failure is None)

    asyncio.run(test())
