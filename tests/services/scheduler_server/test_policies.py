"""Policies over indicators, served: the forecasts requested, the reports watched, and the decisions."""

from __future__ import annotations

import asyncio

import pytest

from protos.block.v1 import common_pb2
from tests.services.scheduler_server.running import (
    BLIND,
    FORECAST,
    refused,
    run,
    scheduler,
    statuses,
    until,
    until_reported,
    until_seen,
)
from tests.services.stub_sidecars import sidecars

INDICATORS = common_pb2.DECISION_BASIS_INDICATORS
LAST_RESORT = common_pb2.DECISION_BASIS_LAST_RESORT


def test_a_heuristic_decides_by_reported_indicators() -> None:
    """It requests no forecasts; the choice is reserved, and the decision has its basis."""

    async def test() -> None:
        async with sidecars("a", "b", "c") as stubs, scheduler(stubs, policy="jsq") as client:
            await until_reported(client, stubs)
            stubs[0].update_load(num_running=5)
            stubs[2].update_load(num_running=3)
            await until_seen(client, lambda known: (known["a"].num_running, known["c"].num_running) == (5, 3))
            decision = await client.decide(explain=True)
            assert (decision.instance.instance_id, decision.basis, decision.policy) == ("b", INDICATORS, "jsq")
            assert decision.reserved_for_s > 0
            assert not decision.HasField("forecast")
            assert {one.instance_id: one.score for one in decision.candidates} == {"a": 5.0, "b": 1.0, "c": 3.0}
            assert statuses(decision) == dict.fromkeys("abc", "INDICATORS")
            assert all(0 < one.indicators.age_s < 50 for one in decision.candidates)
            assert [one.instance_id for one in decision.next_best] == ["c", "a"]
            assert decision.candidates[0].indicators.more == {"num_queued": 0.0}
            assert not any(stub.questions for stub in stubs)
            # the reservation counts four, so that c is next
            assert await client.choose() == "c"
            assert client.count("block_decisions_total", policy="jsq", basis="indicators") >= 2

    run(test)


def test_simultaneous_decisions_by_indicators_do_not_herd() -> None:
    """A request counts at its instance before the instance can report it."""

    async def test() -> None:
        async with sidecars("a", "b", "c") as stubs, scheduler(stubs, policy="least_loaded") as client:
            await until_reported(client, stubs)
            for stub in stubs:
                stub.hung_reserving = asyncio.Event()
            deciding = [asyncio.ensure_future(client.choose()) for _ in range(9)]
            await until(lambda: client.count("block_decisions_total", policy="least_loaded", basis="indicators") >= 1)
            for stub in stubs:
                stub.hung_reserving.set()
            chosen = [await one for one in deciding]
            assert sorted(chosen) == sorted("abc" * 3)

    run(test)


def test_only_the_shortlist_is_forecast() -> None:
    """Of four, the two least busy are forecast, and the better forecast wins; the others are not shortlisted."""

    async def test() -> None:
        async with sidecars("a", "b", "c", "d") as stubs:
            for stub, load, e2e_s in zip(stubs, (9, 1, 2, 8), (0.5, 3.0, 2.0, 0.1), strict=True):
                stub.load["num_running"], stub.e2e_s = load, e2e_s
            async with scheduler(stubs, policy="block: k = 2, shortlist = 'least_loaded'") as client:
                await until_reported(client, stubs)
                for stub in stubs:
                    stub.questions.clear()
                decision = await client.decide(explain=True)
                assert (decision.instance.instance_id, decision.basis) == ("c", FORECAST)
                assert [len(stub.questions) for stub in stubs] == [0, 1, 1, 0]
                assert statuses(decision) == {
                    "a": "NOT_SHORTLISTED",
                    "b": "FORECAST",
                    "c": "FORECAST",
                    "d": "NOT_SHORTLISTED",
                }
                assert (decision.num_candidates, decision.num_skipped) == (4, 0)
                assert "over 4, 2 of them forecast" in decision.why
                assert client.count("block_decisions_total", policy="block", basis="forecast") >= 1

    run(test)


def test_when_the_whole_shortlist_fails_another_instance_is_reserved() -> None:
    """Instances that are not shortlisted count as healthy."""

    async def test() -> None:
        async with sidecars("a", "b", "c") as stubs:
            stubs[0].load["num_running"] = 0
            async with scheduler(stubs, policy="block: k = 1, shortlist = 'least_loaded'") as client:
                await until_reported(client, stubs)
                await stubs[0].crash()
                decision = await client.decide()
                assert decision.instance.instance_id == "b"
                assert decision.basis in (LAST_RESORT, FORECAST)  # the second time the circuit of a may be open
                assert stubs[1].held
                assert decision.HasField("reserved_for_s")

    run(test)


def test_only_what_a_policy_reads_is_requested() -> None:
    """Delays are forecast for policies that read them, or only deadlines; without indicators no sidecar is watched."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, policy="round_robin") as client:
            assert (await client.decide()).basis == BLIND
            await client.decide(policy="block")
            assert [stub.questions[-1].with_delays for stub in stubs] == [False, False]
            await client.decide(policy="marginal")
            assert [stub.questions[-1].with_delays for stub in stubs] == [True, True]
            assert [stub.questions[-1].only_deadlines for stub in stubs] == [False, False]
            assert [stub.num_watched for stub in stubs] == [0, 0]
            await client.decide(policy="jsq")
            await until(lambda: [stub.num_watched for stub in stubs] == [1, 1])
            await client.decide(policy="slo")
            assert [stub.questions[-1].with_delays for stub in stubs] == [True, True]
            assert [stub.questions[-1].only_deadlines for stub in stubs] == [True, True]

    run(test)


def test_a_request_may_set_a_formula() -> None:
    """It counts as the policy expr; an invalid formula is refused, and none is run as Python."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as client:
            await until_reported(client, stubs)
            stubs[0].e2e_s = 9.0
            decision = await client.decide(policy="expr: -predicted_e2e_s")
            assert (decision.instance.instance_id, decision.policy) == ("a", "expr: -predicted_e2e_s")
            assert client.count("block_decisions_total", policy="expr", basis="forecast") == 1
            for text, hint in (
                ("expr: predicted_e2e", "did you mean predicted_e2e_s"),
                ("expr: __import__('os')", "__import__ is no known function"),
                ("linear: lambda = 7", "lambda: must be a number from 0 to 1"),
            ):
                assert hint in await refused(client.decide(policy=text))
            for number in range(100):  # each is its own policy; the cache of policies is bounded
                await client.decide(policy=f"expr: predicted_e2e_s + {number}", dry_run=True)

    run(test)


@pytest.mark.parametrize("named", [True, False])
def test_requests_that_share_a_prefix_go_to_the_same_instance(named: bool) -> None:
    """By the block hashes of the caller, or by the text, as long as the instance is not much busier."""

    async def test() -> None:
        async with sidecars("a", "b", "c") as stubs:
            for stub in stubs:
                stub.load.update(num_running=10, queued_prefill_tokens=0)
            async with scheduler(stubs, policy="lmetric") as client:
                await until_reported(client, stubs)

                async def ask(talk: int) -> str:
                    text = b"%d" % talk * 4000
                    names = [b"%d/%d" % (talk, number) for number in range(60)]
                    request = client.request(
                        prompt_tokens=1000,
                        prefix_hashes=names if named else (),
                        prefix_block_tokens=16 if named else 0,
                    )
                    return await client.choose(request=request, prompt=b"" if named else text)

                instances = [await ask(talk) for talk in range(3)]
                assert sorted(instances) == ["a", "b", "c"]
                for _ in range(3):
                    assert [await ask(talk) for talk in range(3)] == instances

    run(test)


def test_an_instance_that_reports_itself_down_is_skipped() -> None:
    """Until it reports itself ready; no call is needed."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, policy="least_loaded") as client:
            await until_reported(client, stubs)
            stubs[0].state = common_pb2.INSTANCE_STATE_DOWN
            stubs[0].update_load()

            async def chosen_and_status() -> tuple[str, str]:
                decision = await client.decide(explain=True, dry_run=True)
                return decision.instance.instance_id, statuses(decision)["a"]

            while await chosen_and_status() != ("b", "DOWN"):
                await asyncio.sleep(0.005)
            stubs[0].state = common_pb2.INSTANCE_STATE_READY
            stubs[0].update_load()
            while await chosen_and_status() != ("a", "INDICATORS"):
                await asyncio.sleep(0.005)

    run(test)


def test_a_broken_watch_stream_is_reopened() -> None:
    """The reports of a sidecar that restarted are received again."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, policy="least_loaded", first_pause_s=0.01) as client:
            await until_reported(client, stubs)
            await stubs[0].stop()
            stubs[0].load["num_running"] = 77
            await stubs[0].start()
            await until_seen(client, lambda known: known["a"].num_running == 77)
            stubs[1].update_load(num_running=55)
            await until_seen(client, lambda known: known["b"].num_running == 55)

    run(test)


def test_many_instances_can_refuse_a_reservation_one_after_the_other() -> None:
    """Eleven refuse to reserve the request; the twelfth accepts it."""

    async def test() -> None:
        names = [f"i{number:02}" for number in range(12)]
        async with sidecars(*names) as stubs, scheduler(stubs, policy="least_loaded") as client:
            await until_reported(client, stubs)
            for number, stub in enumerate(stubs):
                stub.update_load(num_running=number + 1)
                stub.refuse_reservations = number != 11
            await until_seen(client, lambda known: known["i11"].num_running == 12)
            decision = await client.decide(explain=True)
            assert decision.instance.instance_id == "i11"
            assert list(statuses(decision).values()) == [*["REFUSED"] * 11, "INDICATORS"]

    run(test)
