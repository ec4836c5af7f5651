"""Several prompts and responses through the gateway: real emulated engines, sidecars and the official client."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from predictor.approximations import GRAMMAR_COMPILATION, MANY_RESPONSES
from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.explanations import in_short, table_of
from services.gateway.server import InProcessDecisions, serving
from services.gateway.settings import GatewaySettings
from services.instances.instance import Instance
from services.instances.sources import Listed
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from tests.services.emulator.running import MODEL, Emulated, emulated
from tests.services.gateway.stubs import LOCAL, completes, scene
from tests.services.gateway.test_in_process import gateway
from tests.services.predictor_server.running_sidecars import NodeClient, node_of
from tests.services.waiting import LIMIT_S, PATIENCE_S, run, until

HI: Any = [{"role": "user", "content": "Say hello"}]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
LIMIT = 12  # responses of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A gateway that decides by itself over two engines with their sidecars."""

    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient
    scheduler: Any
    sidecars: NodeClient
    engines: list[Emulated]

    async def is_idle(self) -> bool:
        """Whether nothing runs, waits or is reserved."""
        return all(not len(one.reservations) and one.source.snapshot().reserved == () for one in self.sidecars.sidecars)

    async def explained(self, request_id: str) -> common_pb2.Decision:
        """Return a decision once more."""
        reply = await self.scheduler.Explain(scheduler_pb2.ExplainRequest(request_id=request_id))
        decision: common_pb2.Decision = reply.decision
        return decision


@contextmanager
def two_engines(folder: Path) -> Any:
    """Run two emulated engines."""
    with emulated(_made(folder / "a")) as first, emulated(_made(folder / "b")) as second:
        yield [first, second]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@asynccontextmanager
async def cluster(engines: list[Emulated]) -> AsyncIterator[Cluster]:
    """Run sidecars and a gateway before two engines."""
    async with AsyncExitStack() as stack:
        names = {f"engine-{number}": one for number, one in enumerate(engines)}
        node = await stack.enter_async_context(
            node_of({name: one.state_file for name, one in names.items()}, fresh_s=0.15)
        )
        listed = [
            Instance(
                instance_id=name,
                engine_url=str(one.client.base_url).rstrip("/"),
                sidecar_address=f"{LOCAL}:{node.port}",
                models=(MODEL,),
            )
            for name, one in names.items()
        ]
        decisions = InProcessDecisions(
            settings=SchedulerSettings(
                scheduler_id="own", sidecar_deadline_s=PATIENCE_S, max_responses=LIMIT, record_candidates=True
            ),
            source=Listed(listed),
            rpc=ServerSettings(),
        )
        settings = GatewaySettings(decide="in-process", schedule_s=2 * PATIENCE_S)
        here = await stack.enter_async_context(serving(settings, ServerSettings(), decisions))
        url = f"http://{LOCAL}:{here.port}"
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=LIMIT_S))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{LOCAL}:{here.scheduler_port}"))
        yield Cluster(
            openai=client,
            http=http,
            scheduler=scheduler_pb2_grpc.SchedulerStub(channel),
            sidecars=node,
            engines=engines,
        )


def test_the_official_client_asks_for_several_responses(tmp_path: Path) -> None:
    """Usage counts all; nothing stays reserved; explanations name what is approximated; the forecast is of all."""
    with two_engines(tmp_path) as engines:

        async def test() -> None:
            async with cluster(engines) as here:
                ids = {"x-request-id": "three", "x-block-explain": "true"}
                chat = await here.openai.chat.completions.with_raw_response.create(
                    model=MODEL, messages=HI, n=3, max_tokens=20, extra_headers=ids
                )
                found = chat.parse()
                assert [choice.index for choice in found.choices] == [0, 1, 2]
                assert found.usage is not None
                texts = [choice.message.content or "" for choice in found.choices]
                assert len(set(texts)) == 3
                assert found.usage.completion_tokens <= 60
                decision = await here.explained("three")
                assert MANY_RESPONSES in decision.forecast.approximations
                assert MANY_RESPONSES in chat.headers["x-block-explanation"]
                assert any(MANY_RESPONSES in line for line in table_of(decision))
                assert MANY_RESPONSES in in_short(decision)
                assert decision.forecast.output_tokens > 20

                prompts = ["Say hello", "Tell me of the sea and its ships", "One"]
                lists = await here.openai.completions.create(
                    model=MODEL, prompt=prompts, n=2, max_tokens=10, extra_body={"ignore_eos": True},
                    extra_headers={"x-request-id": "lists"},
                )  # fmt: skip
                assert [choice.index for choice in lists.choices] == list(range(6))
                assert lists.usage is not None
                singles = [
                    await here.openai.completions.create(model=MODEL, prompt=one, max_tokens=1) for one in prompts
                ]
                assert lists.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in singles if one.usage)
                assert lists.usage.completion_tokens == 60
                decision = await here.explained("lists")
                assert decision.forecast.output_tokens == 60
                assert list(decision.forecast.approximations) == []
                await until(here.is_idle)

        run(test)


def test_streams_of_several_responses(tmp_path: Path) -> None:
    """Each response has its own text and end; one usage counts all."""
    with two_engines(tmp_path) as engines:

        async def test() -> None:
            async with cluster(engines) as here:
                more: Any = {"ignore_eos": True}
                whole = await here.openai.completions.create(
                    model=MODEL, prompt=["a", "b"], n=2, max_tokens=9, extra_body=more
                )
                stream = await here.openai.completions.create(
                    model=MODEL, prompt=["a", "b"], n=2, max_tokens=9, extra_body=more, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                texts: dict[int, str] = defaultdict(str)
                num_ends, usage = 0, None
                async for chunk in stream:
                    for choice in chunk.choices:
                        texts[choice.index] += choice.text
                        num_ends += choice.finish_reason == "length"
                    usage = chunk.usage or usage
                assert [texts[index] for index in range(4)] == [choice.text for choice in whole.choices]
                assert usage is not None
                assert (num_ends, usage.completion_tokens, usage.prompt_tokens) == (4, 36, 2)
                await until(here.is_idle)

        run(test)


def test_a_client_that_leaves_leaves_nothing_reserved(tmp_path: Path) -> None:
    """All responses end, and all reservations."""
    with two_engines(tmp_path) as engines:

        async def test() -> None:
            async with cluster(engines) as here:
                for engine in engines:
                    engine.set_faults(slow=1000.0)
                body = {"model": MODEL, "prompt": ["a", "b"], "n": 3, "max_tokens": 500, "ignore_eos": True}
                asking = asyncio.create_task(here.http.post("/v1/completions", json=body))
                await until(lambda: sum(engine.driver.num_jobs for engine in engines) == 6)
                asking.cancel()
                for engine in engines:
                    engine.set_faults()
                await until(lambda: sum(engine.driver.num_jobs for engine in engines) == 0)
                await until(here.is_idle)

        run(test)


def test_generate_has_several_responses(tmp_path: Path) -> None:
    """By gRPC: each chunk says which response it is of, and the outcome counts all."""
    with two_engines(tmp_path) as engines:

        async def test() -> None:
            async with cluster(engines) as here:
                request = common_pb2.Request(
                    request_id="g", model=MODEL, max_tokens=5, ignore_eos=True, num_sequences=2
                )
                prompts = scheduler_pb2.Prompts(texts=["a", "b c d"])
                texts: dict[int, str] = defaultdict(str)
                outcome = common_pb2.Outcome()
                async for event in here.scheduler.Generate(
                    scheduler_pb2.GenerateRequest(request=request, prompts=prompts)
                ):
                    if event.HasField("chunk"):
                        texts[event.chunk.index] += event.chunk.text
                    if event.HasField("outcome"):
                        outcome = event.outcome
                assert sorted(texts) == [0, 1, 2, 3]
                assert (outcome.num_sequences, outcome.output_tokens) == (4, 20)
                assert outcome.finish_reason == common_pb2.FINISH_REASON_LENGTH
                for wrong, error in (
                    (scheduler_pb2.Prompts(), "prompts: is empty; give at least one prompt"),
                    (scheduler_pb2.Prompts(texts=["a"] * (LIMIT + 1)), "n: 13 prompts with n = 1 ask for 13 responses"),
                ):
                    with pytest.raises(grpc.aio.AioRpcError, match=error) as caught:
                        one = common_pb2.Request(request_id="w", model=MODEL)
                        async for _ in here.scheduler.Generate(
                            scheduler_pb2.GenerateRequest(request=one, prompts=wrong)
                        ):
                            pass
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                await until(here.is_idle)

        run(test)


def test_structured_output_is_forecast_with_its_compilation(tmp_path: Path) -> None:
    """Named where it is approximated; a grammar that was compiled before costs nothing."""
    with two_engines(tmp_path) as engines:

        async def test() -> None:
            async with cluster(engines) as here:
                for name in ("first", "second"):
                    await here.openai.chat.completions.create(
                        model=MODEL, messages=HI, max_tokens=4, response_format=SCHEMA,
                        extra_headers={"x-request-id": name},
                    )  # fmt: skip
                decision = await here.explained("first")
                assert list(decision.forecast.approximations) == [GRAMMAR_COMPILATION]
                assert decision.forecast.ttft_s >= 0.05
                await until(here.is_idle)

        run(test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "n": 0}, "n: must lie between 1 and 16384, not 0"),
        ({"prompt": "a", "n": 20_000}, "n: must lie between 1 and 16384, not 20000"),
        ({"prompt": "a", "n": "3"}, "n: must be a whole number, not '3'"),
        ({"prompt": []}, "prompt: is an empty list; give at least one prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]: is empty"),
        (
            {"prompt": ["a"] * 4, "n": 4},
            (
                "n: 4 prompts with n = 4 ask for 16 responses, more than the limit of 12; split the request "
                "(--max-responses)"
            ),
        ),
    ],
)
def test_bad_numbers_of_responses(body: dict[str, Any], message: str) -> None:
    """One line with status 400."""

    async def test() -> None:
        async with gateway(completes, max_responses=LIMIT) as here:
            reply = await here.client.post("/v1/completions", json={"model": MODEL, **body})
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)
            assert not here.sidecars[0].reserved_ids

    run(test)


def test_schedulers_get_the_responses_and_prompts() -> None:
    """A gateway without the decision passes their numbers, and divides the estimated tokens among the prompts."""

    async def test() -> None:
        async with scene(completes) as here:
            await here.client.post(
                "/v1/completions", json={"model": "tiny", "prompt": ["a" * 40, "b" * 80], "n": 3, "max_tokens": 4}
            )
            await here.client.post("/v1/completions", json={"model": "tiny", "prompt": [[1, 2, 3], [4]]})
            await here.client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
            texts, ids, single = (one.request for one in here.scheduler.asked)
            assert (texts.num_sequences, texts.num_prompts, texts.prompt_tokens) == (3, 2, 30)
            assert [one.prompt_tokens for one in texts.prompts] == [10, 20]
            assert (ids.num_sequences, [one.prompt_tokens for one in ids.prompts]) == (0, [3, 1])
            assert (single.num_sequences, single.num_prompts, len(single.prompts)) == (0, 0, 0)

    run(test)
