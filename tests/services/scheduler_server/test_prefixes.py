"""Prefix hits as predicted by sidecars, exactly, and by schedulers, about, compared with those of emulated engines."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor.config import EngineConfig
from protos.block.v1 import common_pb2, scheduler_pb2
from scheduler.prefix.kv_block_hash import kv_block_hashes
from services.emulator.tokens import chat_text, token_ids, token_text
from services.instances.instance import Instance
from services.instances.sources import Listed
from tests.services.emulator.running import Emulated, emulated
from tests.services.predictor_server.running_sidecars import node_of
from tests.services.scheduler_server.running import Client, run, scheduler

BLOCK_TOKENS = 16
NUM_BLOCKS = 80
CONFIG = EngineConfig(
    max_num_seqs=8, num_gpu_blocks=NUM_BLOCKS + 1, max_model_len=2048, block_size=BLOCK_TOKENS,
    enable_prefix_caching=True,
)  # fmt: skip
NUM_REQUESTS = 60
IDS, TEXT, CHATS = "ids", "text", "chats"


@contextmanager
def two_engines(folder: Path) -> Iterator[dict[str, Emulated]]:
    """Run two emulated engines with small caches."""
    with ExitStack() as stack:
        running = {}
        for name in "ab":
            (folder / name).mkdir()
            running[name] = stack.enter_context(emulated(folder / name, CONFIG))
        yield running


@asynccontextmanager
async def scheduler_over(engines: dict[str, Emulated], **settings: Any) -> AsyncIterator[Client]:
    """Serve the sidecars of engines, and a scheduler over them."""
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
        async with scheduler(Listed(instances), **settings) as client:
            yield client


def conversations(rng: random.Random) -> Iterator[str]:
    """Yield prompts of growing conversations under one of two long instructions; the caches hold only some of them."""
    heads = ["You are a helpful assistant. " * 20, "Answer as a pirate would, matey! " * 15]
    so_far = [f"{heads[number % 2]}{number}" for number in range(12)]
    for _ in range(NUM_REQUESTS):
        which = rng.randrange(len(so_far))
        so_far[which] += "".join(f" {rng.randrange(10**6)}" for _ in range(rng.randint(10, 60)))
        if len(so_far[which]) > 2500:
            so_far[which] = so_far[which][:700]
        yield so_far[which]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A decision, the outcome of the request, and the hits in an unbounded cache."""

    decision: common_pb2.Decision
    outcome: common_pb2.Outcome
    max_hit_tokens: int


TURN_WORDS = 60


def conversation(prompt: str) -> list[tuple[str, str]]:
    """Make turns of a prompt, in words of three letters: a token each, whose id a tokenizer's table can hold."""
    letters = prompt.replace(" ", "")
    words = [letters[start : start + 3] for start in range(0, len(letters), 3)]
    turns = [" ".join(words[start : start + TURN_WORDS]) for start in range(0, len(words), TURN_WORDS)]
    return [("assistant" if number % 2 else "user", text) for number, text in enumerate(turns)]


def tokenizer_in(folder: Path) -> str:
    """Write the tokenizer of the emulated engines, as far as these conversations need it, and their chat template."""
    used = {token for prompt in conversations(random.Random(5)) for token in token_ids(chat_text(conversation(prompt)))}
    made = {
        "version": "1.0", "added_tokens": [],
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": r" ?[^\s]{1,4}|\s"}, "behavior": "Isolated", "invert": False,
        },
        "model": {"type": "WordLevel", "vocab": {token_text(token): token for token in used}, "unk_token": "?"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "chat_template.jinja").write_text(
        "{% for one in messages %}<|{{ one.role }}|>\n{{ one.content }}\n{% endfor %}<|assistant|>\n"
    )
    return str(folder / "tokenizer.json")


async def results_of(client: Client, policies: Sequence[str], *, sent_as: str) -> list[Result]:
    """Send the prompts one after the other, by policies in turn, as token ids, as text, or as chats."""
    seen, sent = [], {"a": set[bytes](), "b": set[bytes]()}
    for prompt, policy in zip(conversations(random.Random(5)), cycle(policies), strict=False):
        request = client.request(model="tiny", prompt_tokens=0, output_tokens=None, max_tokens=4, ignore_eos=True)
        message = scheduler_pb2.GenerateRequest(request=request, explain=True, policy=policy)
        if sent_as == CHATS:
            ids = token_ids(chat_text(conversation(prompt)))
            for role, content in conversation(prompt):
                message.messages.add_struct().update({"role": role, "content": content})
        elif sent_as == IDS:
            ids = [one % 2**31 for one in token_ids(prompt)]  # the protocol has 31 bits
            message.prompt_token_ids.ids.extend(ids)
        else:
            ids = token_ids(prompt)
            message.request.prompt_tokens = len(ids)
            message.prompt = prompt
        first, *_, last = [event async for event in client.stub.Generate(message)]
        assert last.outcome.prompt_tokens == len(ids)
        names = kv_block_hashes(ids, BLOCK_TOKENS)
        cached = sent[first.decision.instance.instance_id]
        max_hit_tokens = BLOCK_TOKENS * sum(name in cached for name in names)
        cached.update(names)
        seen.append(Result(decision=first.decision, outcome=last.outcome, max_hit_tokens=max_hit_tokens))
    return seen


@pytest.mark.parametrize("sent_as", [IDS, CHATS])
def test_sidecars_predict_prefix_hits_exactly(tmp_path: Path, sent_as: str) -> None:
    """The hits of each forecast are those of the engine, to the token, also after evictions.

    This includes chats, because the scheduler has the tokenizer and the chat template.
    """

    async def test() -> None:
        async with scheduler_over(engines, tokenizer=tokenizer) as client:
            seen = await results_of(client, ["block_ttft", "block_ttft", "expr: -predicted_ttft_s"], sent_as=sent_as)
        found = [one.outcome.prefix_hit_tokens for one in seen]
        assert [one.decision.forecast.prefix_hit_tokens for one in seen] == found
        assert {one.decision.instance.instance_id for one in seen} == {"a", "b"}
        assert sum(hits > 0 for hits in found) > NUM_REQUESTS / 2
        assert sum(one.max_hit_tokens > hits + BLOCK_TOKENS for one, hits in zip(seen, found, strict=True)) > 3

    tokenizer = tokenizer_of(sent_as, tmp_path)
    with two_engines(tmp_path) as engines:
        run(test)


@pytest.mark.parametrize("sent_as", [IDS, TEXT, CHATS])
def test_schedulers_predict_prefix_hits_approximately(tmp_path: Path, sent_as: str) -> None:
    """From the prompts that they sent: by token blocks exactly except for evictions, by text to within one block."""

    async def test() -> None:
        async with scheduler_over(engines, tokenizer=tokenizer) as client:
            policies = ["expr: -prefix_hit_tokens", "expr: -prefix_hit_tokens", "expr: prefix_hit_tokens"]
            seen = await results_of(client, policies, sent_as=sent_as)
        predicted, found = [], []
        for one in seen:
            chosen = one.decision.instance.instance_id
            (candidate,) = (other for other in one.decision.candidates if other.instance_id == chosen)
            predicted.append(candidate.indicators.more["prefix_hit_tokens"])
            found.append(one.outcome.prefix_hit_tokens)
        errors = np.abs(np.array(predicted) - np.array(found))
        assert np.mean(found) > 100  # there are hits
        assert np.mean(errors <= (6 * BLOCK_TOKENS if sent_as == TEXT else 0)) > 0.8, errors
        assert np.mean(errors) < (0.35 if sent_as == TEXT else 0.1) * np.mean(found)

    tokenizer = tokenizer_of(sent_as, tmp_path)
    with two_engines(tmp_path) as engines:
        run(test)


def tokenizer_of(sent_as: str, folder: Path) -> str:
    """Return the path of the tokenizer, if the scheduler needs one."""
    if sent_as != CHATS:
        return ""
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    return tokenizer_in(folder)
