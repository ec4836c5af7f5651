"""Generate with a prefill and a decode leg, and each way in which one of them fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from protos.block.v1 import common_pb2, scheduler_pb2
from services.placement.driver import PlacementDriver
from tests.services.scheduler_server.running import (
    CANCELLED,
    FAILED,
    LENGTH,
    Client,
    refused,
    run,
    scheduler,
    text_of,
    until,
)
from tests.services.stub_engines import StubEngine, engines
from tests.services.stub_sidecars import StubSidecar, sidecars

ONE_LEG, SERVE, DECODE = common_pb2.LEG_UNSPECIFIED, common_pb2.LEG_SERVE, common_pb2.LEG_DECODE
UNREACHABLE = "http://127.0.0.1:1"
ERROR = b'{"error": {"message": "Internal server error", "code": 500}}'
ROLE = b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
ENDED = b'{"choices": [{"text": "", "finish_reason": "error"}]}'


POLICY = "block: disaggregate = 'always'"


class Decisions:
    """What was asked of the driver, in order."""

    def __init__(self) -> None:
        """Start without decisions."""
        self.legs: list[int] = []
        self.excluded: list[str] = []


@pytest.fixture(autouse=True)
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    """Record all decisions of the test."""
    made, place = Decisions(), PlacementDriver.place

    async def noted(driver: PlacementDriver, request: common_pb2.Request, **options: Any) -> Any:
        made.legs.append(request.leg)
        made.excluded.append("".join(sorted(options["excluded"])))
        return await place(driver, request, **options)

    monkeypatch.setattr(PlacementDriver, "place", noted)
    return made


@asynccontextmanager
async def pools(number: int) -> AsyncIterator[tuple[list[StubSidecar], list[StubEngine]]]:
    """Serve engines and their sidecars: `a` and `b` for prefill legs, all others for decode legs; the first are best."""
    async with engines(number) as behind, sidecars(*"abcd"[:number]) as stubs:
        for index, (stub, engine) in enumerate(zip(stubs, behind, strict=True)):
            stub.engine_url, stub.ttft_s, stub.e2e_s = engine.url, 0.1 + index, 2.0 + 10 * index
            stub.role = "prefill" if stub.name in "ab" else "decode"
        yield stubs, behind


@asynccontextmanager
async def disaggregated(
    number: int, **settings: Any
) -> AsyncIterator[tuple[Client, list[StubSidecar], list[StubEngine]]]:
    """Serve pools and a scheduler."""
    async with pools(number) as (stubs, behind), scheduler(stubs, policy=POLICY, **settings) as client:
        yield client, stubs, behind


def params_in(engine: StubEngine) -> list[Any]:
    """Return the kv_transfer_params that an engine received."""
    return [body.get("kv_transfer_params") for body in engine.bodies]


def is_free(stubs: list[StubSidecar]) -> bool:
    """Return whether nothing is reserved."""
    return not any(stub.held for stub in stubs)


@pytest.mark.parametrize("chat", [False, True])
def test_both_legs_are_run(decisions: Decisions, chat: bool) -> None:
    """The outcome has the times of both, and the prefix hits of the prefill instance."""

    async def test() -> None:
        async with disaggregated(3) as (client, stubs, behind):
            request = client.request(max_tokens=9, output_tokens=None, min_tokens=2)
            message = scheduler_pb2.GenerateRequest(request=request, prompt="" if chat else "Tell me")
            if chat:
                message.messages.add_struct().update({"role": "user", "content": "Hello there"})
            events = [event async for event in client.stub.Generate(message)]
            assert text_of(events) == "Once upon a time"
            assert (events[0].decision.prefill.instance.instance_id, decisions.legs) == ("a", [ONE_LEG])
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
        async with disaggregated(3, record=str(path)) as (client, stubs, _):
            await client.generate()
            await until(lambda: bool(stubs[2].outcomes))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["event"] for line in lines] == ["decision", "outcome"]
        assert lines[1]["outcome"]["instance_id"] == "c"

    run(test)


@pytest.mark.parametrize("failure", ["unreachable", "500", "503", "429", "breaks"])
def test_a_prefill_instance_fails(decisions: Decisions, failure: str) -> None:
    """Another one computes the prompt, and the decode instance is not blamed."""

    async def test() -> None:
        async with pools(3) as (stubs, behind):
            if failure == "unreachable":
                stubs[0].engine_url = UNREACHABLE
            elif failure.isdigit():
                behind[0].status = int(failure)
            else:
                behind[0].breaks_after = 0
            async with scheduler(stubs, policy=POLICY) as client:
                events = await client.generate()
            assert [event.decision.prefill.instance.instance_id for event in events[:2]] == ["a", "b"]
            assert text_of(events) == "Once upon a time"
            assert (decisions.legs, decisions.excluded) == ([ONE_LEG, ONE_LEG], ["", "a"])
            assert params_in(behind[2]) == [StubEngine.params(1)]
            await until(lambda: bool(stubs[0].outcomes and stubs[1].outcomes and stubs[2].outcomes))
            assert stubs[0].outcomes[0].finish_reason == FAILED
            assert [one.finish_reason for one in stubs[2].outcomes] == [LENGTH]
            assert is_free(stubs)

    run(test)


def test_a_decode_instance_is_not_blamed_for_the_last_attempt_either() -> None:
    """Its reservation ends without an outcome."""

    async def test() -> None:
        async with disaggregated(3, attempts=1) as (client, stubs, behind):
            behind[0].status = 503
            assert (await refused(client.generate(), grpc.StatusCode.UNAVAILABLE)).startswith("a: ")
            await until(lambda: is_free(stubs) and bool(stubs[0].outcomes))
            assert stubs[0].outcomes[0].finish_reason == FAILED
            assert not stubs[2].outcomes

    run(test)


def test_without_another_decode_instance_a_prefill_instance_serves(decisions: Decisions) -> None:
    """As through the gateway, the request is placed again as a whole."""

    async def test() -> None:
        async with pools(3) as (stubs, _):
            stubs[2].engine_url = UNREACHABLE
            async with scheduler(stubs, policy=POLICY) as client:
                events = await client.generate()
            assert [event.decision.instance.instance_id for event in events[:2]] == ["c", "a"]
            assert text_of(events) == "Once upon a time"
            assert decisions.legs == [ONE_LEG, DECODE, ONE_LEG]
            await until(lambda: is_free(stubs))

    run(test)


def test_the_error_of_the_last_instance_is_returned() -> None:
    """Where none is left, it says more than that."""

    async def test() -> None:
        async with pools(3) as (stubs, _):
            stubs[2].engine_url = UNREACHABLE
            async with scheduler(stubs, policy=POLICY, without_pool="refuse") as client:
                assert (await refused(client.generate(), grpc.StatusCode.UNAVAILABLE)).startswith("c: ")
                await until(lambda: is_free(stubs))

    run(test)


def test_a_prefill_instance_hangs() -> None:
    """It costs the deadline of the first token."""

    async def test() -> None:
        async with disaggregated(3, first_token_s=1.0) as (client, stubs, behind):
            behind[0].hold, behind[0].hold_at = asyncio.Event(), 0
            events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert events[-1].outcome.prefill_instance_id == "b"
            await until(lambda: is_free(stubs))

    run(test)


def test_a_prefill_instance_refuses_the_request() -> None:
    """Its error is that of the request."""

    async def test() -> None:
        async with disaggregated(3) as (client, stubs, behind):
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
        async with disaggregated(3) as (client, _, behind):
            behind[0].prefilled = prefilled
            events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert params_in(behind[2]) == [None]
            assert events[-1].outcome.prefill_instance_id == ""

    run(test)


def test_another_decode_instance_fetches_the_blocks(decisions: Decisions) -> None:
    """The first one could not be reached, so that it has not fetched them."""

    async def test() -> None:
        async with pools(4) as (stubs, behind):
            stubs[2].engine_url = UNREACHABLE
            async with scheduler(stubs, policy=POLICY) as client:
                events = await client.generate()
            assert [event.decision.instance.instance_id for event in events[:2]] == ["c", "d"]
            assert (decisions.legs, decisions.excluded) == ([ONE_LEG, DECODE], ["", "c"])
            assert (len(behind[0].bodies), params_in(behind[3])) == (1, [StubEngine.params(1)])
            assert events[-1].outcome.prefill_instance_id == "a"
            await until(lambda: is_free(stubs))

    run(test)


@pytest.mark.parametrize("failure", ["503", "breaks"])
def test_a_decode_instance_fails_before_the_first_token(decisions: Decisions, failure: str) -> None:
    """It may have freed the blocks: the prompt is computed again, and another instance decodes."""

    async def test() -> None:
        async with disaggregated(4) as (client, stubs, behind):
            if failure == "breaks":
                behind[2].breaks_after = 0
            else:
                behind[2].status = int(failure)
            events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert (decisions.legs, decisions.excluded) == ([ONE_LEG, ONE_LEG], ["", "c"])
            assert params_in(behind[3]) == [StubEngine.params(2)]
            await until(lambda: is_free(stubs))

    run(test)


@pytest.mark.parametrize("events", [None, [ERROR], [ROLE, ERROR], [ENDED]], ids=["500", "error", "role", "reason"])
def test_blocks_that_cannot_be_fetched(decisions: Decisions, events: list[bytes] | None) -> None:
    """Another instance computes the prompt; after the second failure another one serves the whole request.

    The decode instance is blamed for the second failure only.
    """

    async def test() -> None:
        async with disaggregated(4) as (client, stubs, behind):
            if events is None:
                behind[2].status = 500
            behind[2].raw_events = events
            got = await client.generate()
            assert text_of(got) == "Once upon a time"
            assert decisions.legs == [ONE_LEG, ONE_LEG, SERVE]
            assert decisions.excluded == ["", "a", "abc"]
            assert (params_in(behind[2]), params_in(behind[3])) == ([StubEngine.params(1)] * 2, [None])
            await until(lambda: is_free(stubs) and len(stubs[2].outcomes) == 2)
            assert [one.finish_reason for one in stubs[2].outcomes] == [CANCELLED, FAILED]

    run(test)


def test_a_failure_after_the_first_token_is_returned() -> None:
    """A partial answer is not restarted."""

    async def test() -> None:
        async with disaggregated(4, continue_streams="off") as (client, stubs, behind):
            behind[2].breaks_after = 2
            assert (await refused(client.generate(), grpc.StatusCode.UNAVAILABLE)).startswith("c: ")
            assert not behind[3].bodies
            await until(lambda: is_free(stubs))

    run(test)


def test_a_hand_over_that_takes_too_long(decisions: Decisions) -> None:
    """The prompt is computed again, for the instance that is found then."""

    async def test() -> None:
        async with pools(4) as (stubs, behind):
            stubs[2].engine_url = UNREACHABLE
            async with scheduler(stubs, policy=POLICY, hand_over_deadline_s=1e-9) as client:
                events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert decisions.legs == [ONE_LEG, DECODE, ONE_LEG]
            assert params_in(behind[3]) == [StubEngine.params(2)]
            await until(lambda: is_free(stubs))

    run(test)


def test_a_cancelled_call_during_the_prefill_leg() -> None:
    """The engine's connection is closed, and nothing stays reserved."""

    async def test() -> None:
        async with disaggregated(3) as (client, stubs, behind):
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


def test_requests_that_one_engine_serves(decisions: Decisions) -> None:
    """They ask for one leg; parameters may not name KV blocks."""

    async def test() -> None:
        async with disaggregated(3) as (client, _, behind):
            events = await client.generate(parameters={"prompt_logprobs": 1})
            assert text_of(events) == "Once upon a time"
            assert (decisions.legs, behind[0].bodies, params_in(behind[2])) == ([SERVE], [], [None])
            named = await refused(client.generate(parameters={"kv_transfer_params": {"do_remote_prefill": True}}))
            assert "parameters.kv_transfer_params: cannot be set here" in named
            named = await refused(client.generate(parameters={"vllm_xargs": {"kv_transfer_params": "x"}}))
            assert "parameters.vllm_xargs.kv_transfer_params: cannot be set here" in named
            assert "vllm_xargs: must be an object" in await refused(client.generate(parameters={"vllm_xargs": 5}))

    run(test)
