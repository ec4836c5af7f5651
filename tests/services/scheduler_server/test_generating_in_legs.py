"""Generate with a prefill and a decode leg, and each way in which one of them fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from protos.block.v1 import common_pb2, scheduler_pb2
from services.placement.driver import PlacementDriver
from tests.services.scheduler_server.running import (
    CANCELLED,
    FAILED,
    LENGTH,
    cluster,
    refused,
    run,
    scheduler,
    text_of,
    until,
)
from tests.services.stub_engines import StubEngine
from tests.services.stub_sidecars import StubSidecar

ONE_LEG, SERVE, DECODE = common_pb2.LEG_UNSPECIFIED, common_pb2.LEG_SERVE, common_pb2.LEG_DECODE
UNREACHABLE = "http://127.0.0.1:1"
ERROR = b'{"error": {"message": "Internal server error", "code": 500}}'
ROLE = b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
ENDED = b'{"choices": [{"text": "", "finish_reason": "error"}]}'


class Pools:
    """Makes decisions have two legs: prefill on the first of a pool, decode on the best of all others."""

    def __init__(self, pool: str) -> None:
        """Set the ids of the prefill instances, a letter each."""
        self.pool = pool
        self.legs: list[int] = []  # asked for
        self.excluded: list[str] = []
        self.place = PlacementDriver.place

    def patched(self) -> Any:
        """Return the method of the driver."""

        async def place(driver: PlacementDriver, request: common_pb2.Request, **options: Any) -> Any:
            self.legs.append(request.leg)
            self.excluded.append("".join(sorted(options["excluded"])))
            left = [name for name in self.pool if name not in options["excluded"]]
            options["excluded"] = options["excluded"] | set(self.pool)
            leg, request.leg = request.leg, ONE_LEG
            placement, decision = await self.place(driver, request, **options)
            if left and leg == ONE_LEG:
                handle = driver.registry.find(left[0])
                assert handle is not None
                decision.prefill.instance.CopyFrom(handle.message)
            return placement, decision

        return place


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    """Prefill on `a` and `b`."""
    made = Pools("ab")
    monkeypatch.setattr(PlacementDriver, "place", made.patched())
    return made


def params_in(engine: StubEngine) -> list[Any]:
    """Return the kv_transfer_params that an engine received."""
    return [body.get("kv_transfer_params") for body in engine.bodies]


def is_free(stubs: list[StubSidecar]) -> bool:
    """Return whether nothing is reserved."""
    return not any(stub.held for stub in stubs)


@pytest.mark.parametrize("chat", [False, True])
def test_both_legs_are_run(pools: Pools, chat: bool) -> None:
    """The outcome has the times of both, and the prefix hits of the prefill instance."""

    async def test() -> None:
        async with cluster(3) as (client, stubs, behind):
            request = client.request(max_tokens=9, output_tokens=None, min_tokens=2)
            message = scheduler_pb2.GenerateRequest(request=request, prompt="" if chat else "Tell me")
            if chat:
                message.messages.add_struct().update({"role": "user", "content": "Hello there"})
            events = [event async for event in client.stub.Generate(message)]
            assert text_of(events) == "Once upon a time"
            assert (events[0].decision.prefill.instance.instance_id, pools.legs) == ("a", [ONE_LEG])
            (prefill,), (decode,) = behind[0].bodies, behind[2].bodies
            assert (prefill["max_tokens"], prefill["stream"], "min_tokens" in prefill) == (1, False, False)
            assert "stream_options" not in prefill
            assert (decode["max_tokens"], decode["stream"], decode["min_tokens"]) == (9, True, 2)
            assert decode["kv_transfer_params"] == StubEngine.params(1)
            assert all(b"x-request-id: r1" in engine.heads[0] for engine in (behind[0], behind[2]))
            outcome = events[-1].outcome
            assert (outcome.instance_id, outcome.prefill_instance_id, outcome.finish_reason) == ("c", "a", LENGTH)
            assert 0 < outcome.prefill_s < outcome.prefill_s + outcome.hand_over_s < outcome.ttft_s
            assert outcome.prefix_hit_tokens == 2
            await until(lambda: bool(stubs[0].outcomes and stubs[2].outcomes))
            leg = stubs[0].outcomes[0]
            assert (leg.prefill_instance_id, leg.finish_reason, leg.output_tokens) == ("a", LENGTH, 0)
            assert leg.prefill_s == outcome.prefill_s
            assert is_free(stubs)
            assert client.count("block_generate_prefill_legs_total", result="held") == 1

    run(test)


def test_a_prefill_leg_is_no_answer(tmp_path: Any) -> None:
    """A request is recorded once, by the outcome of its decode leg."""

    async def test() -> None:
        path = tmp_path / "decisions.jsonl"
        async with cluster(3) as (_, stubs, _), scheduler(stubs, record=str(path)) as client:
            await client.generate()
            await until(lambda: bool(stubs[2].outcomes))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["event"] for line in lines] == ["decision", "outcome"]
        assert lines[1]["outcome"]["instance_id"] == "c"

    run(test)


@pytest.mark.parametrize("failure", ["unreachable", "500", "503", "429", "breaks"])
def test_a_prefill_instance_fails(pools: Pools, failure: str) -> None:
    """Another one computes the prompt, and the decode instance is not blamed."""

    async def test() -> None:
        async with cluster(3) as (_, stubs, behind):
            if failure == "unreachable":
                stubs[0].engine_url = UNREACHABLE
            elif failure.isdigit():
                behind[0].status = int(failure)
            else:
                behind[0].breaks_after = 0
            async with scheduler(stubs) as client:
                events = await client.generate()
            assert [event.decision.prefill.instance.instance_id for event in events[:2]] == ["a", "b"]
            assert text_of(events) == "Once upon a time"
            assert (pools.legs, pools.excluded) == ([ONE_LEG, ONE_LEG], ["", "a"])
            assert params_in(behind[2]) == [StubEngine.params(1)]
            await until(lambda: bool(stubs[0].outcomes and stubs[1].outcomes and stubs[2].outcomes))
            assert stubs[0].outcomes[0].finish_reason == FAILED
            assert [one.finish_reason for one in stubs[2].outcomes] == [LENGTH]
            assert is_free(stubs)

    run(test)


def test_a_prefill_instance_hangs() -> None:
    """It costs the deadline of the first token."""

    async def test() -> None:
        async with cluster(3, first_token_s=1.0) as (client, stubs, behind):
            behind[0].hold, behind[0].hold_at = asyncio.Event(), 0
            events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert events[-1].outcome.prefill_instance_id == "b"
            await until(lambda: is_free(stubs))

    run(test)


def test_a_prefill_instance_refuses_the_request() -> None:
    """Its error is that of the request."""

    async def test() -> None:
        async with cluster(3) as (client, stubs, behind):
            behind[0].status = 400
            assert "the engine returned 400: by the test" in await refused(client.generate())
            assert not behind[1].bodies
            assert not behind[2].bodies
            await until(lambda: is_free(stubs))

    run(test)


@pytest.mark.parametrize("prefilled", [{"kv_transfer_params": None}, {"kv_transfer_params": {"remote_port": 1}}])
def test_replies_without_blocks(prefilled: dict[str, Any]) -> None:
    """The decode instance serves the whole request."""

    async def test() -> None:
        async with cluster(3) as (client, _, behind):
            behind[0].prefilled = prefilled
            events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert params_in(behind[2]) == [None]
            assert events[-1].outcome.prefill_instance_id == ""

    run(test)


def test_another_decode_instance_fetches_the_blocks(pools: Pools) -> None:
    """The first one could not be reached, so that it has not fetched them."""

    async def test() -> None:
        async with cluster(4) as (_, stubs, behind):
            stubs[2].engine_url = UNREACHABLE
            async with scheduler(stubs) as client:
                events = await client.generate()
            assert [event.decision.instance.instance_id for event in events[:2]] == ["c", "d"]
            assert (pools.legs, pools.excluded) == ([ONE_LEG, DECODE], ["", "c"])
            assert (len(behind[0].bodies), params_in(behind[3])) == (1, [StubEngine.params(1)])
            assert events[-1].outcome.prefill_instance_id == "a"
            await until(lambda: is_free(stubs))

    run(test)


@pytest.mark.parametrize("failure", ["503", "breaks"])
def test_a_decode_instance_fails_before_the_first_token(pools: Pools, failure: str) -> None:
    """It may have freed the blocks: the prompt is computed again, and another instance decodes."""

    async def test() -> None:
        async with cluster(4) as (client, stubs, behind):
            if failure == "breaks":
                behind[2].breaks_after = 0
            else:
                behind[2].status = int(failure)
            events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert (pools.legs, pools.excluded) == ([ONE_LEG, ONE_LEG], ["", "c"])
            assert params_in(behind[3]) == [StubEngine.params(2)]
            await until(lambda: is_free(stubs))

    run(test)


@pytest.mark.parametrize("events", [None, [ERROR], [ROLE, ERROR], [ENDED]], ids=["500", "error", "role", "reason"])
def test_blocks_that_cannot_be_fetched(pools: Pools, events: list[bytes] | None) -> None:
    """Another instance computes the prompt; after the second failure another one serves the whole request."""

    async def test() -> None:
        async with cluster(4) as (client, stubs, behind):
            if events is None:
                behind[2].status = 500
            behind[2].raw_events = events
            got = await client.generate()
            assert text_of(got) == "Once upon a time"
            assert pools.legs == [ONE_LEG, ONE_LEG, SERVE]
            assert pools.excluded == ["", "a", "abc"]
            assert (params_in(behind[2]), params_in(behind[3])) == ([StubEngine.params(1)] * 2, [None])
            await until(lambda: is_free(stubs))

    run(test)


def test_a_failure_after_the_first_token_is_returned() -> None:
    """A partial answer is not restarted."""

    async def test() -> None:
        async with cluster(4) as (client, stubs, behind):
            behind[2].breaks_after = 2
            assert (await refused(client.generate(), grpc.StatusCode.UNAVAILABLE)).startswith("c: ")
            assert not behind[3].bodies
            await until(lambda: is_free(stubs))

    run(test)


def test_a_hand_over_that_takes_too_long(pools: Pools) -> None:
    """The prompt is computed again, for the instance that is found then."""

    async def test() -> None:
        async with cluster(4) as (_, stubs, behind):
            stubs[2].engine_url = UNREACHABLE
            async with scheduler(stubs, hand_over_deadline_s=1e-9) as client:
                events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert pools.legs == [ONE_LEG, DECODE, ONE_LEG]
            assert params_in(behind[3]) == [StubEngine.params(2)]
            await until(lambda: is_free(stubs))

    run(test)


def test_a_cancelled_call_during_the_prefill_leg() -> None:
    """The engine's connection is closed, and nothing stays reserved."""

    async def test() -> None:
        async with cluster(3) as (client, stubs, behind):
            behind[0].hold, behind[0].hold_at = asyncio.Event(), 0
            request = client.request(max_tokens=9, output_tokens=None)
            call = client.stub.Generate(scheduler_pb2.GenerateRequest(request=request, prompt="Tell me"))
            assert (await call.read()).HasField("decision")
            await until(lambda: bool(behind[0].bodies))
            call.cancel()
            await behind[0].left.wait()
            await until(lambda: bool(stubs[0].outcomes and stubs[2].outcomes))
            assert stubs[0].outcomes[0].finish_reason == CANCELLED
            assert is_free(stubs)

    run(test)


def test_requests_that_one_engine_serves(pools: Pools) -> None:
    """They ask for one leg; parameters may not name KV blocks."""

    async def test() -> None:
        async with cluster(3) as (client, _, behind):
            events = await client.generate(parameters={"prompt_logprobs": 1})
            assert text_of(events) == "Once upon a time"
            assert (pools.legs, behind[0].bodies, params_in(behind[2])) == ([SERVE], [], [None])
            named = await refused(client.generate(parameters={"kv_transfer_params": {"do_remote_prefill": True}}))
            assert "parameters.kv_transfer_params: cannot be set here" in named

    run(test)
