"""The choices of a scheduler, by policy, and what its decisions contain."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from protos.block.v1 import common_pb2
from tests.services.scheduler_server.running import (
    BLIND,
    FOR_EVER,
    FORECAST,
    LAST_RESORT,
    LIMIT_S,
    refused,
    run,
    scheduler,
    statuses,
)
from tests.services.stub_sidecars import sidecars


@pytest.mark.parametrize("streams", [True, False])
def test_the_earliest_finish_wins_and_is_reserved(streams: bool) -> None:
    """All instances are forecast, over a stream or by calls; the choice is reserved, and the decision has a reason."""

    async def test() -> None:
        async with sidecars("a", "b", "c", streams=streams) as stubs, scheduler(stubs, scheduler_id="s") as client:
            stubs[1].e2e_s = 1.5
            decision = await client.decide(explain=True)
            assert (decision.instance.instance_id, decision.basis, decision.policy) == ("b", FORECAST, "block")
            assert decision.instance.engine_url == stubs[1].engine_url
            assert decision.forecast.e2e_s == 1.5
            assert decision.reserved_for_s == 10.0
            assert (decision.num_candidates, decision.num_skipped, decision.scheduler_id) == (3, 0, "s")
            assert [instance.instance_id for instance in decision.next_best] == ["a", "c"]
            assert 0 < decision.decision_s < LIMIT_S
            assert decision.why.startswith("block over 3: e2e 1.500 s")
            assert statuses(decision) == dict.fromkeys("abc", "FORECAST")
            assert decision.candidates[0].score == 2.0
            assert decision.candidates[0].indicators.num_running == 1
            assert stubs[1].held["r1"].holder == "s"
            assert stubs[1].held["r1"].forecast == decision.forecast
            assert [len(stub.questions) for stub in stubs] == [1, 1, 1]
            assert await client.choose() == "b"
            assert (stubs[0].num_streamed > 0) is streams
            assert client.count("block_decisions_total", policy="block", basis="forecast") == 2
            assert client.count("block_decision_seconds_count", policy="block") == 2

    run(test)


def test_a_dry_run_reserves_nothing() -> None:
    """It only returns a decision."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            decision = await client.decide(dry_run=True)
            assert not decision.HasField("reserved_for_s")
            assert not decision.candidates
            assert not stubs[0].reserved_ids

    run(test)


def test_requests_go_to_instances_of_their_model_that_are_not_excluded() -> None:
    """Instances of other models are no candidates; excluded ones are never chosen, draining ones only as last resort."""

    async def test() -> None:
        async with sidecars("a", "b", "c", models=("m",)) as stubs, sidecars("x", models=("n",)) as others:
            stubs[2].state = common_pb2.INSTANCE_STATE_DRAINING
            async with scheduler([*stubs, *others]) as client:
                assert await client.choose(request=client.request(model="n")) == "x"
                assert await client.choose(exclude_instance_ids=["a"]) == "b"
                decision = await client.decide(exclude_instance_ids=["a", "b"], explain=True)
                assert (decision.instance.instance_id, decision.basis) == ("c", LAST_RESORT)
                assert "c: is draining" in decision.why
                assert not stubs[2].reserved_ids
                assert statuses(decision) == {"a": "EXCLUDED", "b": "EXCLUDED", "c": "DOWN"}
                call = client.decide(exclude_instance_ids=["a", "b", "c"])
                assert "a: excluded by the caller" in await refused(call, grpc.StatusCode.UNAVAILABLE)
                call = client.decide(client.request(model="o"))
                assert "The model `o` does not exist. There are m, n." in await refused(call, grpc.StatusCode.NOT_FOUND)
                assert "request.model: is missing" in await refused(client.decide(client.request(model="")))

    run(test)


def test_an_engine_that_is_down_is_no_last_resort() -> None:
    """Its sidecar reports it as down, which is no failure of the sidecar: the next report counts again."""

    async def test() -> None:
        async with sidecars("a", state=common_pb2.INSTANCE_STATE_DOWN) as stubs, scheduler(stubs, **FOR_EVER) as client:
            for _ in range(3):
                assert "a: its engine is down" in await refused(client.decide(), grpc.StatusCode.UNAVAILABLE)
            assert client.count("block_undecided_total") == 3
            stubs[0].state = common_pb2.INSTANCE_STATE_READY
            assert (await client.decide()).basis == FORECAST

    run(test)


def test_without_instances_nothing_can_be_decided() -> None:
    """The error gives the reason, and the scheduler continues."""

    async def test() -> None:
        async with scheduler([]) as client:
            assert "no instance is known" in await refused(client.decide(), grpc.StatusCode.UNAVAILABLE)

    run(test)


@pytest.mark.parametrize(
    ("fields", "options", "named"),
    [
        ({"request_id": ""}, {}, "request.request_id: is missing"),
        ({"prompt_tokens": 0}, {}, "request.prompt_tokens: is missing"),
        ({"output_tokens": 0}, {}, "request.output_tokens: must be at least 1"),
        ({"waited_s": math.nan}, {}, "request.waited_s"),
        ({"slo": common_pb2.Slo(ttft_s=-1)}, {}, "request.slo.ttft_s"),
        ({"tag": common_pb2.Tag(median_tokens=math.inf)}, {}, "request.tag.median_tokens"),
        ({}, {"policy": "blok"}, "did you mean block"),
    ],
)
def test_bad_requests_are_named(fields: dict[str, Any], options: dict[str, Any], named: str) -> None:
    """The error names the field; no sidecar is called."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            assert named in await refused(client.decide(client.request(**fields), **options))
            assert not stubs[0].questions

    run(test)


def test_policies_without_indicators_request_no_forecast() -> None:
    """Round-robin takes turns and reserves without a forecast; a request may set another policy."""

    async def test() -> None:
        async with sidecars("a", "b", "c") as stubs, scheduler(stubs, policy="round_robin") as client:
            first = await client.decide()
            assert (first.instance.instance_id, first.basis) == ("a", BLIND)
            assert not first.HasField("forecast")
            assert [await client.choose() for _ in range(4)] == ["b", "c", "a", "b"]
            assert [len(stub.reserved_ids) for stub in stubs] == [2, 2, 1]
            assert not any(stub.questions for stub in stubs)
            assert (await client.decide(policy="block")).basis == FORECAST
            assert await client.choose() == "c"
            assert client.count("block_decisions_total", policy="round_robin", basis="blind") == 6

    run(test)


def test_random_choices_follow_the_seed() -> None:
    """The same seed gives the same choices."""

    async def test() -> None:
        async with sidecars("a", "b", "c") as stubs:
            choices = []
            for _ in range(2):
                async with scheduler(stubs, policy="random", seed=3) as client:
                    choices.append([await client.choose() for _ in range(12)])
            assert choices[0] == choices[1]
            assert set(choices[0]) == set("abc")

    run(test)


def test_a_blind_choice_can_be_forecast() -> None:
    """With forecast_always only the chosen instance makes a forecast."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, policy="round_robin", forecast_always=True) as client:
            decision = await client.decide()
            assert (decision.basis, decision.forecast.e2e_s) == (BLIND, 2.0)
            assert stubs[0].held["r1"].forecast == decision.forecast
            assert [len(stub.questions) for stub in stubs] == [1, 0]

    run(test)


def test_a_blind_policy_skips_sidecars_that_do_not_reply() -> None:
    """A dead sidecar loses its turn, and the request goes to another one."""

    async def test() -> None:
        async with sidecars("a", "b", "c") as stubs, scheduler(stubs, policy="round_robin") as client:
            await stubs[0].crash()
            choices = [await client.choose() for _ in range(6)]
            assert set(choices) == {"b", "c"}

    run(test)
