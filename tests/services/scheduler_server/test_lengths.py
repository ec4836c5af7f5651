"""Response lengths: given by the request, by the tagger, or by default."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, tagger_pb2, tagger_pb2_grpc
from services.rpc.server import ServerSettings, serving
from tests.services.scheduler_server.running import AT_ONCE, FOR_EVER, STOP, run, scheduler
from tests.services.stub_sidecars import sidecars


class StubTagger(tagger_pb2_grpc.LengthTaggerServicer):
    """A tagger that returns one length for all requests."""

    def __init__(self) -> None:
        """Start without delay."""
        self.tag_requests: list[tagger_pb2.TagRequest] = []
        self.outcomes: list[common_pb2.Outcome] = []
        self.tag = common_pb2.Tag(median_tokens=77, spread=0.5, estimator="stub")
        self.hung: asyncio.Event | None = None

    async def Tag(self, request: tagger_pb2.TagRequest, context: Any) -> tagger_pb2.TagResponse:
        """Return the tag."""
        self.tag_requests.append(request)
        if self.hung is not None:
            await self.hung.wait()
        return tagger_pb2.TagResponse(tag=self.tag)

    async def Observe(
        self,
        request: tagger_pb2.ObserveRequest,
        context: Any,
    ) -> tagger_pb2.ObserveResponse:
        """Record outcomes."""
        self.outcomes += request.outcomes
        return tagger_pb2.ObserveResponse(num_learned=len(request.outcomes))


@asynccontextmanager
async def tagger(port: int = 0) -> AsyncIterator[tuple[StubTagger, str]]:
    """Serve a stub tagger; give it and its address."""
    stub = StubTagger()
    register = partial(tagger_pb2_grpc.add_LengthTaggerServicer_to_server, stub)
    async with serving(ServerSettings(port=port, drain_s=0.0), [register], CollectorRegistry()) as here:
        yield stub, f"127.0.0.1:{here.port}"


def test_the_tagger_is_called_for_unknown_lengths_that_are_needed() -> None:
    """Lengths that are given, fixed or not needed cost no call; outcomes are sent to the tagger."""

    async def test() -> None:
        async with tagger() as (stub, address), sidecars("a") as stubs:
            async with scheduler(stubs, tagger=address) as client:
                await client.decide(client.request(output_tokens=5))
                await client.decide(client.request(output_tokens=None, tag=common_pb2.Tag(median_tokens=6)))
                fixed = await client.decide(client.request(output_tokens=None, max_tokens=7, ignore_eos=True))
                assert (fixed.tag.median_tokens, fixed.tag.estimator) == (7, "client")
                await client.decide(client.request(output_tokens=None), policy="random")
                assert not stub.tag_requests
                decision = await client.decide(
                    client.request(output_tokens=None, prompt_tokens=0), prompt=b"Why is the sky blue?"
                )
                assert (decision.tag.median_tokens, decision.tag.estimator) == (77, "stub")
                assert stub.tag_requests[0].prompt == b"Why is the sky blue?"
                assert stubs[0].questions[-1].requests[0].tag == decision.tag
                assert stubs[0].questions[-1].requests[0].prompt_tokens == 5
                assert client.count("block_scheduler_tags_total", source="tagger") == 1
                await client.release(decision, STOP)
            assert [outcome.request_id for outcome in stub.outcomes] == [decision.request_id]

    run(test)


def test_without_a_tagger_lengths_have_defaults() -> None:
    """A dead tagger fails no request; a late one costs a deadline, twice."""

    async def test() -> None:
        async with tagger() as (stub, address), sidecars("a") as stubs:
            stub.hung = asyncio.Event()
            async with scheduler(stubs, tagger=address, tagger_deadline_s=0.01, **FOR_EVER) as client:
                for _ in range(4):
                    decision = await client.decide(client.request(output_tokens=None, max_tokens=100))
                    assert (decision.tag.median_tokens, decision.tag.estimator) == (100, "constant")
                    decision = await client.decide(client.request(output_tokens=None, expected_output_tokens=30))
                    assert (decision.tag.median_tokens, decision.tag.estimator) == (30, "client")
                assert client.count("block_tagger_failures_total", kind="late") == 2
                assert client.count("block_scheduler_tags_total", source="without_tagger_constant") == 4
                assert len(stub.tag_requests) <= 2
            stub.hung.set()
        async with sidecars("a") as stubs, scheduler(stubs, tagger="127.0.0.1:1") as client:
            assert (await client.decide(client.request(output_tokens=None))).tag.median_tokens == 256
            assert client.count("block_tagger_failures_total", kind="failed") == 1

    run(test)


def test_a_tagger_that_restarts_is_used_again() -> None:
    """Meanwhile lengths have defaults, and no request waits."""

    async def test() -> None:
        async with sidecars("a") as stubs:
            async with tagger() as (_, address):
                pass
            async with scheduler(stubs, tagger=address, **AT_ONCE) as client:
                for _ in range(3):
                    assert (await client.decide(client.request(output_tokens=None))).tag.estimator == "constant"
                async with tagger(port=int(address.rpartition(":")[2])):
                    while (await client.decide(client.request(output_tokens=None))).tag.estimator != "stub":
                        pass

    run(test)


@pytest.mark.parametrize("median_tokens", [math.nan, -1.0, 0.0, math.inf])
def test_invalid_tags_are_ignored(median_tokens: float) -> None:
    """An invalid length counts as no reply."""

    async def test() -> None:
        async with tagger() as (stub, address), sidecars("a") as stubs:
            stub.tag.median_tokens = median_tokens
            async with scheduler(stubs, tagger=address) as client:
                assert (await client.decide(client.request(output_tokens=None))).tag.estimator == "constant"

    run(test)
