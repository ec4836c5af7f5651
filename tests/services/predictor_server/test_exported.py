"""A sidecar beside a state file that a test writes, valid or not."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.lengths import DEFAULT_RESIDUAL, Tag
from predictor.request import RequestFacts
from predictor.snapshot import VERSION
from protos.block.v1 import common_pb2, predictor_pb2
from services.engine_state.reader import Reader
from services.engine_state.snapshot import snapshot_from_view
from services.engine_state.writer import Writer
from services.predictor_server.exported import ExportedEngine
from simulator.codec import snapshot_from
from tests.services.engine_state.files import CONFIG, VTC, busy, counting, writer_at
from tests.services.predictor_server.running_sidecars import (
    A30,
    NAME,
    NEVER_S,
    READY,
    SidecarClient,
    idle_engine,
    request,
    run,
    sidecar_of,
)

RESERVED = predictor_pb2.RESERVE_RESULT_RESERVED
EXTENDED = predictor_pb2.RESERVE_RESULT_EXTENDED
CONFLICT = predictor_pb2.RESERVE_RESULT_CONFLICT
REFUSED = predictor_pb2.RESERVE_RESULT_REFUSED
STARTING = common_pb2.INSTANCE_STATE_STARTING
DOWN = common_pb2.INSTANCE_STATE_DOWN


def test_forecasts_equal_those_from_the_snapshot(tmp_path: Path) -> None:
    """The engine replica gives the forecasts of an engine model that is made from the same state's snapshot."""
    writer = busy(writer_at(tmp_path / "state"))

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            response = await client.predict(request(), request("s", 30, 7), with_delays=True)
            assert response.state == READY
            assert response.instance_id == NAME
            snapshot = snapshot_from_view(Reader(str(tmp_path / "state")).read(contents=True))
            candidates = [
                RequestFacts(request_id="r", prompt_tokens=20, output_tokens=10, max_tokens=10),
                RequestFacts(request_id="s", prompt_tokens=30, output_tokens=7, max_tokens=7),
            ]
            engine = engine_from(snapshot, A30.step_time)
            engine.set_pace(response.indicators.pace)
            assert response.indicators.pace > 1  # the one step in the file was slower than by the profile
            from_snapshot = Forecaster(engine).forecast(candidates, snapshot.taken_s)
            for prediction, theirs in zip(response.predictions, from_snapshot, strict=True):
                ours = prediction.forecast
                assert ours.request_id == theirs.request_id
                assert ours.output_tokens == theirs.output_tokens
                for name in ("ttft_s", "e2e_s", "delay_sum_s"):
                    assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name
            indicators = response.indicators
            assert (indicators.num_running, indicators.num_waiting, indicators.num_free_blocks) == (2, 1, 27)
            assert indicators.num_total_blocks == 32
            assert indicators.queued_prefill_tokens == 70
            assert indicators.context_tokens == 43 + 21
            assert indicators.source == common_pb2.STATE_SOURCE_EXPORTED

    run(test())
    writer.close()


def test_only_deadlines(tmp_path: Path) -> None:
    """Which deadlines are kept comes with the times of a whole forecast, without delays and gains."""
    writer = busy(writer_at(tmp_path / "state"))

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            whole = (await client.predict(request(), with_delays=True)).predictions[0].forecast
            fields = {"with_delays": True, "only_deadlines": True, "min_slack_s": 0.5}
            short = (await client.predict(request(), **fields)).predictions[0].forecast
            for name in ("ttft_s", "e2e_s", "queue_s", "attained", "others_missed", "others_preempted"):
                assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=1e-6), name
            assert whole.HasField("delay_sum_s")
            assert whole.HasField("gain_before")
            for name in ("delay_sum_s", "delay_worst_s", "gain_before", "gain_after"):
                assert not short.HasField(name), name
            for wrong in (-0.1, math.nan, math.inf):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.predict(request(), min_slack_s=wrong)
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert caught.value.details() == f"min_slack_s: must be at least 0 and finite, not {wrong}"

    run(test())
    writer.close()


def test_the_acceptance_of_draft_tokens_is_learnt_from_the_counters(tmp_path: Path) -> None:
    """Forecasts expect what the engine has accepted so far, and say so; an engine that restarts is learnt again."""
    config = replace(CONFIG, speculative_method="ngram", num_speculative_tokens=3)
    writer = busy(writer_at(tmp_path / "state", config))
    source = ExportedEngine(str(tmp_path / "state"), A30, DEFAULT_RESIDUAL, 60.0)
    candidate = RequestFacts(request_id="r", prompt_tokens=20, output_tokens=60, max_tokens=60)
    view = source.refresh()
    (before,) = view.forecaster.forecast([candidate], view.now_s)
    assert view.approximations == ("speculation (ngram): acceptance 0.39 as configured, no drafts seen",)
    state = writer.state
    state["num_drafts"], state["num_draft_tokens"], state["num_draft_chances"] = 10_000, 30_000, 20_000
    state["num_accepted"][0, :3] = (1_000, 100, 10)
    writer.publish()
    view = source.refresh()
    (after,) = view.forecaster.forecast([candidate], view.now_s)
    expected = view.engine.expected_drafts
    assert expected.accepted == pytest.approx((0, 0.1, 0.11, 0.111), abs=0.005)
    assert (expected.proposal_share, expected.proposed_tokens) == (pytest.approx(0.5, abs=0.01), 3)
    assert view.approximations == (
        "speculation (ngram): acceptance 0.04 learnt from 10,000 drafts, proposed in 0.50 of steps",
    )
    assert after.e2e_s > 1.5 * before.e2e_s
    writer.close()
    busy(again := writer_at(tmp_path / "state", config))
    assert source.refresh().approximations[0].endswith("no drafts seen")
    again.close()
    source.close()


def test_lengths_come_from_reservations_and_then_from_the_requests(tmp_path: Path) -> None:
    """The tag of a reservation counts for the request that reaches the engine later."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            tag = common_pb2.Tag(median_tokens=25, spread=0.0)
            reserved = common_pb2.Request(request_id="r0", prompt_tokens=40, tag=tag, max_tokens=30)
            assert (await client.reserve(reserved)).result == RESERVED
            assert (await client.predict()).indicators.num_reserved == 1
            busy(writer)
            response = await client.until(lambda response: response.indicators.num_running == 2)
            assert response.indicators.num_reserved == 0  # the engine shows it as cmpl-r0-0-00000000
            # r0 has 3 of 25, r1 carries a tag of its own and has 1 of 12, r5 may have 30
            assert response.indicators.remaining_tokens == 22 + remaining_of_r1() + 30
            assert client.sample("block_reservations_ended_total", how="shown") == 1

    def remaining_of_r1() -> int:
        return RequestFacts(request_id="r1", prompt_tokens=20, tag=Tag(median_tokens=12.0, spread=0.25)).length(1) - 1  # type: ignore[operator]

    run(test())
    writer.close()


def test_reservations_count_until_they_are_released_or_expire(tmp_path: Path) -> None:
    """Each reservation makes later requests wait longer; one that has ended does not."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            alone = await client.forecast(request("x"))
            first = await client.reserve(request("a", 200, 50))
            assert first.result == RESERVED
            assert first.indicators.num_reserved == 1
            assert first.indicators.queued_prefill_tokens == 200
            assert (await client.reserve(request("a", 200, 50))).result == EXTENDED
            behind = await client.forecast(request("x"))
            assert behind.ttft_s > alone.ttft_s
            assert await client.release("a")
            assert not await client.release("a")
            assert (await client.forecast(request("x"))).e2e_s == pytest.approx(alone.e2e_s, rel=1e-6)
            await client.reserve(request("b"), ttl_s=0.01)
            response = await client.until(lambda response: response.indicators.num_reserved == 0)
            assert response.version == 2
            assert client.sample("block_reservations_ended_total", how="expired") == 1
            assert (await client.forecast(request("x"))).e2e_s == pytest.approx(alone.e2e_s, rel=1e-6)

    run(test())
    writer.close()


def test_a_reservation_with_an_old_version_conflicts(tmp_path: Path) -> None:
    """It is not made, and the response has the forecast for the current state."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            before = await client.predict(request("a"))
            condition = {"if_version": before.version, "if_epoch": before.epoch}
            assert (await client.reserve(request("a"), **condition)).result == RESERVED
            response = await client.reserve(request("b"), **condition)
            assert response.result == CONFLICT
            assert response.prediction.forecast.ttft_s > before.predictions[0].forecast.ttft_s
            assert (await client.predict()).indicators.num_reserved == 1
            again = {"if_version": response.version, "if_epoch": response.epoch}
            assert (await client.reserve(request("b"), **again)).result == RESERVED
            other = {"if_version": again["if_version"] + 1, "if_epoch": response.epoch ^ 1}
            assert (await client.reserve(request("c"), **other)).result == CONFLICT

    run(test())
    writer.close()


def test_several_prompts_are_forecast_as_one_that_the_engine_can_take(tmp_path: Path) -> None:
    """Together they may have more tokens than one prompt may have."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            few, many = request("few", 40, 1, num_prompts=2), request("many", 10_000, 1, num_prompts=50)
            short, long = (await client.predict(few, many)).predictions
            assert short.forecast.ttft_s < long.forecast.ttft_s
            assert long.forecast.output_tokens == 1
            assert (await client.reserve(many)).result == RESERVED

    run(test())
    writer.close()


def test_a_request_that_could_never_be_served_is_refused_by_its_field(tmp_path: Path) -> None:
    """One bad request in a batch does not affect the others, and nothing is reserved for it."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            long, bad = request("long", 10_000), common_pb2.Request(request_id="bad", prompt_tokens=0)
            response = await client.predict(long, request("good"), bad)
            refused, good, also_refused = response.predictions
            assert refused.refusal.field == also_refused.refusal.field == "prompt_tokens"
            assert "max_model_len" in refused.refusal.reason
            assert good.forecast.output_tokens == 10
            for one in (long, bad):
                answer = await client.reserve(one)
                assert answer.result == REFUSED
                assert answer.prediction.refusal.field == "prompt_tokens"
            assert (await client.predict()).indicators.num_reserved == 0
            for fields in ({"ttl_s": 0.0}, {"ttl_s": float("nan")}, {"if_version": 1}):
                await expect_refusal(client, grpc.StatusCode.INVALID_ARGUMENT, **fields)
            await expect_refusal(client, grpc.StatusCode.FAILED_PRECONDITION, instance_id="another")

    async def expect_refusal(client: SidecarClient, code: grpc.StatusCode, **fields: object) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.reserve(request("x"), **fields)
        assert caught.value.code() is code

    run(test())
    writer.close()


def test_messages_on_a_stream_get_responses_in_order(tmp_path: Path) -> None:
    """One response for each message."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            call = client.stub.PredictStream()
            for name in "abc":
                await call.write(predictor_pb2.PredictRequest(requests=[request(name)]))
                response = await call.read()
                assert [one.request_id for one in response.predictions] == [name]
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF

    run(test())
    writer.close()


def test_it_follows_an_engine_over_start_end_and_restart(tmp_path: Path) -> None:
    """Without a file the instance is starting, with an ended engine's it is down; reservations survive both."""
    path = tmp_path / "state"

    async def test() -> None:
        async with sidecar_of(path) as client:
            response = await client.predict(request())
            assert response.state == STARTING
            assert not response.predictions
            refused = await client.reserve(request())
            assert (refused.result, refused.state) == (REFUSED, STARTING)
            assert "does not exist" in refused.prediction.refusal.reason
            writer = idle_engine(path)
            await client.until(lambda response: response.state == READY)
            await client.reserve(request("kept"))
            writer.close()
            await client.until(lambda response: response.state in (STARTING, DOWN))
            writer = idle_engine(path)
            response = await client.until(lambda response: response.state == READY)
            assert response.indicators.num_reserved == 1
            assert await client.release("kept")
            writer.close()
            path.write_bytes(b"garbage")
            await client.until(lambda response: response.state == DOWN)

    run(test())


def test_an_engine_that_is_upgraded_returns_with_the_rules_of_its_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In 0.30 a long prompt is cut even where it is alone; a version that is not known is served with a warning."""
    path = tmp_path / "state"

    async def test() -> None:
        async with sidecar_of(path) as client:
            ttft_s, named = {}, {}
            for version in ("0.30.0", "0.31.0", "0.34.0"):
                config = replace(CONFIG, long_prefill_token_threshold=20, vllm_version=version)
                writer = idle_engine(path, config)
                await client.until(lambda response: response.state == READY)
                forecast = await client.forecast(request("x", 200, 1))
                ttft_s[version], named[version] = forecast.ttft_s, list(forecast.approximations)
                writer.close()
                await client.until(lambda response: response.state in (STARTING, DOWN))
            assert ttft_s["0.30.0"] > 3 * ttft_s["0.31.0"]
            assert ttft_s["0.34.0"] == pytest.approx(ttft_s["0.31.0"])
            assert named["0.31.0"] == []
            assert named["0.34.0"] == ["vLLM 0.34 is not known, and is forecast by the rules of 0.33"]

    with caplog.at_level("WARNING"):
        run(test())
    known = [record for record in caplog.records if "nearest rules" in record.message]
    assert len(known) == 1


def test_an_engine_of_no_version_is_down(tmp_path: Path) -> None:
    """The reason names the setting."""
    writer = Writer(
        str(tmp_path / "state"), {"engine": {**asdict(CONFIG), "vllm_version": "unknown"}}, num_slots=8, num_blocks=32,
        blocks_per_request=16,
    )  # fmt: skip
    writer.publish()

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            await client.until(lambda response: response.state == DOWN)
            reason = (await client.reserve(request())).prediction.refusal.reason
            assert "settings.engine.vllm_version: 'unknown' is not a version of vLLM such as 0.32.0" in reason

    run(test())
    writer.close()


def test_an_engine_whose_step_does_not_end_is_down(tmp_path: Path) -> None:
    """It is ready again with its next publication."""
    writer = busy(writer_at(tmp_path / "state"))

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=0.05) as client:
            await client.until(lambda response: response.state == DOWN)
            writer.state["num_in_flight"] = 0
            writer.state["num_scheduled"] = 0
            writer.live["in_flight_tokens"] = 0
            writer.publish()
            await client.until(lambda response: response.state == READY)

    run(test())
    writer.close()


def test_forecasts_go_by_what_clients_have_been_served(tmp_path: Path) -> None:
    """Of two clients that wait, the one that was served less goes first; an impossible counter is no state at all."""
    writer = writer_at(tmp_path / "state", replace(VTC, max_num_seqs=1), num_blocks=0, num_clients=4)
    writer.put_request(0, serial=1, request_id="cmpl-r0-0-00000000", arrival_s=0.0, prompt_tokens=70, max_tokens=30,
                       client_id="alice")  # fmt: skip
    writer.waiting[0], writer.state["num_waiting"] = 0, 1

    async def ttft_s(client: SidecarClient, alice_tokens: float, bob_tokens: float) -> float:
        counting(writer, [("alice", 1.0, alice_tokens, 1), ("bob", 1.0, bob_tokens, 1)])
        response = await client.predict(request(client_id="bob"))
        assert response.state == READY
        snapshot = snapshot_from_view(Reader(str(tmp_path / "state")).read())
        candidate = RequestFacts(
            request_id="r",
            prompt_tokens=20,
            output_tokens=10,
            max_tokens=10,
            client_id="bob",
            arrival_s=snapshot.taken_s,
        )
        (theirs,) = Forecaster(engine_from(snapshot, A30.step_time)).forecast([candidate], snapshot.taken_s)
        ours = response.predictions[0].forecast
        assert ours.ttft_s == pytest.approx(theirs.ttft_s, rel=1e-6)
        return float(ours.ttft_s)

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            before, after = await ttft_s(client, 5000.0, 100.0), await ttft_s(client, 100.0, 5000.0)
            assert after > 10 * before
            writer.clients["tokens"][1] = np.nan
            writer.publish()
            response = await client.until(lambda response: response.state == DOWN)
            assert not response.predictions
            refused = await client.reserve(request())
            assert "memory.clients.tokens: must be at least 0" in refused.prediction.refusal.reason
            assert "\n" not in refused.prediction.refusal.reason
            writer.clients["tokens"][1] = 3.0
            writer.publish()
            await client.until(lambda response: response.state == READY)

    run(test())
    writer.close()


def test_an_inconsistent_state_makes_the_instance_down(tmp_path: Path) -> None:
    """It is ready again once its state is consistent."""
    writer = busy(writer_at(tmp_path / "state"))

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            await client.until(lambda response: response.state == READY)
            writer.live["computed_tokens"][0] = 10_000
            writer.publish()
            await client.until(lambda response: response.state == DOWN)
            writer.live["computed_tokens"][0] = 43
            writer.publish()
            await client.until(lambda response: response.state == READY)

    run(test())
    writer.close()


def test_inconsistent_block_contents_only_disable_prefix_hits(tmp_path: Path) -> None:
    """All else is forecast as before."""
    writer = busy(writer_at(tmp_path / "state"))
    writer.blocks["reuse"][20] = 0  # neither held nor free
    writer.publish()

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            response = await client.predict(request())
            assert response.state == READY
            assert not response.predictions[0].HasField("prefix_hit_tokens")
            assert response.indicators.num_running == 2

    run(test())
    writer.close()


def test_forecasts_are_compared_with_the_ends_of_their_requests(tmp_path: Path) -> None:
    """The error of a forecast is exported once its request has ended; that of an aborted one is not."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            for name in ("r0", "r1"):
                forecast = common_pb2.Forecast(
                    request_id=name, queue_s=0.1, ttft_s=1.0, e2e_s=3.0, tpot_s=0.1, output_tokens=21
                )
                await client.reserve(request(name, 40, 30), forecast=forecast)
            busy(writer)
            await client.until(lambda response: response.indicators.num_running == 2)
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
            await client.until(lambda _: client.sample("block_forecast_error_ratio_count", quantity="e2e") == 1)
            assert client.sample("block_forecast_error_ratio_sum", quantity="e2e") == pytest.approx(0.25)
            assert client.sample("block_forecast_error_ratio_sum", quantity="ttft") == pytest.approx(0.0)
            assert client.sample("block_forecast_bias_ratio", quantity="e2e") == pytest.approx(-0.25)
            assert client.sample("block_forecast_error_ratio_sum", quantity="tpot") == pytest.approx(1 / 3)

    run(test())
    writer.close()


def test_a_request_that_arrives_and_ends_between_two_refreshes_is_noticed(tmp_path: Path) -> None:
    """Its reservation ends, and its forecast is compared, though no view had it."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            alone = await client.forecast(request("x"))
            forecast = common_pb2.Forecast(request_id="r0", ttft_s=1.0, e2e_s=3.0, output_tokens=21)
            assert (await client.reserve(request("r0", 200, 30), forecast=forecast)).result == RESERVED
            writer.add_outcome(
                serial=1, request_id="cmpl-r0-0-00000000", arrival_s=1.0, scheduled_s=1.1, first_token_s=2.0,
                finished_s=5.0, prompt_tokens=200, output_tokens=21, hit_tokens=0, num_preemptions=0, reason="stop",
            )  # fmt: skip
            writer.publish()
            await client.until(lambda _: client.sample("block_reservations_ended_total", how="shown") == 1)
            assert client.sample("block_forecast_error_ratio_count", quantity="e2e") == 1
            assert (await client.predict()).indicators.num_reserved == 0
            assert (await client.forecast(request("x"))).e2e_s == pytest.approx(alone.e2e_s, rel=1e-6)

    run(test())
    writer.close()


def test_watch_returns_changes_and_that_there_are_none(tmp_path: Path) -> None:
    """The first message is full, later ones have what changed, if anything; snapshots come where the call wants them."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            call = client.stub.Watch(predictor_pb2.WatchRequest(min_interval_s=0.02, with_snapshots=True))
            first = await call.read()
            assert (first.sequence, first.full, first.indicators.num_free_blocks) == (1, True, 32)
            assert b'"version":%d' % VERSION in first.snapshot_json
            second = await call.read()
            assert (second.sequence, second.full, second.version) == (2, False, 0)
            assert not second.indicators.HasField("num_reserved")
            assert 0 <= second.indicators.age_s < math.inf
            await client.reserve(request("a", 32))
            while (second := await call.read()).version == 0:
                pass
            assert not second.full
            assert {field.name for field, _ in second.indicators.ListFields()} >= {"num_reserved", "source"}
            assert not second.indicators.HasField("num_free_blocks")
            call.cancel()
            busy(writer)
            call = client.stub.Watch(predictor_pb2.WatchRequest(with_snapshots=True))
            snapshot = snapshot_from(json.loads((await call.read()).snapshot_json))
            assert [item.request.request_id for item in snapshot.running] == [
                "cmpl-r1-0-00000001",
                "cmpl-r0-0-00000000",
            ]
            assert [request.request_id for request in snapshot.reserved] == ["a"]
            call.cancel()

    run(test())
    writer.close()


def test_watch_with_snapshots_reports_an_engine_that_ends_while_its_view_is_fresh(tmp_path: Path) -> None:
    """A snapshot reads the state again, so it can be the first to show that the engine is down."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S, poll_s=NEVER_S, fresh_s=NEVER_S) as client:
            assert (await client.predict()).state == READY
            writer.close()
            response = await client.stub.Watch(predictor_pb2.WatchRequest(with_snapshots=True)).read()
            assert response.state == DOWN
            assert not response.snapshot_json

    run(test())
