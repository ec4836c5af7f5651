"""The sidecar beside a state file that a test writes: what it makes of it, and of what is wrong with it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import grpc
import numpy as np
import pytest

from predictor.forecast import Forecaster
from predictor.lengths import Tag
from predictor.request import Request
from predictor.transfer import engine_from
from protos.block.v1 import common_pb2, predictor_pb2
from services.engine_state.reader import Reader
from services.engine_state.snapshot import snapshot_from_view
from services.engine_state.writer import Writer
from simulator.codec import snapshot_from
from tests.services.engine_state.files import busy, writer_at
from tests.services.predictor_server.asking import A30, NAME, READY, Asked, request, run, sidecar_of

RESERVED = predictor_pb2.RESERVE_RESULT_RESERVED
EXTENDED = predictor_pb2.RESERVE_RESULT_EXTENDED
CONFLICT = predictor_pb2.RESERVE_RESULT_CONFLICT
REFUSED = predictor_pb2.RESERVE_RESULT_REFUSED
STARTING = common_pb2.INSTANCE_STATE_STARTING
DOWN = common_pb2.INSTANCE_STATE_DOWN
ENDLESS = 1e9  # a test's engine does nothing for as long as it likes


def idle(path: Path) -> Writer:
    """An engine that has nothing to do."""
    writer = writer_at(path)
    writer.blocks["reuse"] = np.arange(1, 33)
    writer.publish()
    return writer


def test_it_forecasts_what_the_snapshot_would(tmp_path: Path) -> None:
    """The answer is that of the engine model made from the same state the long way."""
    writer = busy(writer_at(tmp_path / "state"))

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            response = await asked.predict(request(), request("s", 30, 7), with_delays=True)
            assert response.state == READY
            assert response.instance_id == NAME
            snapshot = snapshot_from_view(Reader(str(tmp_path / "state")).read(contents=True))
            candidates = [
                Request(request_id="r", prompt_tokens=20, output_tokens=10, max_tokens=10),
                Request(request_id="s", prompt_tokens=30, output_tokens=7, max_tokens=7),
            ]
            engine = engine_from(snapshot, A30.step_time)
            engine.set_pace(response.indicators.pace)
            assert (
                response.indicators.pace > 1
            )  # the one step that the file tells of was slower than the profile has it
            expected = Forecaster(engine).forecast(candidates, snapshot.taken_s)
            for prediction, theirs in zip(response.predictions, expected, strict=True):
                ours = prediction.forecast
                assert ours.request_id == theirs.request_id
                assert ours.output_tokens == theirs.output_tokens
                for name in ("ttft_s", "e2e_s", "delay_sum_s"):
                    assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name
            shown = response.indicators
            assert (shown.num_running, shown.num_waiting, shown.num_free_blocks) == (2, 1, 27)
            assert shown.num_total_blocks == 32
            assert shown.queued_prefill_tokens == 70
            assert shown.context_tokens == 43 + 21
            assert shown.source == common_pb2.STATE_SOURCE_EXPORTED

    run(test())
    writer.close()


def test_the_lengths_of_what_runs_come_from_promises_then_from_the_requests_themselves(tmp_path: Path) -> None:
    """A tag that came with the reservation counts for the request that the engine shows later."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            tag = common_pb2.Tag(median_tokens=25, spread=0.0)
            told = common_pb2.Request(request_id="r0", prompt_tokens=40, tag=tag, max_tokens=30)
            assert (await asked.reserve(told)).result == RESERVED
            assert (await asked.predict()).indicators.num_reserved == 1
            busy(writer)
            response = await asked.until(lambda answer: answer.indicators.num_running == 2)
            assert response.indicators.num_reserved == 0  # the engine shows it as cmpl-r0-0-00000000
            # r0 has 3 of 25, r1 carries a tag of its own and has 1 of 12, r5 may have 30
            assert response.indicators.remaining_tokens == 22 + remaining_of_r1() + 30
            assert asked.sample("block_reservations_ended_total", how="shown") == 1

    def remaining_of_r1() -> int:
        return Request(request_id="r1", prompt_tokens=20, tag=Tag(median_tokens=12.0, spread=0.25)).length(1) - 1  # type: ignore[operator]

    run(test())
    writer.close()


def test_promises_count_until_they_are_released_or_expire(tmp_path: Path) -> None:
    """Each promise makes later requests wait longer; what ends, by whatever way, is forgotten."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as asked:
            alone = await asked.forecast(request("x"))
            first = await asked.reserve(request("a", 200, 50))
            assert first.result == RESERVED
            assert first.indicators.num_reserved == 1
            assert first.indicators.queued_prefill_tokens == 200
            assert (await asked.reserve(request("a", 200, 50))).result == EXTENDED
            behind = await asked.forecast(request("x"))
            assert behind.ttft_s > alone.ttft_s
            assert await asked.release("a")
            assert not await asked.release("a")
            assert (await asked.forecast(request("x"))).e2e_s == pytest.approx(alone.e2e_s, rel=1e-6)
            await asked.reserve(request("b"), ttl_s=0.01)
            response = await asked.until(lambda answer: answer.indicators.num_reserved == 0)
            assert response.version == 2
            assert asked.sample("block_reservations_ended_total", how="expired") == 1
            assert (await asked.forecast(request("x"))).e2e_s == pytest.approx(alone.e2e_s, rel=1e-6)

    run(test())
    writer.close()


def test_who_decides_on_old_news_is_told_the_new(tmp_path: Path) -> None:
    """A reservation that rests on an earlier version is not made; the answer says how things stand now."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as asked:
            before = await asked.predict(request("a"))
            condition = {"if_version": before.version, "if_epoch": before.epoch}
            assert (await asked.reserve(request("a"), **condition)).result == RESERVED
            response = await asked.reserve(request("b"), **condition)
            assert response.result == CONFLICT
            assert response.prediction.forecast.ttft_s > before.predictions[0].forecast.ttft_s
            assert (await asked.predict()).indicators.num_reserved == 1
            again = {"if_version": response.version, "if_epoch": response.epoch}
            assert (await asked.reserve(request("b"), **again)).result == RESERVED
            other = {"if_version": again["if_version"] + 1, "if_epoch": response.epoch ^ 1}
            assert (await asked.reserve(request("c"), **other)).result == CONFLICT

    run(test())
    writer.close()


def test_what_could_never_be_served_is_refused_by_its_field(tmp_path: Path) -> None:
    """One bad request in a batch leaves the others as they are, and nothing is reserved for it."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as asked:
            long, bad = request("long", 10_000), common_pb2.Request(request_id="bad", prompt_tokens=0)
            response = await asked.predict(long, request("good"), bad)
            refused, good, also_refused = response.predictions
            assert refused.refusal.field == also_refused.refusal.field == "prompt_tokens"
            assert "max_model_len" in refused.refusal.reason
            assert good.forecast.output_tokens == 10
            for one in (long, bad):
                answer = await asked.reserve(one)
                assert answer.result == REFUSED
                assert answer.prediction.refusal.field == "prompt_tokens"
            assert (await asked.predict()).indicators.num_reserved == 0
            for fields in ({"ttl_s": 0.0}, {"ttl_s": float("nan")}, {"if_version": 1}):
                await expect_refusal(asked, grpc.StatusCode.INVALID_ARGUMENT, **fields)
            await expect_refusal(asked, grpc.StatusCode.FAILED_PRECONDITION, instance_id="another")

    async def expect_refusal(asked: Asked, code: grpc.StatusCode, **fields: object) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.reserve(request("x"), **fields)
        assert caught.value.code() is code

    run(test())
    writer.close()


def test_questions_on_a_stream_are_answered_in_order(tmp_path: Path) -> None:
    """One answer for each question."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as asked:
            call = asked.stub.PredictStream()
            for name in "abc":
                await call.write(predictor_pb2.PredictRequest(requests=[request(name)]))
                answer = await call.read()
                assert [one.request_id for one in answer.predictions] == [name]
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF

    run(test())
    writer.close()


def test_it_waits_for_an_engine_knows_its_end_and_takes_up_the_next(tmp_path: Path) -> None:
    """Without a file the instance is starting; with a dead engine's it is down; promises outlive neither harm."""
    path = tmp_path / "state"

    async def test() -> None:
        async with sidecar_of(path) as asked:
            response = await asked.predict(request())
            assert response.state == STARTING
            assert not response.predictions
            refused = await asked.reserve(request())
            assert (refused.result, refused.state) == (REFUSED, STARTING)
            assert "does not exist" in refused.prediction.refusal.reason
            writer = idle(path)
            await asked.until(lambda answer: answer.state == READY)
            await asked.reserve(request("kept"))
            writer.close()
            await asked.until(lambda answer: answer.state in (STARTING, DOWN))
            writer = idle(path)
            response = await asked.until(lambda answer: answer.state == READY)
            assert response.indicators.num_reserved == 1
            assert await asked.release("kept")
            writer.close()
            path.write_bytes(b"garbage")
            await asked.until(lambda answer: answer.state == DOWN)

    run(test())


def test_a_step_that_never_ends_is_taken_for_the_end(tmp_path: Path) -> None:
    """An engine that hangs in the middle of a step is not recommended, until it shows a sign of life."""
    writer = busy(writer_at(tmp_path / "state"))

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=0.05) as asked:
            await asked.until(lambda answer: answer.state == DOWN)
            writer.state["num_in_flight"] = 0
            writer.state["num_scheduled"] = 0
            writer.live["in_flight_tokens"] = 0
            writer.publish()
            await asked.until(lambda answer: answer.state == READY)

    run(test())
    writer.close()


def test_a_state_that_contradicts_itself_is_no_state(tmp_path: Path) -> None:
    """The instance is down while its file says what cannot be, and back as soon as it makes sense."""
    writer = busy(writer_at(tmp_path / "state"))

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            await asked.until(lambda answer: answer.state == READY)
            writer.live["computed_tokens"][0] = 10_000
            writer.publish()
            await asked.until(lambda answer: answer.state == DOWN)
            writer.live["computed_tokens"][0] = 43
            writer.publish()
            await asked.until(lambda answer: answer.state == READY)

    run(test())
    writer.close()


def test_what_the_blocks_hold_may_be_wrong(tmp_path: Path) -> None:
    """Then no prefix hits are foreseen, and all else is as it was."""
    writer = busy(writer_at(tmp_path / "state"))
    writer.blocks["reuse"][20] = 0  # held by nobody, and not free
    writer.publish()

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            response = await asked.predict(request())
            assert response.state == READY
            assert not response.predictions[0].HasField("prefix_hit_tokens")
            assert response.indicators.num_running == 2

    run(test())
    writer.close()


def test_forecasts_are_compared_with_what_came_of_them(tmp_path: Path) -> None:
    """The error of a forecast is exported once its request has ended; that of an aborted one is not."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            for name in ("r0", "r1"):
                foretold = common_pb2.Forecast(
                    request_id=name, queue_s=0.1, ttft_s=1.0, e2e_s=3.0, tpot_s=0.1, output_tokens=21
                )
                await asked.reserve(request(name, 40, 30), forecast=foretold)
            busy(writer)
            await asked.until(lambda answer: answer.indicators.num_running == 2)
            for slot, reason in ((0, "stop"), (1, "abort")):
                writer.add_outcome(
                    serial=slot + 1, request_id=f"cmpl-r{slot}-0-0000000{slot}", arrival_s=1.0, scheduled_s=1.1,
                    first_token_s=2.0, finished_s=5.0, prompt_tokens=40, output_tokens=21, hit_tokens=0,
                    num_preemptions=0, reason=reason,
                )  # fmt: skip
            writer.state["num_running"] = writer.state["num_waiting"] = writer.state["num_in_flight"] = 0
            writer.state["num_free_blocks"] = 32
            writer.blocks["reuse"] = np.arange(1, 33)
            writer.publish()
            await asked.until(lambda _: asked.sample("block_forecast_error_ratio_count", quantity="e2e") == 1)
            assert asked.sample("block_forecast_error_ratio_sum", quantity="e2e") == pytest.approx(0.25)
            assert asked.sample("block_forecast_error_ratio_sum", quantity="ttft") == pytest.approx(0.0)
            assert asked.sample("block_forecast_bias_ratio", quantity="e2e") == pytest.approx(-0.25)
            assert asked.sample("block_forecast_error_ratio_sum", quantity="tpot") == pytest.approx(1 / 3)

    run(test())
    writer.close()


def test_a_request_that_came_and_went_between_two_looks_was_shown(tmp_path: Path) -> None:
    """Its promise ends, and its forecast is compared, though the engine was never seen to have it."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            alone = await asked.forecast(request("x"))
            foretold = common_pb2.Forecast(request_id="r0", ttft_s=1.0, e2e_s=3.0, output_tokens=21)
            assert (await asked.reserve(request("r0", 200, 30), forecast=foretold)).result == RESERVED
            writer.add_outcome(
                serial=1, request_id="cmpl-r0-0-00000000", arrival_s=1.0, scheduled_s=1.1, first_token_s=2.0,
                finished_s=5.0, prompt_tokens=200, output_tokens=21, hit_tokens=0, num_preemptions=0, reason="stop",
            )  # fmt: skip
            writer.publish()
            await asked.until(lambda _: asked.sample("block_reservations_ended_total", how="shown") == 1)
            assert asked.sample("block_forecast_error_ratio_count", quantity="e2e") == 1
            assert (await asked.predict()).indicators.num_reserved == 0
            assert (await asked.forecast(request("x"))).e2e_s == pytest.approx(alone.e2e_s, rel=1e-6)

    run(test())
    writer.close()


def test_who_watches_hears_of_every_change_and_that_there_was_none(tmp_path: Path) -> None:
    """The first message is full, later ones hold what has changed, if anything; a snapshot comes where it is wanted."""
    writer = idle(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=ENDLESS) as asked:
            call = asked.stub.Watch(predictor_pb2.WatchRequest(min_interval_s=0.02, with_snapshots=True))
            first = await call.read()
            assert (first.sequence, first.full, first.indicators.num_free_blocks) == (1, True, 32)
            assert b'"version":2' in first.snapshot_json
            second = await call.read()
            assert (second.sequence, second.full, second.version) == (2, False, 0)
            assert not second.indicators.HasField("num_reserved")
            assert 0 <= second.indicators.age_s < math.inf
            await asked.reserve(request("a", 32))
            while (second := await call.read()).version == 0:
                pass
            assert not second.full
            assert {field.name for field, _ in second.indicators.ListFields()} >= {"num_reserved", "source"}
            assert not second.indicators.HasField("num_free_blocks")
            call.cancel()
            busy(writer)
            call = asked.stub.Watch(predictor_pb2.WatchRequest(with_snapshots=True))
            snapshot = snapshot_from(json.loads((await call.read()).snapshot_json))
            assert [item.request.request_id for item in snapshot.running] == [
                "cmpl-r1-0-00000001",
                "cmpl-r0-0-00000000",
            ]
            assert [request.request_id for request in snapshot.reserved] == ["a"]
            call.cancel()

    run(test())
    writer.close()
