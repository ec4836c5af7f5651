"""Images and audio in conversations: sizes read from heads, tokens, places, and errors of one line."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http.image_size import image_size
from services.http.media_parts import encoder_inputs, media_in, media_tokens
from services.http.openai_body import read_body
from services.http.prompt_tokens import PromptSizes
from tests.strategies import examples

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480)
GIF = b"GIF89a" + struct.pack("<HH", 320, 200)
JPEG = (
    b"\xff\xd8"
     b"\xff\xe0" + struct.pack(">H", 16) + bytes(14)
    + b"\xff\xff\xc2" + struct.pack(">HBHH", 11, 8, 600, 800) + bytes(6)
)  # fmt: skip
WEBP_LOSSY = b"RIFF" + bytes(4) + b"WEBPVP8 " + bytes(7) + b"\x9d\x01\x2a" + struct.pack("<HH", 300, 150)
WEBP_LOSSLESS = b"RIFF" + bytes(4) + b"WEBPVP8L" + bytes(4) + b"\x2f" + struct.pack("<I", 99 | 49 << 14) + bytes(5)
WEBP_EXTENDED = b"RIFF" + bytes(4) + b"WEBPVP8X" + bytes(8) + (639).to_bytes(3, "little") + (9).to_bytes(3, "little")


def data_url(data: bytes, kind: str = "image/png") -> str:
    """Write data as a URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(url: str) -> dict[str, Any]:
    """Return a part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def body_with(*parts: dict[str, Any], model: str = "qwen2-vl") -> bytes:
    """Return the body of a chat."""
    text = {"type": "text", "text": "What is this? " * 4}
    return json.dumps({"model": model, "messages": [{"role": "user", "content": [text, *parts]}]}).encode()


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (PNG, (640, 480)),
        (GIF, (320, 200)),
        (JPEG, (800, 600)),
        (WEBP_LOSSY, (300, 150)),
        (WEBP_LOSSLESS, (100, 50)),
        (WEBP_EXTENDED, (640, 10)),
        (PNG[:20], None),
        (b"\xff\xd8\xff", None),
        (b"BM" + bytes(100), None),
        (b"", None),
    ],
)
def test_the_size_of_an_image_is_in_its_first_bytes(head: bytes, size: tuple[int, int] | None) -> None:
    """Of other kinds, and of truncated images, it is not known."""
    assert image_size(head) == size


@examples(300)
@given(st.sampled_from((PNG, GIF, JPEG, WEBP_LOSSY, WEBP_LOSSLESS, WEBP_EXTENDED)), st.binary(max_size=60))
def test_damaged_images_have_some_size_or_none(head: bytes, damage: bytes) -> None:
    """Nothing is raised."""
    for end in range(0, len(head), 3):
        size = image_size(head[:end] + damage)
        assert size is None or min(size) > 0


def test_a_prompt_counts_its_images() -> None:
    """A data URL by its size, a remote one by an estimate; nothing is fetched."""
    openai = read_body(body_with(image(data_url(PNG)), image("https://example.com/a.png")), chat=True)
    sizes = [part.tokens("qwen2-vl") for part in openai.media]
    assert [(one.tokens, one.is_exact) for one in sizes] == [(391, True), (576, False)]
    text_only = read_body(body_with(), chat=True)
    prompts = PromptSizes(4.0)
    assert prompts.tokens(openai) == prompts.tokens(text_only) + 391 + 576
    prompts.learn(openai, 5000)  # an estimate says nothing about text
    assert prompts.ratio("qwen2-vl") == 4.0


def test_inputs_lie_in_the_prompt_in_their_order() -> None:
    """They do not overlap, and equal images have the same identity."""
    part = image(data_url(PNG))
    openai = read_body(
        body_with(part, {"type": "text", "text": "and this? " * 30}, part, image(data_url(GIF))), chat=True
    )
    total = PromptSizes(4.0).tokens(openai)
    inputs = encoder_inputs(openai.media, openai.model, total)
    assert [one.tokens for one in inputs] == [391, 391, 77]
    assert inputs[0].identity == inputs[1].identity != inputs[2].identity
    ends = [one.position + one.tokens for one in inputs]
    assert all(end <= one.position for end, one in zip(ends, inputs[1:], strict=False))
    assert ends[-1] <= total
    assert encoder_inputs(openai.media, openai.model, 10) == []


def test_audio_is_measured_by_its_header() -> None:
    """A second of WAV is a second; other formats are estimated by their bytes."""
    wav = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16) + bytes(32000)
    parts = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(bytes(16000)).decode(), "format": "mp3"}},
    ]
    media = media_in([{"role": "user", "content": parts}])
    assert [round(part.seconds or 0, 2) for part in media] == [1.0, 1.0]
    assert media_tokens(media, "qwen2-audio") == 50


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (image("data:image/png;base64,@@@"), r"messages[0].content[1].image_url.url: is no valid base64"),
        (image("data:image/png;base64,"), r"messages[0].content[1].image_url.url: is empty"),
        (image("data:image/png,abc"), r"messages[0].content[1].image_url.url: must be data in base64"),
        ({"type": "image_url"}, "messages[0].content[1].image_url: must be a string, not null"),
        (
            {"type": "image_url", "image_url": {"url": 5}},
            "messages[0].content[1].image_url.url: must be a string, not 5",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}},
            "messages[0].content[1].input_audio.data: is no valid base64",
        ),
    ],
)
def test_broken_data_is_refused_in_one_line(part: dict[str, Any], message: str) -> None:
    """The error names the part."""
    with pytest.raises(ValueError, match=r"^messages\[0\]") as error:
        read_body(body_with(part), chat=True)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_there_may_be_only_so_many() -> None:
    """More than 256 are refused."""
    with pytest.raises(ValueError, match="messages: have more than 256 images and other media"):
        media_in([{"role": "user", "content": [image("https://example.com/a.png")] * 257}])
