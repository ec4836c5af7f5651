"""A real vLLM engine is upgraded while its cluster serves: no request fails, and forecasts use the new version's rules."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from predictor.vllm_versions import rules_for
from services.engine_state.snapshot import config_of
from tests.conformance.vllm_side import older_interpreter, version
from tests.deploy.asking import Placed
from tests.deploy.engines import START_S, need_older_vllm, need_vllm, repeating_weights, tiny_model
from tests.deploy.fleet import POLICIES, READY, Fleet, fleet
from tests.services.cluster.living import PATIENCE_S, until
from tests.services.predictor_server.running_sidecars import request

pytestmark = pytest.mark.vllm

UPGRADED, OTHER = POLICIES
NUM_CLIENTS, ANSWER_TOKENS = 2, 80
LIMIT_S = 2 * START_S
DRAIN_S = 1.0  # then the streams that are left move
ENDINGS = "abcdefgh"  # of prompts: the text depends on the last token alone
STORY = "Once upon a time there was an engine of an old version. "


@dataclass(slots=True, kw_only=True)
class Load:
    """The requests so far, in the order in which they ended, each with the number of requests sent before it."""

    placed: list[tuple[int, Placed]] = field(default_factory=list)
    num_sent: int = 0

    def num_served(self, instance: str, since: int) -> int:
        """Count the answers by an instance after the first ones."""
        return sum(one.instance == instance for _, one in self.placed[since:])


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines of the older version; their greedy text repeats itself, so that each lost or doubled token shows."""
    need_vllm()
    need_older_vllm()
    folder = tmp_path_factory.mktemp("fleet")
    model = repeating_weights(tiny_model(folder / "model"), seed=3, share=0.95)
    with fleet(folder, POLICIES, "--load-format", "auto", model=model, python=older_interpreter()) as running:
        yield running


def ending_of(number: int) -> str:
    """Return the end of a request's prompt."""
    return ENDINGS[number % len(ENDINGS)]


@asynccontextmanager
async def loaded(old: Fleet) -> AsyncIterator[Load]:
    """Stream answers all the time while the block runs; at its end all requests have ended."""
    load, stopping = Load(), asyncio.Event()

    async def one_after_the_other() -> None:
        while not stopping.is_set():
            number = load.num_sent
            load.num_sent += 1
            load.placed.append((number, await old.stream(f"{number} {STORY}{ending_of(number)}", ANSWER_TOKENS)))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_CLIENTS):
            tasks.create_task(one_after_the_other())
        try:
            yield load
        finally:
            stopping.set()


async def order(old: Fleet, *words: str) -> None:
    """Run a command of `block` for operators."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *words, "--operator", old.operator,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def has_version(old: Fleet, name: str, expected: str) -> None:
    """Require that an engine shows this version, and that it is forecast by its very rules."""
    await old.until(name, lambda response: response.state == READY)
    with old.state_of(name) as reader:
        assert config_of(reader.read()).vllm_version == expected
    assert rules_for(expected).is_exact
    (forecast,) = await old.forecasts(name, request("asked", 40, 20))
    assert forecast.e2e_s > forecast.ttft_s > 0
    assert not [sentence for sentence in forecast.approximations if "vLLM" in sentence]


def test_an_engine_is_upgraded_under_load(old: Fleet) -> None:
    """It is drained, stopped, started with the newer version, and used again; no client notices."""

    async def all_serve(load: Load) -> None:
        since = len(load.placed)
        await until(lambda: all(load.num_served(name, since) >= NUM_CLIENTS for name in POLICIES), 2 * PATIENCE_S)

    def by_forecast(load: Load, first: int) -> list[Placed]:
        return [one for number, one in load.placed if number >= first]

    async def test() -> None:
        before, after = version(older_interpreter()), version()
        assert before != after
        engine = old.engines[UPGRADED]
        await old.use("round_robin")
        for name in POLICIES:
            await has_version(old, name, before)
        expected = {ending: (await old.stream(f"{STORY}{ending}", ANSWER_TOKENS)).text for ending in ENDINGS}
        assert len({*expected.values()}) == len(ENDINGS)
        async with loaded(old) as load:
            await all_serve(load)
            await order(old, "drain", UPGRADED, "--deadline-s", str(DRAIN_S), "--wait", "--wait-s", str(PATIENCE_S))
            await asyncio.to_thread(engine.terminate)
            await until(lambda: not engine.state.exists())
            stopped = len(load.placed) + NUM_CLIENTS  # those under way may have begun there
            engine.start(python=None)
            await asyncio.to_thread(engine.until, engine.is_healthy, START_S)
            await has_version(old, UPGRADED, after)
            assert load.num_served(UPGRADED, stopped) == 0
            assert load.num_served(OTHER, stopped) > 0
            await order(old, "undrain", UPGRADED)
            await all_serve(load)
            await has_version(old, UPGRADED, after)
            await has_version(old, OTHER, before)
            await old.use("block")
            first = load.num_sent
            await until(lambda: len(by_forecast(load, first)) >= NUM_CLIENTS, 2 * PATIENCE_S)
        assert [(one.failure, one.num_tokens) for _, one in load.placed] == [(None, ANSWER_TOKENS)] * load.num_sent
        assert [one.text for _, one in load.placed] == [expected[ending_of(number)] for number, _ in load.placed]
        assert all(one.predicted_e2e_ms > 0 for one in by_forecast(load, first))

    old.run(test(), LIMIT_S)
