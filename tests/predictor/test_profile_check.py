"""Profiles that do not fit their engines are refused, in one line with the remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.config import EngineConfig
from predictor.profile import SuggestedEngine, Transit
from predictor.profile_check import FAR_OFF, JUDGED_STEPS, StepCheck, require_possible
from protos.block.v1 import common_pb2
from services.predictor_server.engine_source import DownError
from services.predictor_server.exported import ExportedEngine
from services.predictor_server.sidecar import to_wall_clock
from tests.services.engine_state.files import busy, writer_at
from tests.services.predictor_server.running_sidecars import A30, request, run, sidecar_of

CONFIG = EngineConfig(num_gpu_blocks=1056, block_size=16)
DOWN = common_pb2.INSTANCE_STATE_DOWN
HOUR_S = 3600.0


def made_for(**engine: int) -> object:
    """The A30's profile, as if it had been measured on another engine."""
    return replace(A30, engine=SuggestedEngine(**engine))


@pytest.mark.parametrize(
    ("profile", "error"),
    [
        (made_for(block_size=32), "blocks of 32 tokens, this engine has blocks of 16"),
        (made_for(block_size=16, num_gpu_blocks=300), "with 300 KV blocks"),
        (made_for(block_size=16, num_gpu_blocks=528), None),
        (made_for(block_size=16, num_gpu_blocks=9999), None),
        (made_for(), None),
    ],
)
def test_an_engine_of_another_kind(profile: object, error: str | None) -> None:
    """Another block size, or more blocks than the memory can have, are refused; fewer are a setting."""
    if error is None:
        require_possible(profile, CONFIG)
        return
    with pytest.raises(ValueError, match=error) as refusal:
        require_possible(profile, CONFIG)
    assert "block profile measure" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("factor", "is_refused"), [(1.0, False), (4.0, False), (1.5 * FAR_OFF, True), (0.05, True)])
def test_steps_far_off(factor: float, is_refused: bool) -> None:
    """Noise and other load are tolerated; an order of magnitude means another model or another GPU."""
    check = StepCheck(A30)
    for _ in range(JUDGED_STEPS - 1):
        check.observe(predicted_s=0.02, real_s=0.02 * factor)
        check.require_close()
    check.observe(predicted_s=0.02, real_s=0.02 * factor)
    if not is_refused:
        check.require_close()
        return
    with pytest.raises(ValueError, match="profile: steps take"):
        check.require_close()
    check.forget()
    check.require_close()


def test_a_few_outliers_are_tolerated() -> None:
    """The check uses the median."""
    check = StepCheck(A30)
    for number in range(2 * JUDGED_STEPS):
        check.observe(predicted_s=0.02, real_s=50.0 if number % 3 == 0 else 0.02)
    check.require_close()


def test_a_sidecar_with_such_a_profile_reports_the_engine_as_down(tmp_path: Path) -> None:
    """As long as the state file is of the same engine."""
    writer = busy(writer_at(tmp_path / "state"))
    source = ExportedEngine(str(tmp_path / "state"), made_for(block_size=128), "conditional_median", HOUR_S)
    for _ in range(2):
        with pytest.raises(DownError, match="blocks of 128 tokens") as refusal:
            source.refresh()
        assert refusal.value.state == DOWN
    source.close()
    source = ExportedEngine(str(tmp_path / "state"), made_for(block_size=16), "conditional_median", HOUR_S)
    source.refresh()
    for number in range(JUDGED_STEPS):
        writer.add_step((7 + number, 5.0, 30.0, 2, 2, 2, 0, 60, 40, 0.0, 0.0))
    writer.publish()
    for _ in range(2):
        with pytest.raises(DownError, match="profile: steps take"):
            source.refresh()
    source.close()
    writer.close()


def test_steps_far_off_are_dropped_after_a_while(tmp_path: Path) -> None:
    """An engine without requests has no steps that could show its recovery."""
    writer = busy(writer_at(tmp_path / "state"))
    source = ExportedEngine(str(tmp_path / "state"), A30, "conditional_median", 1e-9)
    source.refresh()
    for number in range(JUDGED_STEPS):
        writer.add_step((7 + number, 5.0, 30.0, 2, 2, 2, 0, 60, 40, 0.0, 0.0))
    writer.publish()
    with pytest.raises(DownError, match="profile: steps take"):
        source.refresh()
    source.refresh()
    source.close()
    writer.close()


def test_the_transit_counts(tmp_path: Path) -> None:
    """A profile's transit is part of TTFT and e2e, and a request reaches the loop after its inward part."""
    writer = writer_at(tmp_path / "state")
    writer.blocks["reuse"] = np.arange(1, 33)
    writer.publish()

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=1e9) as asked:
            plain = await asked.forecast(request())
            asked.sidecar.source._profile = replace(A30, transit=Transit(inward_s=0.5, outward_s=0.25))
            asked.sidecar.source._followed = None
            slow = await asked.forecast(request())
            assert slow.ttft_s == pytest.approx(plain.ttft_s + 0.75)
            assert slow.e2e_s == pytest.approx(plain.e2e_s + 0.75)
            assert slow.queue_s == pytest.approx(plain.queue_s + 0.5)
            assert slow.tpot_s == pytest.approx(plain.tpot_s)

    run(test())


def test_nothing_is_added_where_nothing_was_measured() -> None:
    """A forecast on a clock at wall speed is unchanged."""
    forecast = object()
    assert to_wall_clock(forecast, 1.0) is forecast
