"""What is known of prefix caches: by sidecars exactly, by schedulers about; against what emulated engines find."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from predictor.config import EngineConfig
from protos.block.v1 import common_pb2, scheduler_pb2
from services.block_names import block_names
from services.emulator.tokens import token_ids
from services.instances import Instance, Listed
from tests.services.emulator.running import Emulated, emulated
from tests.services.predictor_server.asking import node_of
from tests.services.scheduler_server.running import Client, run, scheduler

BLOCK_TOKENS = 16
NUM_BLOCKS = 80
CONFIG = EngineConfig(
    max_num_seqs=8, num_gpu_blocks=NUM_BLOCKS + 1, max_model_len=2048, block_size=BLOCK_TOKENS,
    enable_prefix_caching=True,
)  # fmt: skip
NUM_REQUESTS = 60


@contextmanager
def two_engines(folder: Path) -> Iterator[dict[str, Emulated]]:
    """Engines with small caches."""
    with ExitStack() as stack:
        running = {}
        for name in "ab":
            (folder / name).mkdir()
            running[name] = stack.enter_context(emulated(folder / name, CONFIG))
        yield running


@asynccontextmanager
async def scheduler_over(engines: dict[str, Emulated]) -> AsyncIterator[Client]:
    """The engines' sidecars, and a scheduler."""
    async with node_of({name: engine.state_file for name, engine in engines.items()}) as node:
        instances = [
            Instance(
                instance_id=name,
                engine_url=str(engine.client.base_url).rstrip("/"),
                sidecar_address=f"127.0.0.1:{node.port}",
                models=("tiny",),
            )
            for name, engine in engines.items()
        ]
        async with scheduler(Listed(instances)) as client:
            yield client


def talks(rng: random.Random) -> Iterator[str]:
    """Conversations that grow turn by turn under one of two long instructions, more of them than caches hold."""
    heads = ["You are a helpful assistant. " * 20, "Answer as a pirate would, matey! " * 15]
    so_far = [f"{heads[number % 2]}{number}" for number in range(12)]
    for _ in range(NUM_REQUESTS):
        which = rng.randrange(len(so_far))
        so_far[which] += "".join(f" {rng.randrange(10**6)}" for _ in range(rng.randint(10, 60)))
        if len(so_far[which]) > 2500:
            so_far[which] = so_far[which][:700]
        yield so_far[which]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a decision rested on, what became of the request, and what a cache that forgets nothing would have had."""

    decision: common_pb2.Decision
    outcome: common_pb2.Outcome
    most_tokens: int


async def asked(client: Client, policies: Sequence[str], *, named: bool) -> list[Seen]:
    """Have one answer after the other, by policies in turn; prompts are sent as token ids, or as text."""
    seen, sent = [], {"a": set[bytes](), "b": set[bytes]()}
    for prompt, policy in zip(talks(random.Random(5)), cycle(policies), strict=False):
        ids = [one % 2**31 if named else one for one in token_ids(prompt)]  # as far as the wire carries them
        names = block_names(ids, BLOCK_TOKENS)
        request = client.request(
            model="tiny", prompt_tokens=len(ids), output_tokens=None, max_tokens=4, ignore_eos=True
        )
        message = scheduler_pb2.GenerateRequest(request=request, explain=True, policy=policy)
        if named:
            message.prompt_token_ids.ids.extend(ids)
        else:
            message.prompt = prompt
        first, *_, last = [event async for event in client.stub.Generate(message)]
        there = sent[first.decision.instance.instance_id]
        most_tokens = BLOCK_TOKENS * sum(name in there for name in names)
        there.update(names)
        seen.append(Seen(decision=first.decision, outcome=last.outcome, most_tokens=most_tokens))
    return seen


def test_sidecars_know_exactly_what_engines_will_find(tmp_path: Path) -> None:
    """The hits of each forecast are those of the engine, to the token, also where blocks had to go."""

    async def test() -> None:
        async with scheduler_over(engines) as client:
            seen = await asked(client, ["block_ttft", "block_ttft", "expr: -predicted_ttft_s"], named=True)
        found = [one.outcome.prefix_hit_tokens for one in seen]
        assert [one.decision.forecast.prefix_hit_tokens for one in seen] == found
        assert {one.decision.instance.instance_id for one in seen} == {"a", "b"}
        assert sum(hits > 0 for hits in found) > NUM_REQUESTS / 2
        assert sum(one.most_tokens > hits + BLOCK_TOKENS for one, hits in zip(seen, found, strict=True)) > 3

    with two_engines(tmp_path) as engines:
        run(test)


@pytest.mark.parametrize("named", [True, False])
def test_schedulers_know_about_what_engines_will_find(tmp_path: Path, named: bool) -> None:
    """From what they sent where: by token blocks nearly always exactly, by blocks of text to within one."""

    async def test() -> None:
        async with scheduler_over(engines) as client:
            seen = await asked(
                client, ["expr: -prefix_hit_tokens", "expr: -prefix_hit_tokens", "expr: prefix_hit_tokens"], named=named
            )
        guessed, found = [], []
        for one in seen:
            chosen = one.decision.instance.instance_id
            (candidate,) = (there for there in one.decision.candidates if there.instance_id == chosen)
            guessed.append(candidate.indicators.more["prefix_hit_tokens"])
            found.append(one.outcome.prefix_hit_tokens)
        errors = np.abs(np.array(guessed) - np.array(found))
        assert np.mean(found) > 100  # there is something to find
        assert np.mean(errors <= (BLOCK_TOKENS if named else 6 * BLOCK_TOKENS)) > 0.8, errors
        assert np.mean(errors) < (0.1 if named else 0.35) * np.mean(found)

    with two_engines(tmp_path) as engines:
        run(test)
