"""Prefill and decode legs through the gateway, and each way in which one of them fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protos.block.v1 import common_pb2
from services.http.kv_transfer import REMOTE_DECODE
from tests.services.gateway.stubs import (
    COMPLETION,
    DONE,
    STREAM,
    Answer,
    Call,
    Scene,
    completes,
    hangs,
    scene,
    streams,
    unreachable,
)
from tests.services.kv_transfer_replies import held_params
from tests.services.waiting import run, until

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
FAILED = common_pb2.FINISH_REASON_FAILED
LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
HITS = 5


class Prefill:
    """Replies to prefill legs as vLLM does, each time with other blocks."""

    def __init__(self, **changes: Any) -> None:
        """Set what the replies have instead."""
        self.changes = changes
        self.num = 0

    async def __call__(self, call: Call) -> None:
        """Reply."""
        self.num += 1
        call.whole({**COMPLETION, "kv_transfer_params": self.params(self.num), **self.changes})

    @staticmethod
    def params(num: int) -> dict[str, Any]:
        """Return what the reply number `num` names."""
        return held_params(num, remote_prefill_cached_tokens=HITS)


async def drops(call: Call) -> None:
    """Accept the request, and die."""
    call.die()


def refuses(status: int) -> Answer:
    """Reply with an error."""

    async def answer(call: Call) -> None:
        call.whole({"error": {"message": "no", "type": "x", "param": None, "code": status}}, status)

    return answer


@asynccontextmanager
async def pools(prefill: list[Answer], decode: list[Answer], **options: Any) -> AsyncIterator[Scene]:
    """Start everything: prefill instances p0, p1 and so on, decode instances d0, d1 and so on."""
    async with scene(*prefill, *decode, **options) as here:
        name_pools(here, len(prefill))
        yield here


def name_pools(here: Scene, num_prefill: int) -> None:
    """Give the first instances the role `prefill`, and all others `decode`."""
    for scheduler in here.schedulers:
        for number, instance in enumerate(scheduler.instances):
            is_prefill = number < num_prefill
            instance.role = "prefill" if is_prefill else "decode"
            instance.instance_id = f"p{number}" if is_prefill else f"d{number - num_prefill}"


def bodies(here: Scene, number: int) -> list[dict[str, Any]]:
    """Return what an engine received."""
    return [json.loads(call.body) for call in here.engines[number].calls]


async def releases(here: Scene, num: int) -> dict[str, common_pb2.ReleaseRequest]:
    """Wait for a number of releases; return them by instance."""
    return {one.instance_id: one for one in [await here.scheduler.released.get() for _ in range(num)]}


def excluded(here: Scene) -> list[list[str]]:
    """Return the instances that each decision excluded."""
    return [list(one.exclude_instance_ids) for one in here.scheduler.asked]


# Both legs.


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_both_legs_are_run(path: str, stream: bool) -> None:
    """The prefill instance computes the prompt, and the decode instance gets the request with what it replied."""
    fields: dict[str, Any] = {"max_tokens": 9, "min_tokens": 2, "stream": stream, "temperature": 0.5}
    if path == "/v1/chat/completions":
        fields |= {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 8}
    if stream:
        fields["stream_options"] = {"include_usage": True}

    async def test() -> None:
        async with pools([Prefill()], [streams if stream else completes]) as here:
            response = await here.post(path, **fields, headers={"x-request-id": "r1"})
            assert response.content == (b"".join(STREAM) if stream else json.dumps(COMPLETION).encode())
            assert response.headers["x-block-instance"] == "d0"
            assert response.headers["x-block-prefill-instance"] == "p0"
            assert response.headers["x-block-disaggregation"] == "pair"
            original = {"model": "tiny", "prompt": "Say hello", **fields}
            (to_prefill,), (to_decode,) = bodies(here, 0), bodies(here, 1)
            ids = {"return_token_ids": True} if stream else {}
            assert to_decode == {**original, **ids, "kv_transfer_params": Prefill.params(1)}
            shortened = {
                name: value for name, value in original.items() if name not in ("min_tokens", "stream_options")
            }
            shortened |= {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in original}
            assert to_prefill == {**shortened, "stream": False, "kv_transfer_params": REMOTE_DECODE}
            calls = [engine.calls[0] for engine in here.engines]
            assert [call.target for call in calls] == [path, path]
            assert [call.headers["x-request-id"] for call in calls] == ["r1", "r1"]

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_the_outcome_of_two_legs(stream: bool) -> None:
    """Each leg's reservation is released; the decode leg's outcome has the times of both."""

    async def test() -> None:
        async with pools([Prefill()], [streams if stream else completes]) as here:
            await here.post(stream=stream)
            released = await releases(here, 2)
            prefill, whole = released["p0"].outcome, released["d0"].outcome
            assert (prefill.prefill_instance_id, prefill.finish_reason) == ("p0", LENGTH)
            assert (prefill.output_tokens, prefill.HasField("ttft_s")) == (0, False)
            assert (whole.prefill_instance_id, whole.output_tokens) == ("p0", 3)
            assert whole.finish_reason == (LENGTH if stream else STOP)
            assert 0 < prefill.prefill_s == whole.prefill_s < whole.prefill_s + whole.hand_over_s < whole.e2e_s
            assert here.scheduler.events[:2] == ["asked", "released p0"]
            assert await here.metric("block_gateway_hand_over_seconds_count") == 1
            assert await here.metric("block_gateway_prefill_seconds_count") == 1
            assert await here.metric('block_gateway_prefill_legs_total{result="held"}') == 1

    run(test)


def usage(hits: int) -> dict[str, Any]:
    """Return a usage with prefix hits."""
    return {**COMPLETION["usage"], "prompt_tokens_details": {"audio_tokens": None, "cached_tokens": hits}}


@pytest.mark.parametrize("stream", [True, False])
def test_the_usage_has_the_prefix_hits_of_the_prefill_leg(stream: bool) -> None:
    """To the decode instance nearly all of the prompt is cached, which says nothing to the client."""

    def reply(hits: int) -> bytes:
        data = json.dumps({"choices": [], "usage": usage(hits)}).encode()
        return b"".join((*STREAM[:3], b"data: " + data + b"\n\n", DONE)) if stream else data

    async def answer(call: Call) -> None:
        if stream:
            call.stream()
            await call.chunk(reply(6)[:-40])
            await call.chunk(reply(6)[-40:])
            call.end()
        else:
            call.whole(json.loads(reply(6)))

    async def test() -> None:
        async with pools([Prefill()], [answer]) as here:
            response = await here.post(stream=stream)
            assert response.content == reply(HITS)

    run(test)


def test_a_stream_of_a_chat_begins_with_the_first_token() -> None:
    """The event that contains only the role waits for the next one, and both are passed on unchanged."""
    events = [b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', *STREAM]

    async def answer(call: Call) -> None:
        call.stream()
        for piece in events:
            await call.chunk(piece)
        call.end()

    async def test() -> None:
        async with pools([Prefill()], [answer]) as here:
            response = await here.post(
                "/v1/chat/completions", stream=True, messages=[{"role": "user", "content": "Hi"}]
            )
            assert response.content == b"".join(events)

    run(test)


def test_shared_storage_needs_no_names() -> None:
    """Both legs are sent without kv_transfer_params; another decode instance may serve whatever happened to the first."""

    async def test() -> None:
        async with pools([completes], [drops, completes], kv_connector="shared-storage") as here:
            response = await here.post(max_tokens=9)
            assert response.headers["x-block-instance"] == "d1"
            original = {"model": "tiny", "prompt": "Say hello", "max_tokens": 9}
            assert bodies(here, 0) == [{**original, "max_tokens": 1, "stream": False}]
            assert bodies(here, 1) == bodies(here, 2) == [original]
            assert here.scheduler.asked[1].request.leg == common_pb2.LEG_DECODE

    run(test)


# What is served whole.

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
UNDIVIDED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"n": 2}),
    ("/v1/completions", {"best_of": 2}),
    ("/v1/completions", {"echo": True}),
    ("/v1/completions", {"prompt_logprobs": 0}),
    ("/v1/completions", {"max_tokens": 1}),
    ("/v1/completions", {"prompt": ["Say hello", "Say goodbye"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}),
]


@pytest.mark.parametrize("ignores_it", [True, False])
@pytest.mark.parametrize(("path", "fields"), UNDIVIDED, ids=lambda value: str(value)[:20])
def test_requests_that_one_engine_serves(path: str, fields: dict[str, Any], ignores_it: bool) -> None:
    """The scheduler is asked for one leg; a prefill instance that it names nevertheless is released unused."""

    async def test() -> None:
        async with pools([Prefill()], [completes]) as here:
            here.scheduler.divides_always = ignores_it
            response = await here.post(path, **fields)
            assert (response.status_code, response.headers["x-block-instance"]) == (200, "d0")
            assert "x-block-prefill-instance" not in response.headers
            assert here.scheduler.asked[0].request.leg == common_pb2.LEG_SERVE
            assert (len(here.engines[0].calls), bodies(here, 1)[0].get("kv_transfer_params")) == (0, None)
            assert set(await releases(here, 1 + ignores_it)) == ({"d0", "p0"} if ignores_it else {"d0"})

    run(test)


@pytest.mark.parametrize("fields", [{"messages": "x"}, {"messages": 5}, {"max_completion_tokens": "x"}])
def test_fields_of_a_chat_in_a_completion_are_passed_on_unread(fields: dict[str, Any]) -> None:
    """They decide nothing there, and may have any value."""

    async def test() -> None:
        async with pools([Prefill()], [completes]) as here:
            response = await here.post(**fields)
            assert (response.status_code, response.headers["x-block-prefill-instance"]) == (200, "p0")

    run(test)


def test_clients_may_not_name_blocks() -> None:
    """kv_transfer_params of a client could read the KV blocks of others."""

    async def test() -> None:
        async with pools([Prefill()], [completes]) as here:
            refused = await here.post(kv_transfer_params=Prefill.params(7))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")
            refused = await here.post(vllm_xargs={"kv_transfer_params": "x"})  # vLLM finds them there too
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")
            assert here.scheduler.asked == []
            assert (await here.post(kv_transfer_params=None)).status_code == 200
            assert bodies(here, 1)[0]["kv_transfer_params"] == Prefill.params(1)
        async with pools([Prefill()], [completes], allow_kv_transfer_params=True) as here:
            assert (await here.post(kv_transfer_params=Prefill.params(7))).status_code == 200
            assert bodies(here, 1)[0]["kv_transfer_params"] == Prefill.params(7)

    run(test)


REPLIES: list[tuple[dict[str, Any], str]] = [
    ({"kv_transfer_params": None}, "no_blocks"),
    ({"kv_transfer_params": {**Prefill.params(1), "remote_block_ids": [[]]}}, "no_blocks"),
    ({"kv_transfer_params": "yes"}, "invalid"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "invalid"),
    ({"kv_transfer_params": {**Prefill.params(1), "remote_host": ""}}, "invalid"),
    ({"kv_transfer_params": {**Prefill.params(1), "remote_port": "5600"}}, "invalid"),
    ({"kv_transfer_params": {**Prefill.params(1), "do_remote_prefill": False}}, "invalid"),
    ({"kv_transfer_params": {**Prefill.params(1), "transfer_mode": "push"}}, "invalid"),
]


@pytest.mark.parametrize(("changes", "result"), REPLIES)
def test_replies_without_blocks(changes: dict[str, Any], result: str) -> None:
    """The decode instance gets the original request, and serves all of it."""

    async def test() -> None:
        async with pools([Prefill(**changes)], [completes]) as here:
            response = await here.post(max_tokens=9)
            assert response.json() == COMPLETION
            assert "x-block-prefill-instance" not in response.headers
            assert bodies(here, 1) == [{"model": "tiny", "prompt": "Say hello", "max_tokens": 9}]
            assert await here.metric(f'block_gateway_prefill_legs_total{{result="{result}"}}') == 1
            released = await releases(here, 2)
            assert released["d0"].outcome.prefill_instance_id == ""

    run(test)


def test_a_reply_that_is_not_json() -> None:
    """It is like one without blocks."""

    async def answer(call: Call) -> None:
        call.head(200, "application/json", "content-length: 3")
        call.writer.write(b"{..")

    async def test() -> None:
        async with pools([answer], [completes]) as here:
            assert (await here.post()).json() == COMPLETION
            assert await here.metric('block_gateway_prefill_legs_total{result="invalid"}') == 1

    run(test)


# The prefill leg fails.


@pytest.mark.parametrize(
    "answer", [drops, refuses(429), refuses(500), refuses(503)], ids=["drops", "429", "500", "503"]
)
def test_a_prefill_instance_fails(answer: Answer) -> None:
    """Another decision is made without it, after the first decode reservation has been released."""

    async def test() -> None:
        async with pools([answer, Prefill()], [completes]) as here:
            response = await here.post(headers={"x-request-id": "r1"})
            assert response.json() == COMPLETION
            assert response.headers["x-block-prefill-instance"] == "p1"
            assert excluded(here) == [[], ["p0"]]
            released = [await here.scheduler.released.get() for _ in range(4)]
            assert sorted(one.instance_id for one in released) == ["d0", "d0", "p0", "p1"]
            (failed,) = (one for one in released if one.instance_id == "p0")
            assert (failed.outcome.finish_reason, failed.outcome.prefill_instance_id) == (FAILED, "p0")
            events = here.scheduler.events
            assert events.index("released d0") < len(events) - events[::-1].index("asked")
            assert [one.HasField("outcome") for one in released if one.instance_id == "d0"] == [False, True]
            assert await here.metric("block_gateway_retries_total") == 1

    run(test)


def test_a_prefill_instance_hangs() -> None:
    """It costs its deadline."""

    async def test() -> None:
        async with pools([hangs, Prefill()], [completes], first_byte_s=3.0) as here:
            response = await here.post()
            assert (response.json(), response.headers["x-block-prefill-instance"]) == (COMPLETION, "p1")

    run(test)


def test_all_prefill_instances_fail() -> None:
    """What the scheduler then decides is done: the request is served whole."""

    async def test() -> None:
        async with pools([drops, drops], [completes]) as here:
            response = await here.post()
            assert response.json() == COMPLETION
            assert excluded(here) == [[], ["p0"], ["p0", "p1"]]
            assert bodies(here, 2) == [{"model": "tiny", "prompt": "Say hello"}]

    run(test)


def test_a_prefill_instance_refuses_the_request() -> None:
    """Its error is the reply; nothing stays reserved, and no instance is blamed."""

    async def test() -> None:
        async with pools([refuses(400), Prefill()], [completes]) as here:
            response = await here.post()
            assert (response.status_code, response.json()["error"]["code"]) == (400, 400)
            assert (len(here.engines[1].calls), len(here.engines[2].calls)) == (0, 0)
            released = await releases(here, 2)
            assert not released["d0"].HasField("outcome")
            assert released["p0"].outcome.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED

    run(test)


def test_failures_of_prefill_legs_have_the_budget_of_retries() -> None:
    """Without budget the failure is the reply."""

    async def test() -> None:
        async with pools([drops, drops], [completes], retry_ratio=0.0, max_concurrency=1) as here:
            assert [(await here.post()).status_code for _ in range(2)] == [502, 502]
            assert await here.metric("block_gateway_retries_total") == 1
            await until(lambda: here.scheduler.released.qsize() == 6)

    run(test)


# The decode leg fails.


def test_another_decode_instance_fetches_the_blocks() -> None:
    """An instance that cannot be reached has not fetched them: the prompt is not computed again."""

    async def test() -> None:
        async with pools([Prefill()], [completes, completes]) as here:
            here.scheduler.instances[1].engine_url = unreachable()
            response = await here.post()
            assert (response.json(), response.headers["x-block-instance"]) == (COMPLETION, "d1")
            assert response.headers["x-block-disaggregation"] == "pair"
            first, second = here.scheduler.asked
            assert (first.request.leg, second.request.leg) == (common_pb2.LEG_UNSPECIFIED, common_pb2.LEG_DECODE)
            assert excluded(here) == [[], ["d0"]]
            assert len(here.engines[0].calls) == 1
            assert bodies(here, 2)[0]["kv_transfer_params"] == Prefill.params(1)
            released = await releases(here, 3)
            assert not released["d0"].HasField("outcome")
            assert released["d1"].outcome.prefill_instance_id == "p0"

    run(test)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("answer", [drops, refuses(503), refuses(429)], ids=["drops", "503", "429"])
def test_a_decode_instance_fails_before_the_first_byte(answer: Answer, stream: bool) -> None:
    """It may have freed the blocks: the prompt is computed again, on any instance, and another one decodes."""

    async def test() -> None:
        async with pools([Prefill()], [answer, streams if stream else completes]) as here:
            response = await here.post(stream=stream)
            assert response.status_code == 200
            assert response.headers["x-block-instance"] == "d1"
            assert excluded(here) == [[], ["d0"]]
            assert [one.request.leg for one in here.scheduler.asked] == [common_pb2.LEG_UNSPECIFIED] * 2
            assert bodies(here, 1)[0]["kv_transfer_params"] == Prefill.params(1)
            assert bodies(here, 2)[0]["kv_transfer_params"] == Prefill.params(2)
            released = await releases(here, 4)
            assert released["d0"].outcome.finish_reason == FAILED

    run(test)


async def sends_an_error(call: Call) -> None:
    """Stream an error before any text, as vLLM does for a completion."""
    call.stream()
    await call.chunk(b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n')
    await call.chunk(DONE)
    call.end()


async def sends_role_and_error(call: Call) -> None:
    """Stream a role and then an error, as vLLM does for a chat."""
    call.stream()
    await call.chunk(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n')
    await call.chunk(b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n')
    await call.chunk(DONE)
    call.end()


async def ends_in_an_error(call: Call) -> None:
    """Reply with the reason `error`."""
    call.whole({"choices": [{"index": 0, "text": "", "finish_reason": "error"}]})


FETCHES: list[tuple[Answer, bool]] = [
    (refuses(500), True), (refuses(500), False), (sends_an_error, True), (sends_role_and_error, True),
    (ends_in_an_error, False),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "stream"), FETCHES)
def test_blocks_that_cannot_be_fetched(answer: Answer, stream: bool) -> None:
    """The prompt is computed on another instance; the same decode instance may serve, after its release."""
    failures = [answer]

    async def fails_once(call: Call) -> None:
        await (failures.pop() if failures else streams if stream else completes)(call)

    async def test() -> None:
        async with pools([Prefill(), Prefill()], [fails_once]) as here:
            response = await here.post(stream=stream)
            assert response.content == (b"".join(STREAM) if stream else json.dumps(COMPLETION).encode())
            assert response.headers["x-block-prefill-instance"] == "p1"
            assert excluded(here) == [[], ["p0"]]
            events = here.scheduler.events
            assert events.index("released d0") < len(events) - events[::-1].index("asked")
            assert await here.metric('block_gateway_retries_total{why="fetch"}') == 1

    run(test)


@pytest.mark.parametrize(("answer", "stream"), FETCHES)
def test_fetches_that_fail_again(answer: Answer, stream: bool) -> None:
    """After the second one the request is served whole, by another instance; the first one is blamed for that only."""

    async def test() -> None:
        async with pools([Prefill(), Prefill()], [answer, streams if stream else completes]) as here:
            response = await here.post(stream=stream)
            assert response.content == (b"".join(STREAM) if stream else json.dumps(COMPLETION).encode())
            assert response.headers["x-block-instance"] == "d1"
            assert excluded(here) == [[], ["p0"], ["p0", "p1", "d0"]]
            assert here.scheduler.asked[2].request.leg == common_pb2.LEG_SERVE
            assert "kv_transfer_params" not in bodies(here, 3)[0]
            released = [await here.scheduler.released.get() for _ in range(5)]
            reasons = [one.outcome.finish_reason for one in released if one.instance_id == "d0"]
            assert reasons == [CANCELLED, FAILED]

    run(test)


@pytest.mark.parametrize(("answer", "stream"), FETCHES)
def test_a_failed_fetch_without_a_retry_left(answer: Answer, stream: bool) -> None:
    """The client gets an error as the reply, not as a stream."""

    async def test() -> None:
        async with pools([Prefill()], [answer], attempts=1) as here:
            response = await here.post(stream=stream)
            assert response.status_code in (500, 502)
            assert set(response.json()) == {"error"}
            assert set(await releases(here, 2)) == {"p0", "d0"}

    run(test)


def test_a_decode_instance_dies_after_the_first_byte() -> None:
    """The stream breaks, as that of a whole request does, where streams do not continue."""

    async def answer(call: Call) -> None:
        call.stream()
        await call.chunk(STREAM[0] + STREAM[1][:30])
        call.die()

    async def test() -> None:
        async with pools([Prefill()], [answer, streams], continue_streams="off") as here:
            response = await here.post(stream=True)
            first, error, rest = response.content.split(b"\n\n")
            assert (first + b"\n\n", rest) == (STREAM[0], b"")
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
            assert len(here.scheduler.asked) == 1
            assert set(await releases(here, 2)) == {"p0", "d0"}

    run(test)


def test_a_hand_over_that_takes_too_long() -> None:
    """A decode instance that is found after the deadline is given back, and the prompt is computed again."""

    async def test() -> None:
        async with pools([Prefill()], [completes, completes], hand_over_deadline_s=1.0) as here:
            here.scheduler.instances[1].engine_url = unreachable()
            post = asyncio.create_task(here.post())
            await here.scheduler.seen.get()
            here.scheduler.open.clear()
            while (await here.scheduler.seen.get()).request.leg != common_pb2.LEG_DECODE:
                pass
            await asyncio.sleep(1.1)  # the deadline itself is what is tested
            here.scheduler.open.set()
            response = await post
            assert (response.json(), response.headers["x-block-instance"]) == (COMPLETION, "d1")
            assert bodies(here, 2)[0]["kv_transfer_params"] == Prefill.params(len(here.engines[0].calls))
            assert len(here.engines[0].calls) > 1
            events = here.scheduler.events
            assert events.index("released d1") < len(events) - events[::-1].index("asked")

    run(test)


def test_without_another_decode_instance_the_request_is_placed_again() -> None:
    """The scheduler then knows best: here an instance for whole requests is left."""

    async def test() -> None:
        async with pools([Prefill()], [completes, completes]) as here:
            here.scheduler.instances[1].engine_url = unreachable()
            here.scheduler.has_decode_legs = False
            response = await here.post()
            assert (response.json(), response.headers["x-block-instance"]) == (COMPLETION, "d1")
            legs = [one.request.leg for one in here.scheduler.asked]
            assert legs == [common_pb2.LEG_UNSPECIFIED, common_pb2.LEG_DECODE, common_pb2.LEG_UNSPECIFIED]
            assert bodies(here, 2)[0]["kv_transfer_params"] == Prefill.params(2)

    run(test)


# Clients that disconnect, and schedulers that do not reply.


def test_a_client_leaves_during_the_prefill_leg() -> None:
    """The prefill instance's connection is closed, and both reservations are released."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def answer(call: Call) -> None:
        asked.set()
        await call.left()
        gone.set()

    async def test() -> None:
        async with pools([answer], [completes]) as here:
            post = asyncio.create_task(here.post())
            await asked.wait()
            post.cancel()
            await gone.wait()
            released = await releases(here, 2)
            assert released["p0"].outcome.finish_reason == CANCELLED
            assert not released["d0"].HasField("outcome")
            assert here.engines[1].calls == []
            assert await here.metric('block_gateway_prefill_legs_total{result="client_left"}') == 1

    run(test)


def test_a_client_leaves_between_the_legs() -> None:
    """The decision for the decode leg is given back when it comes, and no engine is called."""

    async def test() -> None:
        async with pools([Prefill()], [completes, completes]) as here:
            here.scheduler.instances[1].engine_url = unreachable()
            post = asyncio.create_task(here.post())
            await here.scheduler.seen.get()
            here.scheduler.open.clear()
            await here.scheduler.seen.get()
            post.cancel()
            while await here.metric("block_gateway_clients_left_total") < 1:
                pass
            here.scheduler.open.set()
            assert set(await releases(here, 3)) == {"p0", "d0", "d1"}
            assert here.engines[2].calls == []

    run(test)


def test_a_client_leaves_during_the_decode_leg() -> None:
    """The decode instance's connection is closed; it frees the blocks then."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def answer(call: Call) -> None:
        asked.set()
        await call.left()
        gone.set()

    async def test() -> None:
        async with pools([Prefill()], [answer]) as here:
            post = asyncio.create_task(here.post())
            await asked.wait()
            post.cancel()
            await gone.wait()
            released = await releases(here, 2)
            assert released["d0"].outcome.finish_reason == CANCELLED
            assert released["d0"].outcome.prefill_instance_id == "p0"

    run(test)


def test_a_decision_for_two_legs_that_comes_too_late_is_released() -> None:
    """Both of its reservations are."""

    async def test() -> None:
        async with pools([Prefill()], [completes]) as here:
            here.scheduler.open.clear()
            post = asyncio.create_task(here.post())
            await here.scheduler.seen.get()
            post.cancel()
            while await here.metric("block_gateway_clients_left_total") < 1:
                pass
            here.scheduler.open.set()
            assert set(await releases(here, 2)) == {"p0", "d0"}

    run(test)


def test_without_schedulers_no_prefill_instance_serves() -> None:
    """Instances that earlier decisions named serve whole requests, but for those of the prefill pool."""

    async def test() -> None:
        async with pools([Prefill()], [completes]) as here:
            assert (await here.post()).status_code == 200
            await here.scheduler.stop()
            for _ in range(4):
                response = await here.post()
                assert response.headers["x-block-policy"] == "last_resort_round_robin"
                assert response.headers["x-block-instance"] == "d0"
            assert "kv_transfer_params" not in bodies(here, 1)[-1]

    run(test)


def test_the_scheduler_dies_between_the_legs() -> None:
    """The next best instance of the decision fetches the blocks."""

    async def test() -> None:
        async with pools([Prefill()], [completes, completes]) as here:

            async def kills_the_scheduler(call: Call) -> None:
                await here.scheduler.stop()
                await Prefill()(call)

            here.engines[0].answer = kills_the_scheduler
            here.scheduler.instances[1].engine_url = unreachable()
            response = await here.post()
            assert (response.status_code, response.headers["x-block-policy"]) == (200, "next_best")
            assert bodies(here, 2)[0]["kv_transfer_params"] == Prefill.params(1)

    run(test)
