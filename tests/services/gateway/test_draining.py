"""Requests leave an instance that drains: streams continue elsewhere, whole requests are repeated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protos.block.v1 import common_pb2
from services.gateway.upstream_attempt import UpstreamAttempt
from services.http.sse import data_of
from tests.services.gateway.stubs import Answer, Call, Scene, completes, scene
from tests.services.gateway.test_migrating import (
    COMMENT,
    ERROR,
    NUM_TOKENS,
    PATHS,
    answers,
    choices,
    dies,
    events_of,
    fields_of,
    read,
    results,
)
from tests.services.waiting import run, until

CANCELLED = common_pb2.FINISH_REASON_CANCELLED


class Paused:
    """Answers with some events, waits until it may go on, and answers with the others."""

    def __init__(self, num_events: int) -> None:
        """Wait after this many events."""
        self.num_events = num_events
        self.goes_on, self.paused, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, call: Call) -> None:
        """Answer."""
        call.stream()
        body = {name: value for name, value in json.loads(call.body).items() if name != "logprobs"}
        call.body = json.dumps(body).encode()
        for number, event in enumerate(events_of(call)):
            if number == self.num_events:
                self.paused.set()
                leaving = asyncio.create_task(call.left())
                going_on = asyncio.create_task(self.goes_on.wait())
                await asyncio.wait((leaving, going_on), return_when=asyncio.FIRST_COMPLETED)
                if not self.goes_on.is_set():
                    self.left.set()
                    going_on.cancel()
                    return
                leaving.cancel()
            await call.chunk(event)
        call.end()


async def drained(here: Scene, paused: Paused, fields: dict[str, Any], **drain: Any) -> asyncio.Task[bytes]:
    """Send a request, and have its instance drain when some of its answer has come."""

    async def content() -> bytes:
        return (await here.post(**fields)).content

    asking = asyncio.create_task(content())
    await paused.paused.wait()
    await here.scheduler.drain("e0", **drain)
    return asking


def stays(here: Scene, reason: str) -> Callable[[], Any]:
    """Return what tells whether a request stayed for a reason."""

    async def told() -> bool:
        return await here.metric(f'block_gateway_drain_stays_total{{reason="{reason}"}}') == 1

    return told


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["token-ids", "text"])
def test_a_stream_moves(path: str, mode: str) -> None:
    """Its client sees the stream of an instance that does not drain; nothing counts as a failure."""

    async def test() -> None:
        paused, fields = Paused(5), fields_of(path, stream_options={"include_usage": True})
        async with scene(paused, answers(), continue_streams=mode) as here:
            asking = await drained(here, paused, {**fields, "headers": {"x-request-id": "r"}})
            events, num = read(await asking)
            await paused.left.wait()
            whole, _ = read((await here.post(**fields)).content)
            assert num == 1
            assert choices(events) == choices(whole)
            assert events[-1]["usage"] == {
                **whole[-1]["usage"],
                "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"],
            }
            assert await results(here) == {"planned": 1}
            left = await here.scheduler.released.get()
            assert (left.request_id, left.instance_id) == ("r", "e0")
            assert (left.outcome.finish_reason, left.outcome.migration) == (CANCELLED, "planned")
            assert here.scheduler.asked[-1].exclude_instance_ids == ["e0"]  # by the gateway alone
            assert await here.metric('block_gateway_finished_total{model="tiny",reason="failed"}') == 0
            assert await here.metric('block_gateway_output_tokens_total{model="tiny"}') == 2 * NUM_TOKENS

    run(test)


def test_deadlines_count_over_a_move() -> None:
    """Every token counts once."""

    async def test() -> None:
        paused = Paused(5)
        async with scene(paused, answers()) as here:
            headers = {"x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "600000"}
            await (await drained(here, paused, {**fields_of(PATHS[0]), "headers": headers}))
            assert await here.metric("block_gateway_tokens_due_total") == NUM_TOKENS
            assert await here.metric("block_gateway_tokens_on_time_total") == NUM_TOKENS

    run(test)


@pytest.mark.parametrize(
    ("others", "fields", "options", "reason"),
    [
        ((), {}, {}, "no_instance"),
        ((dies,), {}, {}, "no_instance"),
        ((answers(),), {"logprobs": 1}, {}, "logprobs"),
        ((answers(),), {}, {"continue_streams": "off"}, "off"),
    ],
)
def test_a_stream_that_cannot_move_stays(
    others: tuple[Answer, ...], fields: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    """It goes on where it is, and loses nothing; the reason is counted once."""

    async def test() -> None:
        paused = Paused(5)
        async with scene(paused, *others, **options) as here:
            asking = await drained(here, paused, fields_of(PATHS[0], **fields))
            await until(stays(here, reason))
            paused.goes_on.set()
            events, num = read(await asking)
            assert (len(choices(events)), num) == (NUM_TOKENS, 0)
            assert await results(here) == {}
            assert await here.metric("block_gateway_streams_broken_total") == 0

    run(test)


def test_the_budget_of_migrations_holds() -> None:
    """The second stream stays, because one free migration is all there is."""

    async def test() -> None:
        first, second = Paused(5), Paused(3)
        async with scene(first, answers(), migration_ratio=0.0, max_concurrency=1) as here:
            await (await drained(here, first, fields_of(PATHS[0])))
            await here.scheduler.undrain("e0")
            here.engines[0].answer = second
            await until(lambda: _placed_at(here, "e0"))
            asking = await drained(here, second, fields_of(PATHS[0]))
            await until(stays(here, "migration_budget"))
            second.goes_on.set()
            assert read(await asking)[1] == 0

    async def _placed_at(here: Scene, instance_id: str) -> bool:
        """Whether the gateway knows that an instance drains no longer: a whole request goes there."""
        here.engines[0].answer, answer = completes, here.engines[0].answer
        here.engines[1].answer, other = completes, here.engines[1].answer
        reply = await here.post()
        here.engines[0].answer, here.engines[1].answer = answer, other
        return reply.headers["x-block-instance"] == instance_id

    run(test)


def test_what_is_left_ends_when_the_instance_has_to_go() -> None:
    """A stream that cannot move gets an error event that says why, a whole request is repeated."""

    async def test() -> None:
        paused = Paused(5)
        async with scene(paused, answers(), continue_streams="off") as here:
            asking = await drained(here, paused, fields_of(PATHS[0]), force_unix_s=1.0, deadline_unix_s=1.0)
            content = await asking
            assert b"the instance is removed" in content
            assert content.count(b'"text"') == 5
            await paused.left.wait()

    run(test)


@pytest.mark.parametrize("drain", [{}, {"deadline_unix_s": 1.0, "force_unix_s": 1.0, "stays": True}])
def test_a_request_without_a_response_is_repeated(drain: dict[str, Any]) -> None:
    """As a whole on another instance, streamed or not."""

    async def test() -> None:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def hangs(call: Call) -> None:
            asked.set()
            await call.left()
            gone.set()

        async with scene(hangs, completes) as here:
            asking = asyncio.create_task(here.post(headers={"x-request-id": "r"}))
            await asked.wait()
            await here.scheduler.drain("e0", **drain)
            reply = await asking
            assert (reply.status_code, reply.headers["x-block-instance"]) == (200, "e1")
            await gone.wait()
            ends = {one.instance_id: one.outcome for one in [await here.scheduler.released.get() for _ in range(2)]}
            assert ends["e1"].finish_reason == common_pb2.FINISH_REASON_STOP
            if not drain:
                assert (ends["e0"].finish_reason, ends["e0"].migration) == (CANCELLED, "planned")
                assert await results(here) == {"planned": 1}

    run(test)


@pytest.mark.parametrize("num_legs", [1, 2])
@pytest.mark.parametrize("fails", [True, False])
def test_a_place_that_was_found_in_vain_is_released(
    monkeypatch: pytest.MonkeyPatch, fails: bool, num_legs: int
) -> None:
    """With all its legs: the engine fails just after it was found, and no attempt is left, or responds."""
    send = UpstreamAttempt.send

    async def test() -> None:
        async with scene(completes, completes, attempts=1) as here:

            async def finds_another(attempt: UpstreamAttempt, leave: Callable[[], Awaitable[bool]]) -> None:
                if num_legs == 2:
                    here.scheduler.instances.append(common_pb2.Instance(instance_id="p", role="prefill"))
                    here.scheduler.instances[-1].engine_url = here.engines[1].url
                assert await leave()
                if fails:
                    raise ConnectionError("it breaks")
                await send(attempt)

            monkeypatch.setattr(UpstreamAttempt, "send", finds_another)
            assert (await here.post()).status_code == (502 if fails else 200)
            released = {(await here.scheduler.released.get()).instance_id for _ in range(1 + num_legs)}
            assert released == {"e0", "e1", *(["p"] if num_legs == 2 else [])}

    run(test)


def test_a_request_that_finds_no_other_instance_waits() -> None:
    """Its response comes from the instance that drains."""

    async def test() -> None:
        asked, may_reply = asyncio.Event(), asyncio.Event()

        async def waits(call: Call) -> None:
            asked.set()
            await may_reply.wait()
            await completes(call)

        async with scene(waits) as here:
            asking = asyncio.create_task(here.post())
            await asked.wait()
            await here.scheduler.drain("e0")
            await until(stays(here, "no_instance"))
            may_reply.set()
            assert (await asking).headers["x-block-instance"] == "e0"

    run(test)


def test_a_drain_without_migration_lets_requests_end() -> None:
    """Nothing moves before the instance has to go."""

    async def test() -> None:
        paused = Paused(5)
        async with scene(paused, answers()) as here:
            asking = await drained(here, paused, fields_of(PATHS[0]), stays=True)
            here.engines[0].answer = completes
            await until(lambda: _avoided(here))
            paused.goes_on.set()
            assert read(await asking)[1] == 0

    async def _avoided(here: Scene) -> bool:
        here.engines[1].answer = completes
        return (await here.post()).headers["x-block-instance"] == "e1"

    run(test)


def test_one_scheduler_of_two_knows_it() -> None:
    """The gateway follows all of them, and avoids the instance at each."""

    async def test() -> None:
        async with scene(completes, completes, num_schedulers=2) as here:
            await here.schedulers[1].drain("e0")
            await until(lambda: _avoided(here))
            replies = [await here.post() for _ in range(4)]
            assert {reply.headers["x-block-instance"] for reply in replies} == {"e1"}
            assert all(scheduler.asked for scheduler in here.schedulers)

    async def _avoided(here: Scene) -> bool:
        return (await here.post()).headers["x-block-instance"] == "e1"

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_migrations", [1, 2])
def test_a_request_that_kills_engines_gets_few_of_them(max_migrations: int, stream: bool) -> None:
    """One more than the migrations that it may make, however many attempts are allowed; it is marked once."""

    async def test() -> None:
        async with scene(*[dies] * 6, max_migrations=max_migrations, attempts=6) as here:
            reply = await here.post(stream=stream)
            assert reply.status_code == 502
            assert sum(len(engine.calls) for engine in here.engines) == max_migrations + 1
            assert await here.metric("block_gateway_poison_suspects_total") == 1

    run(test)


def test_a_stream_that_kills_engines_gets_few_of_them() -> None:
    """Deaths before and after the first byte count together."""

    async def test() -> None:
        async with scene(answers(2), dies, dies, dies, dies, attempts=6) as here:
            content = (await here.post(**fields_of(PATHS[0]))).content
            assert b'"engine_failed"' in content
            assert sum(len(engine.calls) for engine in here.engines) == 3
            assert await here.metric("block_gateway_poison_suspects_total") == 1

    run(test)


@pytest.mark.parametrize("num_events", [NUM_TOKENS, NUM_TOKENS + 1])
def test_an_error_after_the_last_token_is_no_failure(num_events: int) -> None:
    """The client has the whole answer: it counts as complete, in metrics and in the outcome."""

    async def reports(call: Call) -> None:
        await call.chunk(ERROR)
        call.end()

    async def test() -> None:
        async with scene(answers(num_events, reports)) as here:
            content = (await here.post(**fields_of(PATHS[0]))).content
            assert b"error" not in content
            assert content.count(COMMENT) == 0
            assert len([one for one in data_of(content) if b'"text"' in one]) >= NUM_TOKENS
            assert await here.metric('block_gateway_finished_total{model="tiny",reason="length"}') == 1
            assert await here.metric('block_gateway_output_tokens_total{model="tiny"}') == NUM_TOKENS
            release = await here.scheduler.released.get()
            assert release.outcome.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert release.outcome.output_tokens == NUM_TOKENS

    run(test)


def test_a_stop_string_is_counted_once() -> None:
    """Tokens whose text an engine holds back are answered again by the next one, and not counted twice."""

    async def test() -> None:
        fields = fields_of(PATHS[0], stop=["nosuchtext"], stream_options={"include_usage": True})
        async with scene(answers(6), answers()) as here:
            events, num = read((await here.post(**fields)).content)
            whole, _ = read((await here.post(**fields)).content)
            assert num == 1
            assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
            assert "".join(one[0]["text"] for one in choices(events)) == "".join(
                one[0]["text"] for one in choices(whole)
            )
            assert json.loads(here.engines[1].calls[0].body)["max_tokens"] > NUM_TOKENS - 6

    run(test)
