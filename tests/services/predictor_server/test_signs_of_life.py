"""What a sidecar makes of an engine that shows nothing of what it was promised, or has not shown for long how fast it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from protos.block.v1 import common_pb2
from services.engine_state.writer import Writer
from tests.services.engine_state.files import busy, writer_at
from tests.services.predictor_server.asking import READY, Asked, request, run, sidecar_of

DRAINING = common_pb2.INSTANCE_STATE_DRAINING
ENDLESS = 1e9
SHORT_S = 0.01


def idle(path: Path) -> Writer:
    """An engine that has nothing to do."""
    writer = writer_at(path)
    writer.blocks["reuse"] = np.arange(1, 33)
    writer.publish()
    return writer


async def promised_in_vain(asked: Asked, number: int) -> None:
    """Promise a place to so many whom the engine never shows, one after the other."""
    for place in range(number):
        await asked.reserve(request(f"v{place}"), ttl_s=SHORT_S)
        await asked.until(lambda answer: answer.indicators.num_reserved == 0)


def test_an_engine_that_shows_none_of_its_requests_is_avoided_until_it_shows_one(tmp_path: Path) -> None:
    """One that hangs with nothing to do looks idle; only that promises expire gives it away."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            await promised_in_vain(asked, 2)
            assert (await asked.predict(request())).state == READY
            await promised_in_vain(asked, 1)
            hanging = await asked.until(lambda answer: answer.state == DRAINING)
            assert not hanging.predictions
            assert asked.sample("block_engine_up") == 0
            busy(writer)
            await asked.until(lambda answer: answer.state == READY)
            assert asked.sample("block_engine_up") == 1
            assert (await asked.predict(request())).predictions[0].HasField("forecast")

    run(test())
    writer.close()


def test_promises_that_nobody_keeps_do_no_harm_while_others_are_shown(tmp_path: Path) -> None:
    """Where the engine shows others meanwhile, those who sent nothing are to blame."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            await promised_in_vain(asked, 2)
            busy(writer)
            await asked.until(lambda answer: answer.indicators.num_running == 2)
            await promised_in_vain(asked, 2)
            assert (await asked.predict()).state == READY

    run(test())
    writer.close()


def test_the_pace_of_long_ago_is_forgotten(tmp_path: Path) -> None:
    """An engine that was slow gets nothing to do, so that it could never show that it is well again."""
    writer = busy(writer_at(tmp_path / "state"))

    async def paces(forget_s: float) -> tuple[float, float]:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS, forget_s=forget_s) as asked:
            response = await asked.until(lambda answer: (answer.indicators.pace == 1) == (forget_s < ENDLESS))
            return response.indicators.pace, (await asked.forecast(request())).e2e_s

    async def test() -> None:
        slow, slow_e2e_s = await paces(ENDLESS)
        pace, e2e_s = await paces(SHORT_S)
        assert slow > pace == 1
        assert slow_e2e_s > e2e_s

    run(test())
    writer.close()
