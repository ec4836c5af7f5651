"""A sidecar of an engine with a KV connector: forecasts, reservations and transfer times of prefill and decode legs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor.config import EngineConfig
from protos.block.v1 import common_pb2, predictor_pb2
from services.engine_state import layout
from services.engine_state.writer import Writer
from services.predictor_server.transfer_corrections import alone_on_the_link
from tests.services.engine_state.files import CONFIG, writer_at
from tests.services.predictor_server.running_sidecars import NEVER_S, request, run, sidecar_of

CONNECTED = replace(
    CONFIG, kv_role="kv_both", kv_bytes_per_token=1 << 20, kv_transfer_bytes_per_s=1e9, kv_transfer_base_s=0.25
)
PROMPT = 60
TRANSFER_S = CONNECTED.transfer_s(PROMPT, 4)
SHORT_S = 0.01


def idle(path: Path, config: EngineConfig = CONNECTED) -> Writer:
    """Write the state file of an engine without requests."""
    writer = writer_at(path / "state", config)
    writer.blocks["reuse"] = np.arange(1, 33)
    writer.publish()
    return writer


def leg(name: str, request_id: str = "r", **fields: Any) -> common_pb2.Request:
    """Make one leg of a request."""
    return request(request_id, PROMPT, 10, leg=common_pb2.Leg.Value(f"LEG_{name}"), **fields)


def test_each_leg_is_forecast(tmp_path: Path) -> None:
    """A prefill leg ends with its first token; a decode leg waits for its transfer, from its arrival on."""
    writer = idle(tmp_path)

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            whole, prefill = await client.forecast(leg("SERVE")), await client.forecast(leg("PREFILL"))
            assert (prefill.ttft_s, prefill.e2e_s) == (pytest.approx(whole.ttft_s), pytest.approx(whole.ttft_s))
            assert (whole.HasField("fetched_s"), prefill.output_tokens) == (False, 1)
            now, later = await client.forecast(leg("DECODE")), await client.forecast(leg("DECODE", in_s=2.0))
            assert now.fetched_s == pytest.approx(TRANSFER_S)
            assert later.fetched_s == pytest.approx(2.0 + TRANSFER_S)
            assert later.ttft_s == pytest.approx(2.0 + now.ttft_s)
            assert TRANSFER_S < now.ttft_s < TRANSFER_S + whole.ttft_s  # one token is computed, not the prompt
            assert now.e2e_s < TRANSFER_S + whole.e2e_s

    run(test())
    writer.close()


def test_reserved_legs_count(tmp_path: Path) -> None:
    """A decode leg takes its part of the link; a prefill leg's blocks are held for as long as its reservation says."""
    writer = idle(tmp_path)

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            alone = await client.forecast(leg("DECODE"))
            await client.reserve(leg("DECODE", "other"))
            assert (await client.forecast(leg("DECODE"))).fetched_s > 1.5 * alone.fetched_s
            await client.release("other")
            assert (await client.forecast(leg("DECODE"))).fetched_s == pytest.approx(alone.fetched_s)
            # a request that needs more than half of the blocks waits until those of the other are free
            large = common_pb2.Request(request_id="large", prompt_tokens=240, max_tokens=1)
            waits = {}
            for held_s in (1.0, 5.0):
                other = common_pb2.Request(
                    request_id="p", prompt_tokens=250, max_tokens=1, leg=common_pb2.LEG_PREFILL, held_s=held_s
                )
                filler = common_pb2.Request(
                    request_id="q", prompt_tokens=250, max_tokens=1, leg=common_pb2.LEG_PREFILL, held_s=held_s
                )
                await client.reserve(other)
                await client.reserve(filler)
                waits[held_s] = (await client.forecast(large)).queue_s
                await client.release("p")
                await client.release("q")
            assert waits[5.0] - waits[1.0] == pytest.approx(4.0)

    run(test())
    writer.close()


def test_a_reservation_counts_from_the_arrival_of_its_leg(tmp_path: Path) -> None:
    """A decode leg is reserved while its prompt is computed elsewhere; its time begins when it is to arrive."""
    writer = idle(tmp_path)

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            response = await client.reserve(leg("DECODE", "later", in_s=300.0), ttl_s=SHORT_S)
            assert response.expires_in_s == pytest.approx(300.0 + SHORT_S)
            await client.reserve(leg("DECODE", "now"), ttl_s=SHORT_S)
            await client.until(lambda response: response.indicators.num_reserved == 1)
            assert await client.release("later")
            assert not await client.release("now")
            with pytest.raises(Exception, match="request.in_s: must be at least 0 and at most 600"):
                await client.reserve(leg("DECODE", "much later", in_s=1e9))

    run(test())
    writer.close()


def test_an_engine_without_the_role_refuses_a_leg(tmp_path: Path) -> None:
    """The refusal names the field."""
    writer = idle(tmp_path, replace(CONNECTED, kv_role="kv_producer"))

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            (prediction,) = (await client.predict(leg("DECODE"))).predictions
            assert prediction.refusal.field == "leg"
            assert "kv_consumer" in prediction.refusal.reason
            response = await client.reserve(leg("DECODE"))
            assert response.result == predictor_pb2.RESERVE_RESULT_REFUSED

    run(test())
    writer.close()


def fetched(writer: Writer, slot: int, seconds: float, started_s: float | None = None) -> None:
    """Publish a running request whose blocks were fetched within a time, by default while no others were."""
    started_s = 10.0 * slot + 1.0 if started_s is None else started_s
    writer.put_request(
        slot, serial=slot + 1, request_id=f"cmpl-r{slot}-0-0000000{slot}", arrival_s=0.0, prompt_tokens=PROMPT,
        max_tokens=30, leg=2,
    )  # fmt: skip
    live = writer.live[slot]
    live["output_tokens"], live["computed_tokens"], live["num_blocks"] = 1, PROMPT, 4
    live["fetch_started_s"], live["fetch_ended_s"] = started_s, started_s + seconds
    blocks = np.arange(4 * slot, 4 * slot + 4)
    writer.put_blocks(slot, blocks)
    writer.blocks["reuse"][blocks] = 0
    num_running = int(writer.state["num_running"][0])
    writer.running[num_running] = slot
    writer.state["num_running"] = num_running + 1
    writer.state["num_free_blocks"] -= 4
    writer.state["num_fetched"] += 1
    writer.publish()


def test_transfer_times_are_learnt(tmp_path: Path) -> None:
    """A link that is slower than configured makes forecasts longer, the more so the more often that is seen."""
    writer = idle(tmp_path)

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            before = (await client.forecast(leg("DECODE"))).fetched_s
            for slot in range(4):
                fetched(writer, slot, 3.0 * TRANSFER_S)
                await client.until(lambda response, slot=slot: response.indicators.num_running == slot + 1)
                after = (await client.forecast(leg("DECODE"))).fetched_s
                assert before < after < 3.0 * TRANSFER_S + before
                before = after
            assert before > 1.9 * TRANSFER_S

    run(test())
    writer.close()


def test_shared_transfers_are_not_compared_later(tmp_path: Path) -> None:
    """A transfer that shared the link teaches nothing, also once the other request has ended."""
    writer = idle(tmp_path)

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            expected = (await client.forecast(leg("DECODE"))).fetched_s
            for slot in range(2):
                fetched(writer, slot, 3.0 * TRANSFER_S, started_s=1.0)
            await client.until(lambda response: response.indicators.num_running == 2)
            writer.put_request(
                1, serial=9, request_id="cmpl-new-0-00000009", arrival_s=0.0, prompt_tokens=PROMPT, max_tokens=30, leg=2
            )
            fetched(writer, 2, TRANSFER_S)
            await client.until(lambda response: response.indicators.num_running == 3)
            assert (await client.forecast(leg("DECODE"))).fetched_s == pytest.approx(expected)

    run(test())
    writer.close()


def test_only_transfers_without_others_are_compared() -> None:
    """The link is shared with any other transfer that overlaps, also with one under way."""
    live = np.zeros(5, layout.LIVE)
    live["fetch_started_s"] = (1.0, 1.5, 3.0, 4.0, -1.0)
    live["fetch_ended_s"] = (2.0, 2.5, 4.0, -1.0, -1.0)
    assert alone_on_the_link(live, np.arange(5)) == [2]
    assert alone_on_the_link(live, np.array([0, 4])) == [0]
    assert alone_on_the_link(live, np.array([1, 2, 3])) == [1, 2]


def test_a_forecast_is_compared_from_the_arrival_of_its_leg(tmp_path: Path) -> None:
    """The time until then belongs to the other leg."""
    writer = idle(tmp_path)

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            forecast = common_pb2.Forecast(ttft_s=102.0, e2e_s=104.0, tpot_s=1.0, queue_s=100.0, output_tokens=3)
            await client.reserve(leg("DECODE", "r0", in_s=100.0), forecast=forecast)
            fetched(writer, 0, 1.0)
            await client.until(lambda response: response.indicators.num_running == 1)
            writer.add_outcome(
                serial=1, request_id="cmpl-r0-0-00000000", arrival_s=5.0, scheduled_s=5.5, first_token_s=6.0,
                finished_s=9.0, prompt_tokens=PROMPT, output_tokens=3, hit_tokens=0, num_preemptions=0, reason="stop",
            )  # fmt: skip
            writer.free_slot(0)
            writer.state["num_running"], writer.state["num_free_blocks"] = 0, 32
            writer.blocks["reuse"] = np.arange(1, 33)
            writer.publish()
            await client.until(lambda response: response.indicators.num_running == 0)
            client.sidecar.catch_up()
            assert client.sample("block_forecast_bias_ratio", quantity="ttft") == pytest.approx((2.0 - 1.0) / 1.0)
            assert client.sample("block_forecast_bias_ratio", quantity="e2e") == pytest.approx((4.0 - 4.0) / 4.0)

    run(test())
    writer.close()
