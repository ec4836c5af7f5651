"""A sidecar checks by itself whether its profile holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.predictor_server import profile_watch
from services.predictor_server.metrics import InstanceMetrics, SidecarMetrics
from services.predictor_server.profile_watch import ProfileWatch
from services.predictor_server.profile_watch_settings import ProfileWatchSettings
from services.predictor_server.server import running_sidecars
from services.predictor_server.settings import SidecarSettings
from tests.services.emulator.running import A30
from tests.services.observing.traffic_of_engines import engine_at, sending_on
from tests.services.predictor_server.running_mirrors import mirror_of
from tests.services.predictor_server.running_sidecars import NAME
from tests.services.waiting import run, until

WINDOW_S = 1.0
PATIENCE_S = 400.0  # for a check, which loads the compiled engine model in a process of its own


@pytest.fixture(autouse=True)
def _at_our_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the process of a check at the priority of the tests, beside which it would hardly run at a lower one."""
    monkeypatch.setattr(profile_watch, "NICENESS", 0)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return the value of one of the sidecar's metrics; None where there is none."""
    return registry.get_sample_value(name, {"instance": NAME, **labels})


def report(holds: bool | None, bias: float = 0.0) -> dict[str, Any]:
    """Return the report of a check."""
    return {
        "holds": holds, "verdict": "as it is", "profile": "p", "steps": {"all": {"bias": bias}},
        "errors": {"ttft": {"bias": None}, "tpot": {"bias": bias}},
    }  # fmt: skip


def test_the_metrics_say_what_the_last_check_found(caplog: pytest.LogCaptureFixture) -> None:
    """Only a change is logged; an inconclusive check changes nothing."""
    registry = CollectorRegistry()
    metrics = InstanceMetrics(SidecarMetrics(registry), NAME)
    reports = iter([report(None), report(True), report(False, -0.2), report(False, -0.3), report(None), report(True)])

    class Scripted(ProfileWatch):
        async def _report(self, folder: Path) -> dict[str, Any]:
            return next(reports)

    async def checks() -> None:
        watch = Scripted(ProfileWatchSettings(), metrics, asyncio.Lock(), state_file="none")
        found = []
        for _ in range(6):
            await watch.check()
            found.append(
                (value(registry, "block_profile_holds"), value(registry, "block_profile_bias_ratio", quantity="step"))
            )
        assert found == [(None, None), (1, 0.0), (0, -0.2), (0, -0.3), (0, -0.3), (1, 0.0)]

    with caplog.at_level("INFO"):
        run(checks)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert value(registry, "block_profile_checks_total", result="inconclusive") == 2
    assert value(registry, "block_profile_checks_total", result="does_not_hold") == 2
    assert value(registry, "block_profile_bias_ratio", quantity="ttft") is None


def test_an_engine_that_cannot_be_observed_is_a_failed_check(tmp_path: Path) -> None:
    """It is counted, and the sidecar goes on."""
    registry = CollectorRegistry()

    async def test() -> None:
        metrics = InstanceMetrics(SidecarMetrics(registry), NAME)
        watch = ProfileWatch(
            ProfileWatchSettings(window_s=0.1), metrics, asyncio.Lock(), state_file=str(tmp_path / "none.state")
        )
        await watch.check()

    run(test)
    assert value(registry, "block_profile_checks_total", result="failed") == 1
    assert value(registry, "block_profile_holds") is None


@pytest.mark.parametrize("bad", [{"interval_s": -1.0}, {"window_s": 0.0}, {"tolerance": 0.0}])
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    """By the name of the field."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        ProfileWatchSettings(**bad)


@pytest.mark.slow  # each check is a process that loads the compiled engine model
@pytest.mark.parametrize(("factor", "holds"), [(1.0, 1.0), (1.3, 0.0)])
def test_a_sidecar_sees_that_its_profile_is_wrong(tmp_path: Path, factor: float, holds: float) -> None:
    """With the engine's own profile it holds; with that of an engine which is quicker by a factor it does not."""
    registry = CollectorRegistry()
    settings = SidecarSettings(
        instance_id=NAME,
        state_file=str(tmp_path / "engine.state"),
        profile_watch=ProfileWatchSettings(interval_s=0.1, window_s=WINDOW_S),
    )

    async def test() -> None:
        async with running_sidecars([settings], A30, registry):
            await until(lambda: value(registry, "block_profile_holds") is not None, PATIENCE_S)

    with engine_at(tmp_path, factor) as (_, url), sending_on(url):
        run(test, PATIENCE_S)
    assert value(registry, "block_profile_holds") == holds
    assert value(registry, "block_profile_bias_ratio", quantity="step") == pytest.approx(1 / factor - 1, abs=1e-3)


@pytest.mark.slow
def test_a_mirroring_sidecar_checks_what_its_proxy_sees(tmp_path: Path) -> None:
    """Without a state file: requests alone show it."""
    registry = CollectorRegistry()
    metrics = InstanceMetrics(SidecarMetrics(registry), NAME)

    async def test() -> None:
        async with mirror_of(url, speed=20.0) as client:
            watch = ProfileWatch(
                ProfileWatchSettings(window_s=4 * WINDOW_S), metrics, asyncio.Lock(), profile=A30,
                traffic=client.mirror.source,
            )  # fmt: skip
            traffic = sending_on(f"http://127.0.0.1:{client.mirror.port}")
            await asyncio.to_thread(traffic.__enter__)
            try:
                await until(lambda: client.mirror.source.config is not None)
                while not value(registry, "block_profile_checks_total", result="does_not_hold"):
                    await watch.check()  # the window of a busy machine may show too little
            finally:
                await asyncio.to_thread(traffic.__exit__, None, None, None)  # this loop serves the proxy meanwhile

    with engine_at(tmp_path, 1.6) as (_, url):
        run(test, PATIENCE_S)
    assert value(registry, "block_profile_holds") == 0
    assert (value(registry, "block_profile_bias_ratio", quantity="tpot") or 0.0) < -0.2
