"""Targets that are read in one call: latency profiles, and the parameters of KV transfers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from predictor.profile import load_profile, profile_from_json, profile_names, profile_to_json
from scripts.fuzzing.inputs import TEXTS, Values, any_json, document, written
from scripts.fuzzing.targets import require
from services.emulator.transfer_params import leg_and_blocks
from services.http.kv_transfer import KV_CONNECTORS, decode_body, prefill_body, read_prefill_reply, with_cached_tokens
from services.http.openai_body import names_kv_blocks, read_body

Draw = Callable[[Random], bytes]


@dataclass(kw_only=True)
class Parser:
    """A target that reads an input in one call, in which only ValueError is declared."""

    name: str
    draw: Draw
    read: Callable[[bytes], object]
    valid: bytes  # which is read without an error

    async def drawn(self, draw: Random) -> bytes:
        """Draw an input by the grammar."""
        return self.draw(draw)

    async def put(self, data: bytes) -> None:
        """Read an input."""
        with suppress(ValueError):
            self.read(data)

    async def audit(self) -> None:
        """Read the valid input."""
        self.read(self.valid)
        await asyncio.sleep(0)


# Profiles.


@asynccontextmanager
async def open_profile(_: Path) -> AsyncIterator[Parser]:
    """Read latency profiles, and write those that are accepted again."""
    texts = [profile_to_json(load_profile(name)).encode() for name in profile_names()]
    short = sorted(texts, key=len)[:6]

    def read(data: bytes) -> None:
        profile = profile_from_json(data.decode())
        profile_from_json(profile_to_json(profile))

    yield Parser(name="profile", draw=lambda draw: changed_json(draw, draw.choice(short)), read=read, valid=short[0])


def changed_json(draw: Random, text: bytes) -> bytes:
    """Replace, remove or add some values of a document."""
    data = json.loads(text)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = data
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and draw.random() < 0.8:
                at = at[key]
                continue
            kind = draw.randrange(8)
            if kind == 0:
                del at[key]
            elif kind == 1 and isinstance(at, dict):
                at[draw.choice(TEXTS)] = any_json(draw)
            elif kind == 2 and isinstance(at, list):
                at += at[:50]
            else:
                at[key] = any_json(draw)
            break
    return written(draw, data)


# Parameters of KV transfers.


@asynccontextmanager
async def open_kv_params(_: Path) -> AsyncIterator[Parser]:
    """Read what is around the two legs of a request: its body, the reply to its prefill leg, its parameters."""
    held: Values = {
        "do_remote_prefill": lambda _: True,
        "remote_block_ids": lambda _: [[1, 2, 3]],
        "remote_engine_id": lambda _: "e",
        "remote_request_id": lambda _: "r",
        "remote_host": lambda _: "127.0.0.1",
        "remote_port": lambda _: 5600,
    }
    more: Values = {
        "transfer_mode": lambda draw: draw.choice(("pull", "push")),
        "remote_prefill_cached_tokens": lambda _: 3,
    }

    def reply(draw: Random) -> bytes:
        params = document(draw, held, more)
        usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": any_json(draw)}}
        return written(draw, {"kv_transfer_params": params, "usage": usage, "choices": [{"text": "a"}]})

    def read(data: bytes) -> None:
        with suppress(ValueError):
            names_kv_blocks(data)
        bodies = []
        for chat in (False, True):
            with suppress(ValueError):
                read_body(data, chat=chat)
                bodies.append(data)
        bodies.append(b'{"prompt": "a", "kv_transfer_params": null}')
        for connector in KV_CONNECTORS.values():
            for body in bodies:
                json.loads(prefill_body(body, connector))
            with suppress(ValueError):
                prefilled = read_prefill_reply(data, connector)
                if prefilled is not None:
                    made = [json.loads(decode_body(body, prefilled)) for body in bodies]
                    require(all(isinstance(one, dict) for one in made), "the body of a decode leg is no object")
        with_cached_tokens(data, 7)
        try:
            given = json.loads(data)
        except RecursionError:  # the emulated engine's own reading refuses it
            return
        if isinstance(given, dict):
            params = given.get("kv_transfer_params")
            leg_and_blocks(params if isinstance(params, dict) else given)

    valid = json.dumps({"kv_transfer_params": {name: make(Random(0)) for name, make in held.items()}}).encode()
    yield Parser(name="kv_params", draw=reply, read=read, valid=valid)
