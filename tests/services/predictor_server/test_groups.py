"""Requests with several prompts and responses beside a running sidecar: forecast, reserved, shown and released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor.approximations import GRAMMAR_COMPILATION, MANY_RESPONSES, MERGED_PROMPTS, UNKNOWN_PREFIXES
from predictor.grammar_times import DEFAULT_COMPILE_S
from protos.block.v1 import common_pb2, predictor_pb2
from services.engine_state.writer import Writer
from tests.services.engine_state.files import writer_at
from tests.services.predictor_server.running_sidecars import SidecarClient, idle_engine, request, run, sidecar_of

RESERVED = predictor_pb2.RESERVE_RESULT_RESERVED
REFUSED = predictor_pb2.RESERVE_RESULT_REFUSED


def prompts(*tokens: int) -> list[common_pb2.Prompt]:
    """Prompts of these lengths."""
    return [common_pb2.Prompt(prompt_tokens=one) for one in tokens]


def show(writer: Writer, *names: str) -> None:
    """Let the engine have requests of these names, in the slots from 0 on, all waiting."""
    for slot, name in enumerate(names):
        if writer.live["serial"][slot] == 0:
            writer.put_request(
                slot, serial=slot + 1, request_id=name, arrival_s=0.0, prompt_tokens=20, max_tokens=10,
                tag_tokens=np.nan, tag_spread=0.0,
            )  # fmt: skip
    writer.waiting[: len(names)] = range(len(names))
    writer.state["num_waiting"] = len(names)
    writer.publish()


async def num_reserved(client: SidecarClient) -> int:
    """How many requests of the engine are reserved."""
    return (await client.predict()).indicators.num_reserved


def test_several_responses_take_longer_than_one(tmp_path: Path) -> None:
    """Tokens of all count; where the blocks' contents are exported, the prompt is computed once."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            one = await client.forecast(request("one", 60, 10))
            four = await client.forecast(request("four", 60, 10, num_sequences=4))
            apart = await client.forecast(request("apart", 240, 10, num_prompts=4, prompts=prompts(60, 60, 60, 60)))
            assert (one.output_tokens, four.output_tokens, apart.output_tokens) == (10, 40, 40)
            assert one.e2e_s < four.e2e_s < apart.e2e_s
            assert four.ttft_s < apart.ttft_s
            assert [list(each.approximations) for each in (one, four, apart)] == [[], [], []]

    run(test())
    writer.close()


def test_all_responses_are_reserved_until_the_engine_shows_them(tmp_path: Path) -> None:
    """Each leaves when the engine shows it by its own name; then nothing is reserved, and none counted twice."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            asked = request("r", 40, 10, num_prompts=2, prompts=prompts(20, 20), num_sequences=2)
            assert (await client.reserve(asked)).result == RESERVED
            assert await num_reserved(client) == 4
            show(writer, "0_cmpl-r-0-0000000a")
            await client.until(lambda response: response.indicators.num_waiting == 1)
            assert client.sidecar.source.snapshot().reserved == client.sidecar.snapshot().reserved
            assert [one.request_id for one in client.sidecar.snapshot().reserved] == ["r/1", "r/2", "r/3"]
            show(writer, "0_cmpl-r-0-0000000a", "1_cmpl-r-1-0000000b", "1_cmpl-r-0-0000000a", "0_cmpl-r-1-0000000b")
            await client.until(lambda response: response.indicators.num_reserved == 0)
            assert client.sidecar.snapshot().reserved == ()
            assert client.sample("block_reservations_ended_total", how="shown") == 1

    run(test())
    writer.close()


def test_a_release_gives_all_responses_back(tmp_path: Path) -> None:
    """Before and after the engine shows the first."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            for number in range(2):
                await client.reserve(request("r", 20, 10, num_sequences=3))
                if number:
                    show(writer, "1_cmpl-r-0-0000000a")
                    await client.until(lambda response: response.indicators.num_waiting == 1)
                assert await client.release("r")
                assert await num_reserved(client) == 0
                assert client.sidecar.snapshot().reserved == ()

    run(test())
    writer.close()


def test_responses_that_the_engine_does_not_make_do_not_stay(tmp_path: Path) -> None:
    """A second after the first they are dropped."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            await client.reserve(request("r", 20, 10, num_sequences=3))
            show(writer, "0_cmpl-r-0-0000000a")
            await client.until(lambda response: response.indicators.num_reserved == 0)
            assert client.sidecar.snapshot().reserved == ()

    run(test())
    writer.close()


def test_a_group_ends_with_its_last_response(tmp_path: Path) -> None:
    """Its forecast is compared once, with the first token of any and the last token of all."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            asked = request("r", 20, 10, num_sequences=2)
            forecast = await client.forecast(asked)
            await client.reserve(asked, forecast=forecast)
            show(writer, "0_cmpl-r-0-0000000a", "1_cmpl-r-0-0000000a")
            await client.until(lambda response: response.indicators.num_reserved == 0)
            for slot, end_s in ((0, 3.0), (1, 4.0)):
                assert client.sample("block_forecast_error_ratio_count", quantity="e2e") == 0
                writer.state["num_waiting"] = 1 - slot
                writer.waiting[:1] = 1
                writer.free_slot(slot)
                writer.add_outcome(
                    serial=slot + 1, request_id=f"{slot}_cmpl-r-0-0000000a", arrival_s=0.0, scheduled_s=0.5,
                    first_token_s=1.0 + slot, finished_s=end_s, prompt_tokens=20, output_tokens=10, hit_tokens=0,
                    num_preemptions=0, reason="length",
                )  # fmt: skip
                writer.publish()
                waiting = 1 - slot
                await client.until(lambda response, waiting=waiting: response.indicators.num_waiting == waiting)
                client.sidecar.catch_up()
            assert client.sample("block_forecast_error_ratio_count", quantity="e2e") == 1
            assert client.sample("block_forecast_error_ratio_count", quantity="tpot") == 0
            bias = (forecast.e2e_s - 4.0) / 4.0
            assert client.sample("block_forecast_bias_ratio", quantity="e2e") == pytest.approx(bias)

    run(test())
    writer.close()


def test_forecasts_name_what_they_approximate(tmp_path: Path) -> None:
    """Unknown lengths, merged prompts, grammars, and caches whose contents are not exported."""
    writer = idle_engine(tmp_path / "state")
    bare = writer_at(tmp_path / "bare", num_blocks=0, blocks_per_request=0)
    bare.publish()
    tag = common_pb2.Tag(median_tokens=20, spread=0.5)
    unknown: dict[str, Any] = {"prompt_tokens": 20, "tag": tag}

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            several = await client.forecast(common_pb2.Request(request_id="r", num_sequences=3, **unknown))
            assert list(several.approximations) == [MANY_RESPONSES]
            merged = await client.forecast(request("merged", num_prompts=2))
            assert list(merged.approximations) == [MERGED_PROMPTS]
        async with sidecar_of(tmp_path / "bare") as client:
            found = await client.forecast(common_pb2.Request(request_id="r", grammar=b"g", **unknown))
            assert list(found.approximations) == [UNKNOWN_PREFIXES, GRAMMAR_COMPILATION]

    run(test())
    writer.close()
    bare.close()


def test_a_new_grammar_delays_the_first_token(tmp_path: Path) -> None:
    """By the estimated compilation; after a reservation the grammar counts as compiled."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            plain = await client.forecast(request("plain"))
            asked = request("r", grammar=b"g")
            first = await client.forecast(asked)
            assert first.ttft_s == pytest.approx(plain.ttft_s + DEFAULT_COMPILE_S, rel=1e-6)
            await client.reserve(asked, forecast=first)
            await client.release("r")
            client.sidecar.grammars.begin(b"h", 0.0, request_id="x", ttft_s=None)
            known = await client.forecast(request("again", grammar=b"h"))
            assert known.ttft_s == pytest.approx(plain.ttft_s, rel=1e-6)
            other = await client.forecast(request("other", grammar=b"i"))
            assert other.ttft_s == pytest.approx(first.ttft_s, rel=1e-6)

    run(test())
    writer.close()


def test_what_no_engine_could_serve_is_refused(tmp_path: Path) -> None:
    """One line names the field; nothing is reserved."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state") as client:
            many = request("many", 20, 10, num_sequences=5000)
            long = request("long", 1020, 10, num_prompts=2, prompts=prompts(20, 1000))
            for one, field in ((many, "n"), (long, "prompt_tokens")):
                (prediction,) = (await client.predict(one)).predictions
                assert prediction.refusal.field == field
                assert (await client.reserve(one)).result == REFUSED
            assert await num_reserved(client) == 0
            assert client.sidecar.snapshot().reserved == ()

    run(test())
    writer.close()
