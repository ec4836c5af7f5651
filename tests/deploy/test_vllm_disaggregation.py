"""Real vLLM engines with NIXL behind the gateway: texts, leases, and engines killed at every stage of the two legs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from predictor.profile import profile_to_json
from services.cluster import Cluster, ClusterSettings, VllmSettings, running
from services.http.kv_transfer import REMOTE_DECODE
from tests.conformance.vllm_side import interpreter
from tests.deploy.engines import ENGINE_FLAGS, MODEL, PROFILE, START_S, need_vllm, random_weights, tiny_model
from tests.deploy.installing import PLUGIN, pip_install
from tests.services.cluster.living import metric_of
from tests.services.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("cluster")]

LIMIT_S = 2 * START_S  # of one test; an engine may have to start again
LEASE_S = 30.0
PREFILL, DECODES = "prefill-0", ("decode-0", "decode-1")
ENGINES = (PREFILL, *DECODES)  # their sidecars are predictor-0, predictor-1, …
FLAGS = (*ENGINE_FLAGS, "--load-format", "auto", "--dtype", "float32")
OUTPUT_TOKENS = 24
TABLES = """
[predictor]
profile = "{profile}"
metrics-port = 0
stall-s = 120.0
health-s = 10.0
[tagger]
metrics-port = 0
[scheduler]
poll-s = 0.1
sidecar-deadline-ms = 20000
tagger-deadline-ms = 10000
[gateway]
schedule-s = 60.0
connect-s = 20.0
hand-over-deadline-s = 20.0
first-byte-s = 120.0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response of the gateway."""

    text: str
    output_tokens: int
    instance: str
    prefill_instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """A prefill and two decode engines behind a gateway that sends every request in two legs if it can."""

    cluster: Cluster
    runner: asyncio.Runner
    client: httpx.AsyncClient

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test on the cluster's event loop; afterwards nothing may be reserved or held."""

        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await self.until_serving()
                await test
                await self.until_serving()
                await until(self.is_at_rest, LEASE_S + PATIENCE_S, "nothing is reserved, runs, waits or is held")

        self.runner.run(limited())

    async def until_serving(self) -> None:
        """Wait until every engine serves, and its sidecar knows it."""
        for number, name in enumerate(ENGINES):
            await until(lambda child=self.cluster.children[name]: child.serves, START_S, f"{name} serves")
            await until(lambda number=number: self.is_ready(number), START_S, f"{name} is followed")

    async def is_ready(self, number: int) -> bool:
        """Return whether a sidecar follows its engine."""
        return await self.metric(f"predictor-{number}", "block_engine_up") > 0

    async def metric(self, part: str, name: str, **labels: str) -> float:
        """Sum a metric of a part over the series with these labels."""
        return await metric_of(self.client, self.cluster.children[part], name, **labels)

    async def held_legs(self) -> float:
        """Return the number of prefill legs whose blocks were held."""
        return await self.metric(self.gateway, "block_gateway_prefill_legs_total", result="held")

    @property
    def gateway(self) -> str:
        """The name of the gateway."""
        return next(name for name in self.cluster.children if name.startswith("gateway"))

    async def is_at_rest(self) -> bool:
        """Return whether nothing is reserved, runs, waits or is held."""
        counts = [await self.metric(f"predictor-{number}", "block_reservations") for number in range(len(ENGINES))]
        used = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        counts += [await self.metric(name, f"vllm:{what}") for name in ENGINES for what in used]
        return not any(counts)

    async def answer(self, prompt: Sequence[int]) -> Answer:
        """Send a request to the gateway."""
        reply = await self.client.post(
            f"{next(iter(self.cluster.gateway_urls.values()))}/v1/completions", json=body_of(prompt)
        )
        assert reply.status_code == 200, reply.text
        content = reply.json()
        return Answer(
            text=content["choices"][0]["text"],
            output_tokens=content["usage"]["completion_tokens"],
            instance=reply.headers["x-block-instance"],
            prefill_instance=reply.headers.get("x-block-prefill-instance", ""),
        )

    async def whole(self, prompt: Sequence[int], engine: str = PREFILL, **fields: Any) -> dict[str, Any]:
        """Send a request to an engine itself."""
        reply = await self.client.post(f"{self.cluster.url_of(engine)}/v1/completions", json=body_of(prompt) | fields)
        assert reply.status_code == 200, reply.text
        content: dict[str, Any] = reply.json()
        return content

    def signal(self, engine: str, number: signal.Signals) -> None:
        """Send a signal to all processes of an engine."""
        os.killpg(self.cluster.children[engine].pid, number)

    @contextmanager
    def stopped(self, *engines: str) -> Iterator[Callable[[str], None]]:
        """Stop engines: they accept connections and do nothing. The context value lets one of them go on."""
        left = {name: self.cluster.children[name].pid for name in engines}
        for pid in left.values():
            os.killpg(pid, signal.SIGSTOP)

        def go_on(name: str) -> None:
            os.killpg(left.pop(name), signal.SIGCONT)

        try:
            yield go_on
        finally:
            for name in list(left):
                if self.cluster.children[name].pid == left[name] and self.cluster.children[name].serves:
                    go_on(name)

    async def chosen_of(self, engines: Sequence[str]) -> str:
        """Wait until one of these engines has a reservation, and return its name."""
        found: list[str] = []

        async def is_reserved() -> bool:
            found[:] = [
                name
                for name in engines
                if await self.metric(f"predictor-{ENGINES.index(name)}", "block_reservations") > 0
            ]
            return bool(found)

        await until(is_reserved, what="a reservation")
        (name,) = found
        return name


def body_of(prompt: Sequence[int]) -> dict[str, Any]:
    """Write a request for a response of a fixed length."""
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}


def prompt_of(seed: int, num_tokens: int = 300) -> list[int]:
    """Make a prompt that no other test sends."""
    return [100 + (seed * 7919 + place * place * 31 + place) % 1800 for place in range(num_tokens)]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """All processes, for all tests of this file."""
    need_vllm()
    folder = tmp_path_factory.mktemp("pools")
    pip_install(PLUGIN, folder / "site")
    (folder / "profile.json").write_text(profile_to_json(PROFILE))
    (folder / "cluster.toml").write_text(TABLES.format(profile=folder / "profile.json"))
    model = random_weights(tiny_model(folder / "model"), seed=3)
    settings = ClusterSettings(
        prefill=1, decode=2, engines_per_sidecar=1, port=0, policies=('block: disaggregate = "always"',),
        tables_file=str(folder / "cluster.toml"),
        vllm=VllmSettings(
            model=str(model), command=str(interpreter().parent / "vllm"), arguments=FLAGS
        ),
    )  # fmt: skip
    environment = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}",  # this checkout's plug-in
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        for name, value in environment.items():
            patch.setenv(name, value)
        stack = AsyncExitStack()

        async def start() -> Pools:
            cluster = await stack.enter_async_context(running(settings))
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=START_S))
            return Pools(cluster=cluster, runner=runner, client=client)

        try:
            yield runner.run(start())
        finally:
            runner.run(stack.aclose())


def test_the_text_is_that_of_a_whole_request(pools: Pools) -> None:
    """The decode engine fetches the whole prompt and computes the same tokens; another prompt has another text."""

    async def test() -> None:
        texts = set()
        for seed, num_tokens in ((1, 40), (2, 300), (3, 900)):
            before = {name: await pools.metric(name, "vllm:external_prefix_cache_hits_total") for name in DECODES}
            prompt = prompt_of(seed, num_tokens)
            answer = await pools.answer(prompt)
            assert (answer.prefill_instance, answer.output_tokens) == (PREFILL, OUTPUT_TOKENS)
            assert answer.instance in DECODES
            hits = await pools.metric(answer.instance, "vllm:external_prefix_cache_hits_total")
            assert hits - before[answer.instance] == num_tokens
            other = next(name for name in DECODES if name != answer.instance)
            assert answer.text == (await pools.whole(prompt, other))["choices"][0]["text"]
            changed = await pools.answer([prompt[0] + 1, *prompt[1:]])
            texts |= {answer.text, changed.text}
        assert len(texts) == 6

    pools.run(test())


def test_blocks_that_are_not_fetched_are_held_for_the_lease(pools: Pools) -> None:
    """A prefill leg without a decode leg occupies its blocks until the lease ends, and no longer."""

    async def test() -> None:
        before = await pools.metric(PREFILL, "vllm:nixl_num_kv_expired_reqs_total")
        reply = await pools.whole(prompt_of(11), kv_transfer_params=REMOTE_DECODE, max_tokens=1)
        assert len(reply["kv_transfer_params"]["remote_block_ids"][0]) > 1
        await until(lambda: is_used(pools), what="blocks are held")

        async def is_expired() -> bool:
            return await pools.metric(PREFILL, "vllm:nixl_num_kv_expired_reqs_total") > before

        await until(is_expired, LEASE_S + PATIENCE_S, "the lease ends")

    pools.run(test())


async def is_used(pools: Pools) -> bool:
    """Return whether the prefill engine has KV blocks in use."""
    return await pools.metric(PREFILL, "vllm:kv_cache_usage_perc") > 0


def test_a_decode_engine_killed_before_it_has_the_request(pools: Pools) -> None:
    """Another decode engine fetches the same blocks: the prompt is prefilled once."""

    async def test() -> None:
        prompt, legs = prompt_of(21), await pools.held_legs()
        with pools.stopped(PREFILL) as go_on:
            answering = asyncio.create_task(pools.answer(prompt))
            chosen = await pools.chosen_of(DECODES)
            pools.signal(chosen, signal.SIGKILL)
            await until(lambda: not pools.cluster.children[chosen].serves, what="it has ended")
            go_on(PREFILL)
            answer = await answering
        other = next(name for name in DECODES if name != chosen)
        assert (answer.instance, answer.prefill_instance) == (other, PREFILL)
        assert await pools.held_legs() == legs + 1
        assert answer.text == (await pools.whole(prompt))["choices"][0]["text"]

    pools.run(test())


def test_a_decode_engine_killed_before_its_first_byte(pools: Pools) -> None:
    """The prompt is prefilled again: the killed engine may have fetched the blocks, which frees them."""

    async def test() -> None:
        prompt, legs = prompt_of(26), await pools.held_legs()
        with pools.stopped(*DECODES) as go_on:
            answering = asyncio.create_task(pools.answer(prompt))
            chosen = await pools.chosen_of(DECODES)
            await until(lambda: has_more_legs(pools, legs), what="the prefill leg ends")
            pools.signal(chosen, signal.SIGKILL)
            other = next(name for name in DECODES if name != chosen)
            go_on(other)
            answer = await answering
        assert (answer.instance, answer.prefill_instance) == (other, PREFILL)
        assert await pools.held_legs() == legs + 2
        assert answer.text == (await pools.whole(prompt))["choices"][0]["text"]

    pools.run(test())


async def has_more_legs(pools: Pools, num: float) -> bool:
    """Return whether more prefill legs have ended with held blocks."""
    return await pools.held_legs() > num


def test_a_prefill_engine_killed_before_its_reply(pools: Pools) -> None:
    """The request is served whole, since no prefill engine is left; when it is back, requests have two legs again."""

    async def test() -> None:
        prompt = prompt_of(31)
        with pools.stopped(PREFILL):
            answering = asyncio.create_task(pools.answer(prompt))
            assert await pools.chosen_of([PREFILL]) == PREFILL
            pools.signal(PREFILL, signal.SIGKILL)
            answer = await answering
        assert (answer.prefill_instance, answer.output_tokens) == ("", OUTPUT_TOKENS)
        await pools.until_serving()
        again = await pools.answer(prompt_of(32))
        assert again.prefill_instance == PREFILL
        assert answer.text == (await pools.whole(prompt))["choices"][0]["text"]

    pools.run(test())


def test_a_prefill_engine_killed_after_its_reply(pools: Pools) -> None:
    """The fetch fails, and the request is served without the blocks."""

    async def test() -> None:
        prompt, legs = prompt_of(41), await pools.held_legs()
        with pools.stopped(*DECODES) as go_on:
            answering = asyncio.create_task(pools.answer(prompt))
            await until(lambda: has_more_legs(pools, legs), what="the prefill leg ends")
            pools.signal(PREFILL, signal.SIGKILL)
            for name in DECODES:
                go_on(name)
            answer = await answering
        assert answer.output_tokens == OUTPUT_TOKENS
        other = next(name for name in DECODES if name != answer.instance)
        assert answer.text == (await pools.whole(prompt, other))["choices"][0]["text"]

    pools.run(test())
