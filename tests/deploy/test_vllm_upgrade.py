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
DRAIN_S = 1.0  # after which the remaining streams continue on the other engine
ENDINGS = "abcdefgh"  # last tokens of prompts, on which alone the greedy text depends
STORY = "Once upon a time there was an engine of an old version. "


@dataclass(slots=True, kw_only=True)
class Load:
    """Requests by their numbers, in the order of sending, and the outcomes of those that have ended."""

    placed: list[tuple[int, Placed]] = field(default_factory=list)
    num_sent: int = 0

    def since(self, first: int) -> list[Placed]:
        """Return the outcomes of the request with this number and of later ones."""
        return [one for number, one in self.placed if number >= first]

    def num_served(self, instance: str, first: int) -> int:
        """Count the requests from this number on that an instance has served."""
        return sum(one.instance == instance for one in self.since(first))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines of the older version, whose greedy text shows each lost or repeated token."""
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
    """Send requests without a pause within a context; all have ended when it exits."""
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


async def run_command(old: Fleet, *words: str) -> None:
    """Run a command of `block` for operators."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *words, "--operator", old.operator,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def require_version(old: Fleet, name: str, expected: str) -> None:
    """Require that an engine exports this version, and that forecasts use the rules of this version."""
    await old.until(name, lambda response: response.state == READY)
    with old.state_of(name) as reader:
        assert config_of(reader.read()).vllm_version == expected
    assert rules_for(expected).is_exact
    (forecast,) = await old.forecasts(name, request("asked", 40, 20))
    assert forecast.e2e_s > forecast.ttft_s > 0
    assert not [sentence for sentence in forecast.approximations if "vLLM" in sentence]


def test_an_engine_is_upgraded_under_load(old: Fleet) -> None:
    """It is drained, stopped, started with the newer version, and serves again; no request fails or loses a token."""

    async def all_serve(load: Load) -> None:
        first = load.num_sent
        await until(lambda: all(load.num_served(name, first) >= NUM_CLIENTS for name in POLICIES), 2 * PATIENCE_S)

    async def test() -> None:
        before, after = version(older_interpreter()), version()
        assert before != after
        engine = old.engines[UPGRADED]
        await old.use("round_robin")
        for name in POLICIES:
            await require_version(old, name, before)
        expected = {ending: (await old.stream(f"{STORY}{ending}", ANSWER_TOKENS)).text for ending in ENDINGS}
        assert len({*expected.values()}) == len(ENDINGS)
        async with loaded(old) as load:
            await all_serve(load)
            await run_command(
                old, "drain", UPGRADED, "--deadline-s", str(DRAIN_S), "--wait", "--wait-s", str(PATIENCE_S)
            )
            await asyncio.to_thread(engine.terminate)
            await until(lambda: not engine.state.exists())
            first_without = load.num_sent  # earlier requests may have started there
            engine.start(python=None)
            await asyncio.to_thread(engine.until, engine.is_healthy, START_S)
            await require_version(old, UPGRADED, after)
            assert load.num_served(UPGRADED, first_without) == 0
            assert load.num_served(OTHER, first_without) > 0
            await run_command(old, "undrain", UPGRADED)
            await all_serve(load)
            await require_version(old, UPGRADED, after)
            await require_version(old, OTHER, before)
            await old.use("block")
            first = load.num_sent
            await until(lambda: len(load.since(first)) >= NUM_CLIENTS, 2 * PATIENCE_S)
        assert [(one.failure, one.num_tokens) for _, one in load.placed] == [(None, ANSWER_TOKENS)] * load.num_sent
        assert [one.text for _, one in load.placed] == [expected[ending_of(number)] for number, _ in load.placed]
        assert all(one.predicted_e2e_ms > 0 for one in load.since(first))

    old.run(test(), LIMIT_S)
