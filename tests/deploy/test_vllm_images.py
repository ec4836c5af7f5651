"""A real vLLM engine with images in its prompts: its encoder's limits, its tokens, placements and forecasts."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from predictor.approximations import ENCODER_TIME, OTHER_MEDIA
from predictor.request import EncoderInput, RequestFacts
from protos.block.v1 import common_pb2
from services.engine_state.snapshot import config_of
from tests.deploy.engines import IMAGE_TOKENS, LONGEST, MODEL, PROFILE, need_vllm, tiny_vision_model
from tests.deploy.fleet import READY, Fleet, fleet
from tests.deploy.forecasting import forecasting
from tests.services.predictor_server.running_sidecars import request

pytestmark = pytest.mark.vllm

NAME = "fcfs"
QUESTION = "What is this?"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One engine that reads images and the services in front of it, for all tests of this file."""
    need_vllm()
    folder = tmp_path_factory.mktemp("fleet")
    with fleet(folder, (NAME,), model=tiny_vision_model(folder / "model")) as running:
        yield running


def png(colour: int, width: int = 64, height: int = 48) -> str:
    """Return the `data:` URL of an image of one colour."""
    rows = (b"\0" + bytes([colour, 0, 255 - colour]) * width) * height

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def asking(colour: int, text: str = QUESTION) -> list[dict[str, Any]]:
    """Return a conversation with an image."""
    image = {"type": "image_url", "image_url": {"url": png(colour)}}
    return [{"role": "user", "content": [{"type": "text", "text": text}, image]}]


async def answered(one: Fleet, messages: list[dict[str, Any]], max_tokens: int, name: str = "") -> Any:
    """Return the reply of the gateway, and the headers."""
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    headers = {"x-request-id": name} if name else {}
    raw = await one.client.chat.completions.with_raw_response.create(
        **asked, extra_body={"ignore_eos": True}, extra_headers=headers
    )
    return raw.parse(), raw.headers


def test_limits_of_the_encoder_are_in_the_state_file(one: Fleet) -> None:
    """Forecasts of requests with images name what they do not know."""

    async def test() -> None:
        await one.until(NAME, lambda response: response.state == READY)
        with one.state_of(NAME) as reader:
            config = config_of(reader.read())
        assert config.max_num_encoder_input_tokens >= IMAGE_TOKENS
        assert config.encoder_cache_size >= IMAGE_TOKENS
        image = common_pb2.EncoderInput(position=0, tokens=IMAGE_TOKENS, identity=b"1")
        with_image, plain = await one.forecasts(
            NAME, request("image", IMAGE_TOKENS + 40, 20, encoder_inputs=[image]), request("plain", 40, 20)
        )
        assert {ENCODER_TIME, OTHER_MEDIA} <= {*with_image.approximations}
        assert not {ENCODER_TIME, OTHER_MEDIA} & {*plain.approximations}
        assert with_image.ttft_s > plain.ttft_s

    one.run(test())


def test_a_conversation_with_an_image_is_placed(one: Fleet) -> None:
    """The engine counts the tokens of the image, and finds one that it has seen in its prefix cache."""

    async def test() -> None:
        text, _ = await answered(one, [{"role": "user", "content": QUESTION}], 4)
        cached = []
        for colour in (10, 10, 200):
            reply, headers = await answered(one, asking(colour), 4)
            assert headers["x-block-instance"] == NAME
            assert float(headers["x-block-predicted-e2e-ms"]) > 0
            assert reply.usage.completion_tokens == 4
            assert 0 <= reply.usage.prompt_tokens - text.usage.prompt_tokens - IMAGE_TOKENS <= 1  # a line break
            cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == 0 < cached[1]
        assert cached[2] == 0

    one.run(test())


def test_its_requests_are_forecast(one: Fleet) -> None:
    """At the pace of the engine's own steps, which a new sidecar learns together with the encoder's time."""

    async def test() -> None:
        for number in range(16):
            text, answer = "x" * (20 + 29 * number % 200), 20 + 13 * number % 40
            prompt = IMAGE_TOKENS + len(f"user:\n{text};assistant:")
            assert prompt + answer < LONGEST
            image = EncoderInput(position=0, tokens=IMAGE_TOKENS, identity=number + 1)
            candidate = RequestFacts(
                request_id=f"f{number}", prompt_tokens=prompt, output_tokens=answer, encoder_inputs=(image,)
            )
            reply, _ = await compared.compare(candidate, answered(one, asking(number, text), answer, f"f{number}"))
            assert reply.usage.completion_tokens == answer
        compared.require_accuracy(learnt_from=4)

    with forecasting(one.engines[NAME], PROFILE) as compared:
        one.run(test())
