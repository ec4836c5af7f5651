"""Two real vLLM engines, one of them with priorities, behind sidecars, a tagger, a scheduler and a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai

from predictor.profile import profile_to_json
from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.cluster.child import Child
from services.engine_state.reader import Reader
from tests.deploy.asking import Placed, stream
from tests.deploy.engines import BLOCK_SIZE, MODEL, PROFILE, START_S, Engine, tiny_model
from tests.services.cluster.living import PATIENCE_S, until

LIMIT_S = 300.0  # of one test
POLICIES = ("fcfs", "priority")
READY = common_pb2.INSTANCE_STATE_READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The running processes, their event loop, and the official client of the gateway."""

    runner: asyncio.Runner
    model: Path
    engines: dict[str, Engine]
    children: dict[str, Child]
    client: openai.AsyncOpenAI

    def run(self, test: Coroutine[Any, Any, None], limit_s: float = LIMIT_S) -> None:
        """Run a test on the fleet's own loop."""

        async def limited() -> None:
            async with asyncio.timeout(limit_s):
                await test

        self.runner.run(limited())

    async def predict(self, name: str, *requests: common_pb2.Request) -> predictor_pb2.PredictResponse:
        """Send requests to an engine's sidecar."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.children[f'predictor-{name}'].port}") as channel:
            stub = predictor_pb2_grpc.PredictorStub(channel)
            response: predictor_pb2.PredictResponse = await stub.Predict(
                predictor_pb2.PredictRequest(requests=requests), timeout=PATIENCE_S
            )
            return response

    async def until(
        self, name: str, holds: Callable[[predictor_pb2.PredictResponse], bool], within_s: float = PATIENCE_S
    ) -> predictor_pb2.PredictResponse:
        """Send requests to an engine's sidecar until a condition holds."""
        response: list[predictor_pb2.PredictResponse] = []

        async def is_so() -> bool:
            response[:] = [await self.predict(name)]
            return holds(response[0])

        await until(is_so, within_s)
        return response[0]

    async def forecasts(self, name: str, *requests: common_pb2.Request) -> list[common_pb2.Forecast]:
        """Return an engine's forecasts of requests."""
        await self.until(name, lambda response: response.state == READY)
        predictions = (await self.predict(name, *requests)).predictions
        assert all(one.HasField("forecast") for one in predictions), predictions
        return [one.forecast for one in predictions]

    async def use(self, policy: str) -> None:
        """Make the scheduler use another policy from now on."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.children['scheduler'].port}") as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            await stub.UsePolicy(scheduler_pb2.UsePolicyRequest(policy=policy), timeout=PATIENCE_S)

    async def stream(self, prompt: str, max_tokens: int, model: str = MODEL) -> Placed:
        """Stream a response of this length from the gateway."""
        return await stream(self.client, prompt, max_tokens, model=model)

    @property
    def operator(self) -> str:
        """The URL of the scheduler's port for operators."""
        return f"http://127.0.0.1:{self.children['scheduler'].metrics_port}"

    @contextmanager
    def state_of(self, name: str) -> Iterator[Reader]:
        """Read an engine's state file."""
        reader = Reader(str(self.engines[name].state))
        try:
            yield reader
        finally:
            reader.close()

    async def until_idle(self) -> None:
        """Wait until no engine has requests, by its sidecar."""
        for name in self.engines:
            await self.until(
                name, lambda response: response.indicators.num_running + response.indicators.num_waiting == 0
            )


@contextmanager
def fleet(
    folder: Path,
    policies: Sequence[str] = POLICIES,
    *options: str,
    model: Path | None = None,
    python: Path | None = None,
) -> Iterator[Fleet]:
    """Run a fleet with an engine of each scheduling policy within a context; all its processes end with it.

    `options` are of all engines, and `python` has their vLLM; without a `model` they have random weights.
    """
    model, profile = model or tiny_model(folder / "model"), folder / "profile.json"
    profile.write_text(profile_to_json(PROFILE))
    engines = {
        name: Engine(model, folder / f"{name}.state", folder / f"{name}.log", "--scheduling-policy", name, *options)
        for name in policies
    }
    with asyncio.Runner() as runner:
        children: dict[str, Child] = {}
        try:
            for engine in engines.values():
                engine.start(python)
            runner.run(_start_all(children, engines, profile, model, folder))
            client = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{children['gateway'].port}/v1", api_key="any", max_retries=0,
                timeout=4 * PATIENCE_S,
            )  # fmt: skip
            yield Fleet(runner=runner, model=model, engines=engines, children=children, client=client)
            runner.run(client.close())
        finally:
            for engine in engines.values():
                engine.kill()
            runner.run(_stop_all(children))


async def _start_all(
    children: dict[str, Child], engines: dict[str, Engine], profile: Path, model: Path, folder: Path
) -> None:
    """Start everything except the engines, which are loading, and wait for them."""

    async def start(child: Child) -> Child:
        children[child.name] = child
        await child.start()
        return child

    for name, engine in engines.items():
        flags = ("--state-file", str(engine.state), "--engine-url", engine.url, "--profile", str(profile))
        await start(
            Child(f"predictor-{name}", "predictor", "--instance-id", name, *flags, "--stall-s", "60", "--health-s", "5")
        )
    tagger = await start(Child("tagger", "tagger"))
    listed = folder / "instances.json"
    listed.write_text(
        json.dumps(
            [
                {
                    "instance_id": name,
                    "engine_url": engine.url,
                    "sidecar_address": f"127.0.0.1:{children[f'predictor-{name}'].port}",
                }
                for name, engine in engines.items()
            ]
        )
    )
    scheduler = await start(
        Child(
            "scheduler", "scheduler", "--instances-file", str(listed), "--tagger", f"127.0.0.1:{tagger.port}",
            "--sidecar-deadline-ms", "20000", "--tagger-deadline-ms", "10000", "--poll-s", "0.1", "--metrics-port", "0",
        )
    )  # fmt: skip
    await start(
        Child(
            "gateway", "gateway", "--scheduler", f"127.0.0.1:{scheduler.port}", "--schedule-s", "60",
            "--connect-s", "20", "--tokenizer", str(model / "tokenizer.json"), "--block-tokens", str(BLOCK_SIZE),
        )
    )  # fmt: skip
    for engine in engines.values():
        await asyncio.to_thread(engine.until, engine.is_healthy, START_S)


async def _stop_all(children: dict[str, Child]) -> None:
    for child in reversed(list(children.values())):
        await child.stop()
