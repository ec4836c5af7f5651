"""One process with the sidecars of an engine's data-parallel ranks: lockstep, and requests that another rank shows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor.approximations import UNKNOWN_RANKS
from predictor.data_parallel import DataParallelRank, LockstepRules
from predictor.tabulated_costs import step_seconds, tabulate
from protos.block.v1 import common_pb2, predictor_pb2
from services.engine_state.writer import Writer
from tests.services.engine_state.files import CONFIG, busy
from tests.services.predictor_server.running_sidecars import A30, NEVER_S, READY, NodeClient, node_of, request, run
from tests.services.waiting import until

LOCKSTEP = LockstepRules()


def rank_at(path: Path, number: int, *, lockstep: LockstepRules | None = LOCKSTEP, **table: Any) -> Writer:
    """Create the file of one of two ranks."""
    known = DataParallelRank(rank=number, size=2, group="g", lockstep=lockstep).table() | table
    settings = {"engine": asdict(CONFIG), "model": "tiny", "data_parallel": known}
    writer = Writer(str(path), settings, num_slots=8, num_blocks=32, blocks_per_request=16)
    writer.state["num_blocks"] = writer.state["num_free_blocks"] = 32
    writer.blocks["reuse"] = np.arange(1, 33)
    return writer


def idle(writer: Writer) -> Writer:
    """Publish a state without requests."""
    writer.publish()
    return writer


async def forecast(node: NodeClient, name: str) -> common_pb2.Forecast:
    """Forecast one request on one instance."""
    message = predictor_pb2.PredictRequest(requests=[request("new", 20, 10)], instance_id=name)
    (prediction,) = (await node.stub.Predict(message)).predictions
    assert prediction.HasField("forecast"), prediction
    forecast: common_pb2.Forecast = prediction.forecast
    return forecast


def test_an_idle_rank_in_lockstep_is_as_slow_as_a_busy_one(tmp_path: Path) -> None:
    """Its steps take as long as those of the other rank; without lockstep they do not."""

    async def e2e_s(folder: Path, lockstep: LockstepRules | None) -> float:
        files = {"r0": folder / f"r0-{bool(lockstep)}", "r1": folder / f"r1-{bool(lockstep)}"}
        writers = [busy(rank_at(files["r0"], 0, lockstep=lockstep)), idle(rank_at(files["r1"], 1, lockstep=lockstep))]
        try:
            async with node_of(files, stall_s=NEVER_S) as node:
                found: float = (await forecast(node, "r1")).e2e_s
                return found
        finally:
            for writer in writers:
                writer.close()

    async def test() -> None:
        beside, alone = await e2e_s(tmp_path, LOCKSTEP), await e2e_s(tmp_path, None)
        assert beside > 1.02 * alone

    run(test())


def test_a_request_that_another_rank_shows_is_reserved_no_longer(tmp_path: Path) -> None:
    """As where vLLM's own balancing chose that rank."""

    async def test() -> None:
        files = {"r0": tmp_path / "r0", "r1": tmp_path / "r1"}
        r0, r1 = idle(rank_at(files["r0"], 0, lockstep=None)), idle(rank_at(files["r1"], 1, lockstep=None))
        try:
            async with node_of(files, stall_s=NEVER_S) as node:
                message = predictor_pb2.ReserveRequest(request=request("r0", 40, 30), ttl_s=60.0, instance_id="r1")
                assert (await node.stub.Reserve(message)).indicators.num_reserved == 1
                busy(r0)  # it shows r0, r1 and r5
                await until(lambda: not any(len(sidecar.reservations) for sidecar in node.sidecars))
        finally:
            r0.close()
            r1.close()

    run(test())


def test_the_pace_is_that_of_the_slowest_rank(tmp_path: Path) -> None:
    """A rank with short steps is not slower than its profile, although its passes take as long as the other's."""
    costs = tabulate(A30.step_time, 600, 8)
    long_s = 1.2 * float(step_seconds(costs, 200, 8, 0, 0.0, 1, 40_000.0, 0.0, 0.0))

    async def test() -> None:
        files = {"r0": tmp_path / "r0", "r1": tmp_path / "r1"}
        slow, quick = (rank_at(files[name], number) for number, name in enumerate(files))
        try:
            async with node_of(files, stall_s=NEVER_S) as node:
                await until(lambda: all(one.source.current() for one in node.sidecars))  # type: ignore[attr-defined]
                for number in range(40):
                    start_s = number * long_s
                    slow.add_step((number, start_s, long_s, 200, 8, 0, 1, 0, 0, 40_000.0, 0.0))
                    quick.add_step((number, start_s, long_s, 1, 1, 1, 0, 10, 10, 0.0, 0.0))
                    for writer in (slow, quick):
                        writer.publish()
                    await until(lambda: all(len(one.source.rank_steps.passes) > number for one in node.sidecars))  # type: ignore[attr-defined]  # noqa: B023
                paces = [one.source.current().counters["pace"] for one in node.sidecars]  # type: ignore[attr-defined]
                assert paces == pytest.approx([1.2, 1.2], rel=0.05)
        finally:
            slow.close()
            quick.close()

    run(test())


def test_a_rank_whose_others_are_elsewhere_says_so(tmp_path: Path) -> None:
    """Its forecasts leave them out, which explanations name."""

    async def test() -> None:
        files = {"r0": tmp_path / "r0", "other": tmp_path / "other"}
        writers = [idle(rank_at(files["r0"], 0)), idle(rank_at(files["other"], 1, group="elsewhere"))]
        try:
            async with node_of(files, stall_s=NEVER_S) as node:
                assert UNKNOWN_RANKS in (await forecast(node, "r0")).approximations
        finally:
            for writer in writers:
                writer.close()

    run(test())


@pytest.mark.parametrize(
    ("table", "words"),
    [({"rank": 5}, "data_parallel_rank: must be below data_parallel_size 2, not 5"), ({"sync_interval": 0}, "sync")],
)
def test_an_impossible_rank_is_an_engine_that_is_down(
    tmp_path: Path, table: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file says what is wrong; the other rank is served."""

    async def test() -> None:
        files = {"r0": tmp_path / "r0", "r1": tmp_path / "r1"}
        writers = [idle(rank_at(files["r0"], 0)), idle(rank_at(files["r1"], 1, **table))]
        try:
            async with node_of(files, stall_s=NEVER_S) as node:
                states = [
                    (await node.stub.Predict(predictor_pb2.PredictRequest(instance_id=name))).state for name in files
                ]
                assert states == [READY, common_pb2.INSTANCE_STATE_DOWN]
                assert (await forecast(node, "r0")).e2e_s > 0
        finally:
            for writer in writers:
                writer.close()

    run(test())
    assert any(words in str(getattr(record, "fields", record.__dict__)) for record in caplog.records)
